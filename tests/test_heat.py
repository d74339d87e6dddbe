"""Which experts were hot, from one run to the next."""

import numpy as np
import pytest

from mlx_k3.experts.heat import Heat, heat_file

LAYERS, EXPERTS = (1, 2, 4), (5, 5, 3)


@pytest.fixture
def heat():
    heat = Heat(LAYERS, EXPERTS)
    heat.add(2, np.array([[[0, 3], [3, 4]]]))
    heat.add(4, np.array([[2, 2], [2, 2]]))
    return heat


def test_uses_are_counted_and_the_most_used_come_first(heat):
    assert heat.hottest(2) == [(4, 2), (2, 3)]
    assert heat.hottest(100) == [(4, 2), (2, 3), (2, 0), (2, 4)]
    assert heat.hottest(0) == []
    assert Heat(LAYERS, EXPERTS).hottest(9) == []


def test_what_is_saved_is_read_again_and_counts_half(heat, tmp_path):
    file = tmp_path / "new folder" / "heat.npy"
    heat.save(file)
    again = Heat.load(file, LAYERS, EXPERTS)
    np.testing.assert_array_equal(again.counts, heat.counts / 2)
    assert [path.name for path in file.parent.iterdir()] == ["heat.npy"]


def test_another_models_or_a_damaged_file_counts_as_none(heat, tmp_path):
    file = tmp_path / "heat.npy"
    assert not Heat.load(file, LAYERS, EXPERTS).counts.any()
    heat.save(file)
    whole = file.read_bytes()
    assert not Heat.load(file, LAYERS[:2], EXPERTS[:2]).counts.any()
    for damaged in (b"", b"no array", whole[:-8], whole[:40]):
        file.write_bytes(damaged)
        assert not Heat.load(file, LAYERS, EXPERTS).counts.any()
    for wrong in (np.full((3, 5), np.nan), np.full((3, 5), -1.0)):
        np.save(file, wrong)
        assert not Heat.load(file, LAYERS, EXPERTS).counts.any()
    np.save(file, np.ones((3, 5)))
    # The last layer has three experts only.
    assert (4, 3) not in Heat.load(file, LAYERS, EXPERTS).hottest(100)


def test_a_folder_and_its_configuration_name_the_file(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    one, other = (heat_file(tmp_path, tmp_path / name) for name in ("a", "b"))
    assert one != other
    assert heat_file(tmp_path, tmp_path / "b" / ".." / "a") == one
    (tmp_path / "a" / "config.json").write_text("{ }")
    assert heat_file(tmp_path, tmp_path / "a") != one
