"""Opening pictures: what they look like afterwards, and what is said of those that are none."""

import io
import random
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from mlx_k3.errors import K3Error, UnsupportedError
from mlx_k3.media.images import FORMATS, MAX_PIXELS, open_image

RNG = np.random.default_rng(3)
COLOURS = RNG.integers(0, 256, (11, 17, 3), dtype=np.uint8)
PICTURE = Image.fromarray(COLOURS)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int = 8, colour: int = 2, pixels: bytes = b"") -> bytes:
    """A PNG file with a header of one's own."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("PPM", {}),
        ("JPEG2000", {}),
    ],
)
def test_pixels_of_a_lossless_file_are_what_was_saved(kind, options):
    image = open_image(encoded(PICTURE, kind, **options))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), COLOURS)


@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_lossy_files_come_close(kind):
    grey = Image.new("RGB", (32, 24), (200, 100, 50))
    got = np.asarray(open_image(encoded(grey, kind, quality=95))).astype(int)
    assert got.shape == (24, 32, 3)
    assert np.abs(got - [200, 100, 50]).max() <= 4


def test_a_path_bytes_a_data_url_an_image_and_an_array_are_one_picture(tmp_path):
    import base64

    path = tmp_path / "ä picture.png"
    path.write_bytes(encoded(PICTURE))
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (path, str(path), path.read_bytes(), url, PICTURE, COLOURS):
        np.testing.assert_array_equal(np.asarray(open_image(source)), COLOURS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_says_which_way_is_up(orientation):
    turned = {
        1: COLOURS,
        2: COLOURS[:, ::-1],
        3: COLOURS[::-1, ::-1],
        4: COLOURS[::-1],
        5: COLOURS.transpose(1, 0, 2),
        6: np.rot90(COLOURS, 1),  # to be turned clockwise, so stored turned the other way
        7: np.rot90(COLOURS, 2).transpose(1, 0, 2),
        8: np.rot90(COLOURS, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(turned)), "PNG", exif=exif)
    np.testing.assert_array_equal(np.asarray(open_image(data)), COLOURS)


def test_transparency_is_kept_in_every_form():
    alpha = RNG.integers(0, 256, (11, 17), dtype=np.uint8)
    rgba = Image.fromarray(np.dstack([COLOURS, alpha]))
    np.testing.assert_array_equal(np.asarray(open_image(encoded(rgba))), np.asarray(rgba))

    grey = Image.merge("LA", [PICTURE.convert("L"), Image.fromarray(alpha)])
    got = np.asarray(open_image(encoded(grey)))
    np.testing.assert_array_equal(got[..., 3], alpha)
    np.testing.assert_array_equal(got[..., 0], np.asarray(PICTURE.convert("L")))

    palette = PICTURE.quantize(8)
    whole = np.asarray(palette.convert("RGB"))
    got = np.asarray(open_image(encoded(palette, "PNG", transparency=3)))
    np.testing.assert_array_equal(got[..., 3] == 0, np.asarray(palette) == 3)
    np.testing.assert_array_equal(got[..., :3], whole)


def test_a_colour_that_stands_for_nothing_is_seen_as_the_release_sees_it():
    nothing = tuple(map(int, COLOURS[0, 0]))
    got = open_image(encoded(PICTURE, "PNG", transparency=nothing))
    assert got.mode == "RGB" and got.getpixel((0, 0)) == nothing
    grey = PICTURE.convert("L")
    got = open_image(encoded(grey, "PNG", transparency=grey.getpixel((0, 0))))
    assert got.mode == "RGBA" and got.getpixel((0, 0))[3] == 0


def test_palettes_grey_bilevel_and_print_colours_become_rgb():
    for image in (PICTURE.quantize(16), PICTURE.convert("L"), PICTURE.convert("1")):
        got = open_image(encoded(image))
        assert got.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(got), np.asarray(image.convert("RGB")))
    cmyk = open_image(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))
    assert cmyk.getpixel((3, 3)) == (255, 0, 0)


def test_sixteen_bits_are_scaled_not_cut_off():
    values = np.array([[0, 128, 129, 257, 32896, 65535]], np.uint16)
    expected = [0, 0, 1, 1, 128, 255]
    for kind in ("PNG", "TIFF"):
        got = np.asarray(open_image(encoded(Image.fromarray(values), kind)))
        assert got[0, :, 0].tolist() == got[0, :, 2].tolist() == expected
    assert np.asarray(open_image(values))[0, :, 1].tolist() == expected
    wide = b"\x00" + struct.pack(">6H", 0, 65535, 32896, 65535, 0, 257)
    assert np.asarray(open_image(png(2, 1, 16, 2, wide))).tolist() == [[[0, 255, 128], [255, 0, 1]]]


def test_arrays_in_every_form():
    floats = COLOURS.astype(np.float32) / 255
    np.testing.assert_array_equal(np.asarray(open_image(floats)), COLOURS)
    np.testing.assert_array_equal(np.asarray(open_image(COLOURS[..., :1]))[..., 2], COLOURS[..., 0])
    assert open_image(np.zeros((4, 5, 4), np.uint8)).mode == "RGBA"
    import mlx.core as mx

    np.testing.assert_array_equal(np.asarray(open_image(mx.array(COLOURS))), COLOURS)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((0, 4, 3), np.uint8), "4 x 0 pixels"),
        (np.zeros((3, 8, 8), np.uint8), r"shape \[3, 8, 8\]"),
        (np.zeros(5, np.uint8), r"shape \[5\]"),
        (np.full((2, 2), 1.5), "from 0 to 1"),
        (np.full((2, 2), np.nan), "from 0 to 1"),
        (np.zeros((2, 2), np.int64), "int64"),
        (np.array([["x"]]), "<U1"),
    ],
)
def test_arrays_that_are_no_pictures(array, message):
    with pytest.raises(K3Error, match=message):
        open_image(array)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:]}
    if kind == "WEBP":
        options["lossless"] = True
    got = open_image(encoded(frames[0], kind, **options))
    assert got.convert("RGB").getpixel((4, 4)) == (255, 0, 0)


def test_half_a_file_is_an_error_whatever_its_format():
    big = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        data = encoded(big, kind)
        with pytest.raises(K3Error, match=r"^half\.") as e:
            open_image(data[: len(data) // 2], "half.file")
        assert "\n" not in str(e.value)


def test_a_text_file_is_no_picture_whatever_its_name(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_text("Dear diary,\n" * 100)
    with pytest.raises(K3Error, match=r"photo\.jpg is no picture"):
        open_image(path)


def test_a_bomb_is_not_set_off():
    # 60,000 x 60,000 black pixels are a few bytes here; nothing of them may be decoded.
    for width, height in ((60_000, 60_000), (MAX_PIXELS + 1, 1), (12_000, 10_001)):
        with pytest.raises(K3Error, match="pixels"):
            open_image(png(width, height, 1, 0))


def test_an_image_of_no_size():
    for width, height in ((0, 5), (5, 0), (0, 0)):
        with pytest.raises(K3Error, match=r"the picture"):
            open_image(png(width, height))
        with pytest.raises(K3Error, match=f"{width} x {height} pixels"):
            open_image(Image.new("RGB", (width, height)))


def test_what_is_no_picture_at_all(tmp_path):
    for source, message in (
        (b"", "is empty"),
        (tmp_path / "none.png", "no such file"),
        (tmp_path, "is no file"),
        ("/dev/zero", "is no file"),
        ("a\0b", "no such file|is no path"),
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:,hello", "is no picture"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(20), "HEIC"),
        (17, "is a int"),
        ([1, 2], "is a list"),
    ):
        with pytest.raises(K3Error, match=message):
            open_image(source)


def test_floats_in_a_file_are_refused():
    with pytest.raises(UnsupportedError, match="floats"):
        open_image(encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"))


def test_a_program_is_never_run_for_a_picture():
    # Pillow hands PostScript to an interpreter.
    with pytest.raises(K3Error, match="is no picture"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    assert "EPS" not in FORMATS


def test_damaged_files_of_every_kind_end_in_one_clear_line():
    rng = random.Random(7)
    small = Image.fromarray(RNG.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    seen = set()
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF", "JPEG2000"):
        whole = encoded(small, kind)
        for _ in range(120):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                image = open_image(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
                assert image.mode in ("RGB", "RGBA")
            except K3Error as e:
                assert "\n" not in str(e)
                seen.add(kind)
    assert len(seen) == 10


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'mlx-k3\[vision\]'"):
        open_image(b"x")
