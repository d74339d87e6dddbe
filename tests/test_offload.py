"""Experts on demand give what resident experts give, to the bit, and read what they must."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_k3.loader import assemble

from .support.models import convert_golden

NAMES = ["tiny-text", "tiny-kimi-linear", "tiny-multimodal"]
TOP_K = {"tiny-text": 4, "tiny-kimi-linear": 2, "tiny-multimodal": 3}
EXPERTS = {"tiny-text": 64, "tiny-kimi-linear": 40, "tiny-multimodal": 32}


@pytest.fixture(scope="module")
def packages(golden, tmp_path_factory):
    out = tmp_path_factory.mktemp("packages")
    return {
        (name, form): convert_golden(golden, name, out, experts=form)
        for name in NAMES
        for form in ("copy", "reference")
    }


@pytest.fixture
def offloaded():
    """``assemble`` with a number of slots; closed at the end."""
    opened = []

    def assemble_with(folder, slots, **options):
        model = assemble(folder, slots=slots, **options)
        opened.append(model.offload)
        return model

    yield assemble_with
    for offload in opened:
        offload.close()


def prompt(n):
    return mx.array(np.random.default_rng(n).integers(0, 490, (1, n)))


def logits_of(model, ids, decode):
    """Logits of the prompt, and of ``decode`` greedy steps with their ids."""
    cache = model.make_cache()
    rows = [model(ids, cache=cache)]
    greedy = []
    for _ in range(decode):
        token = mx.argmax(rows[-1][:, -1:], axis=-1)
        greedy.append(token.item())
        rows.append(model(token, cache=cache))
    return mx.concatenate(rows, axis=1), greedy


@pytest.mark.parametrize("form", ["copy", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_equals_resident_to_the_bit(packages, offloaded, name, form):
    resident = assemble(packages[name, form])
    wants = {n: logits_of(resident, prompt(n), 8) for n in (1, 2, 7, 64, 65, 300)}
    for slots in (TOP_K[name], 2 * TOP_K[name], EXPERTS[name]):
        for prefetch in (True, False):
            model = offloaded(packages[name, form], slots, prefetch=prefetch)
            for n, (want, want_ids) in wants.items():
                got, ids = logits_of(model, prompt(n), 8)
                assert ids == want_ids, (slots, prefetch, n)
                assert mx.array_equal(got, want), (slots, prefetch, n)
