"""Opening video: which frames are taken, when they are, and what is said of damaged files."""

import io
import random
import struct
import sys
from fractions import Fraction

import av
import numpy as np
import pytest

from mlx_k3.errors import K3Error, UnsupportedError
from mlx_k3.media.video import _JUMP_SECONDS, open_video, timestamp

FORMATS = [
    ("mp4", "libx264", "yuv420p"),
    ("mp4", "mpeg4", "yuv420p"),
    ("mov", "png", "rgb24"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("matroska", "ffv1", "yuv420p"),
    ("avi", "mjpeg", "yuvj420p"),
    ("mpegts", "mpeg2video", "yuv420p"),
]


def film(
    frames: int,
    kind: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv420p",
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    noisy: bool = False,
    gop: int = 12,
    title: str = "",
) -> bytes:
    """A film whose n-th frame tells its number, or of noise."""
    out = io.BytesIO()
    rng = np.random.default_rng(0)
    with av.open(out, "w", format=kind) as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.gop_size = gop
        for n in range(frames):
            picture = drawn(n, size)
            if noisy:
                picture = rng.integers(0, 256, picture.shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def drawn(n: int, size: tuple[int, int]) -> np.ndarray:
    """A picture that tells the number ``n``: of sixteen greys, one on each side."""
    picture = np.full((size[1], size[0], 3), 8 + n % 16 * 16, np.uint8)
    picture[:, size[0] // 2 :] = 8 + n // 16 * 16
    return picture


def taken(clips) -> list[int]:
    """Which frames of a :func:`film` the clips have."""
    frames = [np.asarray(frame) for clip in clips for frame in clip.frames]
    halves = [np.array_split(frame, 2, axis=1) for frame in frames]
    return [int(left.mean()) // 16 + int(right.mean()) // 16 * 16 for left, right in halves]


@pytest.mark.parametrize(("kind", "codec", "pixels"), FORMATS)
def test_frames_are_those_of_the_film(kind, codec, pixels, tmp_path):
    data = film(20, kind, codec, pixels)
    path = tmp_path / f"film.{kind}"
    path.write_bytes(data)
    for source in (data, path, str(path)):
        clips = list(open_video(source, fps=10, frames_per_clip=4))
        assert [len(clip.frames) for clip in clips] == [4] * 5
        assert taken(clips) == list(range(20))
        assert {frame.size for clip in clips for frame in clip.frames} == {(64, 48)}
        assert [clip.seconds for clip in clips] == pytest.approx([0, 0.4, 0.8, 1.2, 1.6])


def test_a_rate_and_a_limit_thin_out_evenly():
    data = film(60, rate=30)
    # Two seconds at 8 a second are 16 frames, from the first to the last.
    clips = list(open_video(data, fps=8, frames_per_clip=4))
    assert taken(clips) == np.linspace(0, 59, 16).round().astype(int).tolist()
    assert [len(clip.frames) for clip in clips] == [4, 4, 4, 4]
    clips = list(open_video(data, fps=8, frames_per_clip=4, max_frames=6))
    assert taken(clips) == [0, 12, 24, 35, 47, 59]
    assert [len(clip.frames) for clip in clips] == [4, 2]
    assert [clip.seconds for clip in clips] == pytest.approx([0, 47 / 30])
    # No more than there are.
    assert len(taken(open_video(film(3), fps=100, frames_per_clip=4))) == 3
    assert taken(open_video(film(1), fps=8, frames_per_clip=4)) == [0]


def test_a_long_film_is_jumped_through():
    seconds = 48
    assert seconds / 4 > _JUMP_SECONDS
    data = film(seconds * 5, rate=5)
    assert taken(open_video(data, fps=8, frames_per_clip=4, max_frames=4)) == [0, 80, 159, 239]


def test_when_a_clip_begins_in_words():
    assert timestamp(0) == "00:00:00.000"
    assert timestamp(0.4666) == "00:00:00.467"
    assert timestamp(3661.5) == "01:01:01.500"
    assert timestamp(59.9996) == "00:01:00.000"


def test_sound_alone_is_no_video():
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(K3Error, match="talk has no video in it"):
        open_video(out.getvalue(), fps=8, frames_per_clip=4, name="talk")


def test_a_video_without_frames():
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        container.start_encoding()
    with pytest.raises(K3Error, match="the video"):
        list(open_video(out.getvalue(), fps=8, frames_per_clip=4))


@pytest.mark.parametrize(("kind", "codec", "pixels"), FORMATS[:-1])
def test_half_a_film_is_an_error(kind, codec, pixels):
    data = film(60, kind, codec, pixels, noisy=True)
    with pytest.raises(K3Error, match=r"^half") as e:
        list(open_video(data[: len(data) // 2], fps=10, frames_per_clip=4, name="half"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("kind", "codec", "pixels"), FORMATS)
def test_a_corrupt_stream_is_an_error(kind, codec, pixels):
    data = bytearray(film(30, kind, codec, pixels, noisy=True))
    rng = np.random.default_rng(1)
    middle = slice(len(data) // 4, len(data) * 3 // 4)
    data[middle] = rng.integers(0, 256, len(data[middle]), dtype=np.uint8).tobytes()
    with pytest.raises(K3Error, match=r"^film") as e:
        list(open_video(bytes(data), fps=10, frames_per_clip=4, name="film"))
    assert "\n" not in str(e.value)


def test_damage_anywhere_ends_in_frames_or_in_one_clear_line():
    rng = random.Random(5)
    refused = 0
    for kind, codec, pixels in FORMATS:
        whole = film(12, kind, codec, pixels, noisy=True)
        for _ in range(40):
            data = bytearray(whole)
            for _ in range(rng.choice([1, 3, 20])):
                data[rng.randrange(min(2000, len(data)))] = rng.randrange(256)
            try:
                clips = open_video(bytes(data), fps=10, frames_per_clip=4)
                assert sum(len(clip.frames) for clip in clips) > 0
            except K3Error as e:
                refused += 1
                assert "\n" not in str(e)
    assert refused > 50


def test_a_title_in_another_encoding_does_no_harm():
    data = film(4, "matroska", "ffv1", "yuv420p", title="a title")
    at = data.index(b"a title")
    clips = open_video(data[:at] + b"\xfc title" + data[at + 7 :], fps=10, frames_per_clip=4)
    assert taken(clips) == [0, 1, 2, 3]


def test_a_playlist_opens_no_other_file(tmp_path):
    (tmp_path / "secret.ts").write_bytes(film(5, "mpegts", "mpeg2video"))
    playlist = tmp_path / "film.m3u8"
    playlist.write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path / 'secret.ts'}\n#EXT-X-ENDLIST\n"
    )
    concat = tmp_path / "film.txt"
    concat.write_text(f"ffconcat version 1.0\nfile '{tmp_path / 'secret.ts'}'\n")
    for path in (playlist, concat):
        with pytest.raises(K3Error, match="no video that can be read"):
            open_video(path, fps=8, frames_per_clip=4)


def test_what_is_no_video_at_all(tmp_path):
    (tmp_path / "text.mp4").write_text("not a film " * 50)
    for source, message in (
        (b"", "is empty"),
        (tmp_path / "none.mp4", "no such file"),
        (tmp_path, "is no file"),
        (tmp_path / "text.mp4", r"text\.mp4"),
    ):
        with pytest.raises(K3Error, match=message):
            open_video(source, fps=8, frames_per_clip=4)


def test_without_pyav_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'mlx-k3\[vision\]'"):
        open_video(b"x", fps=8, frames_per_clip=4)


def test_a_film_of_a_phone_held_upright_is_turned():
    data = film(2)
    unity, one = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30), 65536
    clockwise = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    at = data.index(unity, data.index(b"tkhd"))  # the track's matrix, behind the film's own
    turned = data[:at] + clockwise + data[at + len(clockwise) :]
    [clip] = open_video(turned, fps=10, frames_per_clip=4)
    still = np.asarray(next(open_video(data, fps=10, frames_per_clip=4)).frames[1])
    np.testing.assert_array_equal(np.asarray(clip.frames[1]), np.rot90(still, -1))
