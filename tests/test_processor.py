"""Pictures on their way to the tower: sizes, padding, transparency, ids, and the golden values."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mlx_k3.errors import CheckpointError, K3Error, UnsupportedError
from mlx_k3.media.placing import expand, plain_ids
from mlx_k3.media.processor import Processor

from .support.pictures import MEDIA, golden_arrays, golden_media, noise, unpacked

K3 = Processor()


def whole(medium) -> np.ndarray:
    """The first frame of a medium as the tower reads it, ``[H, W, 3]``."""
    _, rows, columns = medium.grid
    p = medium.pixels.shape[-1]
    grid = medium.values(0, rows * columns).reshape(rows, columns, 3, p, p)
    return grid.transpose(0, 3, 1, 4, 2).reshape(rows * p, columns * p, 3)


def as_read(values) -> np.ndarray:
    return (np.asarray(values, np.float64) / 255 - 0.5) / 0.5


def test_the_release_settings_are_the_default(golden):
    assert Processor.from_folder(golden / "tiny-multimodal") == K3
    assert Processor.from_folder(golden / "tiny-text") == K3  # has no such file


def test_golden_pictures_are_prepared_exactly(golden):
    arrays, media = golden_arrays(golden), golden_media(golden)
    expected = unpacked(arrays["vision.pixel_values"], media)
    for name, grid in zip(MEDIA, arrays["vision.grid_thws"].tolist(), strict=True):
        assert media[name].grid == tuple(grid)
        assert np.abs(media[name].values() - expected[name]).max() <= 1e-6
        assert media[name].tokens == len(arrays[f"vision.projected.{name}"])


@pytest.mark.parametrize("name", ["rgba", "rgba_resize", "resize"])
def test_golden_preparations(golden, name):
    arrays = golden_arrays(golden)
    case = json.loads((golden / "tiny-multimodal" / "expected.json").read_text())["proc"][name]
    medium = replace(K3, **case["override"]).image(Image.fromarray(arrays[case["input"]]))
    assert [list(medium.grid)] == arrays[f"proc.{name}.grid_thws"].tolist()
    assert np.abs(medium.values() - arrays[f"proc.{name}.pixel_values"]).max() <= 1e-6


@pytest.mark.parametrize(
    "given_size, scaled, grid",
    [
        ((1, 1), (1, 1), (2, 2)),
        ((28, 28), (28, 28), (2, 2)),
        ((29, 28), (29, 28), (2, 4)),
        ((106, 70), (106, 70), (6, 8)),
        ((4000, 3000), (4000, 3000), (216, 286)),  # 285 * 214 whole patches fit
        ((7168, 28), (7168, 28), (2, 512)),
        ((20000, 30), (7168, 10), (2, 512)),  # a side of 512 patches
        ((30, 20000), (10, 7168), (512, 2)),
        ((1, 100000), (1, 7167), (512, 2)),  # as the release rounds
        ((5000, 5000), (3585, 3585), (258, 258)),  # sqrt(65536 / 357^2) of it, rounded down
    ],
)
def test_sizes(given_size, scaled, grid):
    size = K3.size(*given_size)
    assert (size.width, size.height) == scaled
    assert (size.rows, size.columns) == grid
    assert size.tokens == grid[0] * grid[1] // 4


def test_a_frame_of_a_clip_has_a_limit_of_its_own():
    assert K3.size(1920, 1080, of_clip=True) == K3.size(1920, 1080)
    size = K3.size(3840, 2160, of_clip=True)
    share = math.sqrt(16384 / (274 * 154))
    assert (size.width, size.height) == (int(3840 * share), int(2160 * share))
    assert K3.size(3840, 2160).width == 3840


@given(st.integers(1, 30000), st.integers(1, 30000))
def test_any_size_keeps_to_the_rules(width, height):
    size = K3.size(width, height)
    assert 1 <= size.width <= width and 1 <= size.height <= height
    assert size.rows % 2 == size.columns % 2 == 0 and max(size.rows, size.columns) <= 512
    assert 0 <= size.rows * 14 - size.height < 28 and 0 <= size.columns * 14 - size.width < 28
    # The limit is set to whole patches of the picture as given; rounding and padding add a few.
    assert size.rows * size.columns <= 65536 * 33 // 32
    untouched = (size.width, size.height) == (width, height)
    fits = max(width // 14, 1) * max(height // 14, 1) <= 65536 and max(width, height) <= 7168
    assert untouched == fits


def test_padding_is_black_on_the_right_and_below():
    values = whole(K3.image(Image.new("RGB", (30, 15), (255, 255, 255))))
    assert values.shape == (28, 56, 3)
    assert (values[:15, :30] == 1).all()
    assert (values[15:] == -1).all() and (values[:, 30:] == -1).all()


def test_patches_come_row_by_row_and_colours_first():
    picture = noise(56, 28)
    medium = K3.image(picture)
    pixels = np.asarray(picture)
    assert medium.pixels.shape == (8, 3, 14, 14) and medium.pixels.dtype == np.uint8
    assert (medium.pixels[5, 2] == pixels[14:, 14:28, 2]).all()
    assert np.abs(medium.values(5, 6)[0, 1] - as_read(pixels[14:, 14:28, 1])).max() < 1e-6


def test_transparent_parts_show_a_chessboard():
    values = whole(K3.image(Image.new("RGBA", (28, 28), (9, 9, 9, 0))))
    white, gray = as_read([255, 180])
    assert np.allclose(values[:8, :8], white) and np.allclose(values[:8, 8:16], gray)
    assert np.allclose(values[8:16, :8], gray) and np.allclose(values[8:16, 8:16], white)


@pytest.mark.parametrize(
    "pattern, shown", [("white", 255), ("gray", 128), ("black", 0)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
def test_other_backgrounds(pattern, shown, stage):
    config = {"pattern": pattern}
    processor = replace(K3, transparent_bg_config=config, transparent_bg_fill_stage=stage)
    picture = Image.new("LA", (28, 28), (200, 51))  # a fifth of it shows
    values = whole(processor.image(picture))
    assert np.allclose(values, as_read(int(200 * 0.2 + shown * 0.8)), atol=1 / 127)


def test_the_stage_decides_what_is_scaled():
    picture = Image.new("RGBA", (560, 560), (0, 0, 0, 0))
    small = replace(K3, in_patch_limit=100)
    after = whole(small.image(picture))
    before = whole(replace(small, transparent_bg_fill_stage="before_resize").image(picture))
    assert (after[:8, :8] == 1).all()  # squares of 8 pixels whatever the picture's size
    assert not (before[:8, :8] == 1).all()


def test_every_mode_of_an_opaque_picture_looks_the_same():
    gray = noise(40, 30, "L")
    want = K3.image(gray.convert("RGB")).pixels
    palette = gray.convert("P")
    for picture in (gray, palette, gray.convert("LA"), gray.convert("RGBA")):
        assert (K3.image(picture).pixels == want).all(), picture.mode
    ink = gray.point(lambda x: 255 * (x > 127)).convert("1")
    assert (K3.image(ink).pixels == K3.image(ink.convert("RGB")).pixels).all()


def test_a_palette_with_a_transparent_colour():
    picture = Image.new("P", (28, 28), 1)
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.info["transparency"] = 1
    assert np.allclose(whole(K3.image(picture))[:8, :8], 1)


def test_a_palette_is_scaled_by_colours_not_by_numbers():
    picture = Image.new("P", (560, 560), 0)
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.paste(1, (280, 0, 560, 560))
    small = replace(K3, in_patch_limit=100)
    assert (small.image(picture).pixels == small.image(picture.convert("RGB")).pixels).all()


def test_a_clip_is_frames_one_after_the_other():
    frames = [noise(40, 30, seed=i) for i in range(3)]
    clip = K3.clip(frames)
    assert clip.grid == (3, 4, 4) and clip.tokens == 4
    singles = np.concatenate([K3.image(frame).pixels for frame in frames])
    assert (clip.pixels == singles).all()
    assert (clip.width, clip.height) == (40, 30)


@pytest.mark.parametrize(
    "frames, message",
    [
        ([], "a clip of 0 frames"),
        ([(28, 28)] * 5, "a clip of 5 frames; it has 1 to 4"),
        ([(28, 28), (28, 29)], "differ in size"),
    ],
)
def test_what_is_no_clip(frames, message):
    with pytest.raises(K3Error, match=message):
        K3.clip([Image.new("RGB", size) for size in frames])


def test_a_picture_without_pixels():
    with pytest.raises(K3Error, match="0x7 pixels"):
        K3.image(Image.new("RGB", (0, 7)))


def test_ids_say_what_is_in_a_picture():
    one, same = K3.image(noise(40, 30)), K3.image(noise(40, 30))
    other, film = K3.image(noise(40, 30, seed=1)), K3.clip([noise(40, 30)] * 2)
    assert one.ids == same.ids and len(one.ids) == one.tokens == 4
    everything = [*one.ids, *other.ids, *film.ids]
    assert len(set(everything)) == 12
    assert all(-(1 << 63) <= token < -(1 << 60) for token in everything)
    blue = replace(K3, image_mean=(0.5, 0.5, 0.4)).image(noise(40, 30))
    assert blue.ids != one.ids  # the tower reads other numbers


def test_a_pad_becomes_all_ids_of_its_picture():
    one, other = K3.image(noise(40, 30)), K3.image(noise(28, 28))
    expanded = expand([7, 99, 8, 99, 99], [one, other, one], pad_id=99)
    assert expanded == [7, *one.ids, 8, *other.ids, *one.ids]
    assert plain_ids(expanded, 99) == [7, *[99] * 4, 8, *[99] * 5]
    # One pad for 256 vectors: 14 ids become 269.
    large = K3.image(noise(448, 448))
    assert large.tokens == 256 and len(expand([*range(13), 99], [large], 99)) == 269


@pytest.mark.parametrize("pads", [0, 2])
def test_pads_and_pictures_are_counted(pads):
    with pytest.raises(K3Error, match=f"places for {pads} pictures and 1 are given"):
        expand([1, *[99] * pads], [K3.image(noise(28, 28))], 99)


def test_a_model_without_pads_has_no_place_for_pictures():
    assert plain_ids([1, 2], None) == [1, 2]
    with pytest.raises(K3Error, match="knows no place"):
        plain_ids([1, -5], None)


SETTINGS = {
    "not JSON": ("{", CheckpointError),
    "no object": ("[]", CheckpointError),
    "nothing in it": ("{}", CheckpointError),
    "patches of nothing": ({"patch_size": 0}, CheckpointError),
    "a limit in words": ({"in_patch_limit": "many"}, CheckpointError),
    "two colours": ({"image_mean": [0.5, 0.5]}, CheckpointError),
    "oblong groups": ({"merge_kernel_size": [2, 3]}, CheckpointError),
    "an unknown stage": ({"transparent_bg_fill_stage": "later"}, CheckpointError),
    "a fixed number": ({"fixed_output_tokens": 64}, UnsupportedError),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_make_no_sense(tmp_path, case):
    content, error = SETTINGS[case]
    text = content if isinstance(content, str) else json.dumps({"media_proc_cfg": content})
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(error, match=r"preprocessor_config\.json") as caught:
        Processor.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_background_that_nobody_knows():
    processor = replace(K3, transparent_bg_config={"pattern": "stripes"})
    with pytest.raises(CheckpointError, match="stripes"):
        processor.image(Image.new("RGBA", (28, 28)))


def test_groups_may_be_given_as_a_pair(tmp_path):
    config = {"media_proc_cfg": {"merge_kernel_size": [4, 4], "patch_size": 7}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    size = Processor.from_folder(tmp_path).size(57, 20)
    assert (size.rows, size.columns, size.tokens) == (4, 12, 3)
