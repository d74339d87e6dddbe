"""Opening video: a file becomes clips of a few frames, each with the time when it begins.

Owns which frames are looked at, and that the file is whole. A clip is decoded when it is asked
for, so that a long film needs no more memory than a short one. Needs PyAV.
"""

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import K3Error, UnsupportedError
from .images import MAX_PIXELS, existing_file

if TYPE_CHECKING:
    from PIL import Image

MAX_FRAMES = 64

# A playlist among video files could name any other file, or an address.
_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,gif,mjpeg,h264,hevc,ivf"
_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
# Decoding what lies between two frames this far apart takes longer than looking for the second.
_JUMP_SECONDS = 10


class Clip(NamedTuple):
    """Frames that are seen together, and when in the film the first is shown."""

    seconds: float
    frames: "list[Image.Image]"


def open_video(
    source: str | Path | bytes,
    *,
    fps: float,
    frames_per_clip: int,
    max_frames: int = MAX_FRAMES,
    name: str = "the video",
) -> Iterator[Clip]:
    """The clips of the film in ``source``, a path or the bytes of a file.

    ``fps`` frames of each second are looked at (all, if there are fewer), at most ``max_frames``,
    spread evenly from the first to the last.

    Raises:
        K3Error: there is no film, it has no frames, or it is damaged. Some damage is found only
            when the clips are taken.
        UnsupportedError: PyAV is not installed.
    """
    data = source if isinstance(source, bytes) else None
    if data is None:
        path = existing_file(source)
        name = str(path)
    elif not data:
        raise K3Error(f"{name} is empty")

    def open_() -> Any:
        return io.BytesIO(data) if data is not None else path.open("rb")

    times = _frame_times(open_, name)
    wanted = _sample(times, fps, max_frames)
    return _clips(open_, name, wanted, times[0], frames_per_clip)


def timestamp(seconds: float) -> str:
    """``01:02:03.500``: how a prompt says when a clip begins."""
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}.{milliseconds % 1000:03}"


class _Time(NamedTuple):
    pts: int
    seconds: float


@contextmanager
def _reading(open_: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; what the library raises becomes one line."""
    try:
        import av
    except ImportError:
        raise UnsupportedError(
            "video needs PyAV, which is not installed: pip install 'mlx-k3[vision]'"
        ) from None
    try:
        # Titles in other encodings are no reason to refuse a film.
        how = {"options": dict(_OPTIONS), "metadata_errors": "replace"}
        with open_() as file, closing(av.open(file, **how)) as container:
            if not container.streams.video:
                raise K3Error(f"{name} has no video in it")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UnsupportedError(f"{name} is in a format that PyAV has no decoder for")
            # A decoder would rather invent what is missing.
            stream.codec_context.options = {"err_detect": "explode"}
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.error.FFmpegError, OSError) as e:
        raise K3Error(
            f"{name} is no video that can be read, or a damaged one: {e.strerror}"
        ) from None


def _frame_times(open_: Any, name: str) -> list[_Time]:
    """When each frame is shown, in order, without decoding any."""
    times, end = set(), 0.0
    with _reading(open_, name) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        for packet in container.demux():
            if packet.is_corrupt:
                raise K3Error(f"{name} is damaged after {end:.1f} seconds; get it again")
            time = packet.dts if packet.pts is None else packet.pts
            if time is None or packet.is_discard:
                continue
            end = max(end, float((time + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index == stream.index:
                times.add(_Time(time, float(time * packet.time_base)))
        length = float((container.duration or 0) / 1_000_000)
        start = float((container.start_time or 0) / 1_000_000)
        expected = stream.frames
    if not times:
        raise K3Error(f"{name} is a video without frames")
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise K3Error(f"{name} has frames of {width:,} x {height:,} pixels; that cannot be read")
    # Files say in the beginning how long they are.
    if len(times) < expected * 0.95 or end - start < length * 0.95 - 1:
        raise K3Error(f"{name} is cut off: it ends after {end:.1f} seconds; get it again")
    return sorted(times)


def _sample(times: list[_Time], fps: float, max_frames: int) -> list[_Time]:
    """Which frames are looked at."""
    seconds = times[-1].seconds - times[0].seconds
    count = len(times)
    if seconds > 0:
        rate = (len(times) - 1) / seconds
        count = max(round(len(times) * min(fps / rate, 1)), 1)
    places = np.linspace(0, len(times) - 1, min(count, max_frames)).round().astype(int)
    return [times[i] for i in places]


def _clips(
    open_: Any, name: str, wanted: list[_Time], start: _Time, frames_per_clip: int
) -> Iterator[Clip]:
    clip: Clip | None = None
    for time, frame in _decoded(open_, name, wanted):
        is_full = clip is not None and (
            len(clip.frames) == frames_per_clip or frame.size != clip.frames[0].size
        )
        if is_full:
            yield clip
            clip = None
        clip = clip or Clip(time.seconds - start.seconds, [])
        clip.frames.append(frame)
    if clip is not None:
        yield clip


def _decoded(open_: Any, name: str, wanted: list[_Time]) -> Iterator[tuple[_Time, Any]]:
    """The frames shown at these times, upright."""
    found = 0
    with _reading(open_, name) as (container, stream):
        here, frames = wanted[0].seconds, container.decode(stream)
        for time in wanted:
            if time.seconds - here > _JUMP_SECONDS:
                container.seek(time.pts, stream=stream)
                frames = container.decode(stream)
            frame = next((f for f in frames if f.pts is None or f.pts >= time.pts), None)
            if frame is None or frame.is_corrupt:
                break
            found, here = found + 1, time.seconds
            image = frame.to_image()
            yield time, image.rotate(frame.rotation, expand=True) if frame.rotation else image
    if found < len(wanted):
        raise K3Error(f"{name} is damaged: {found} of {len(wanted)} frames could be read")
