"""What a conversation has beside text: a picture or a film, opened and ready for the model.

Owns how many there may be, how each stands in a prompt, and how it is written down to be opened
again later.
"""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import K3Error
from .images import data_url_bytes, is_data_url, open_image, read_file
from .medium import Medium
from .processor import Processor
from .video import open_video, timestamp

# Of a conversation. In memory one takes up to 40 MB, in a prompt up to 16,384 places.
MAX_ATTACHMENTS = 32
# Of files that are taken for pictures and films when their names stand in a line.
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg"})


class Place(NamedTuple):
    """One medium in a prompt: ``text`` before it, and the ``label`` that the format has for it."""

    text: str
    label: str
    medium: Medium


@dataclass(frozen=True, eq=False)
class Attachment:
    """A picture (one place) or a film (a place for each clip), by its type in a message."""

    type: Literal["image", "video"]
    places: tuple[Place, ...]
    _as_part: Callable[[], dict[str, Any]]

    @property
    def tokens(self) -> int:
        """Positions it takes in a prompt, without the text around."""
        return sum(place.medium.tokens for place in self.places)

    @property
    def media(self) -> list[Medium]:
        """All that the tower reads of it."""
        return [place.medium for place in self.places]

    def as_part(self) -> dict[str, Any]:
        """A part of a message, of plain JSON, from which it can be opened again."""
        return self._as_part()


def picture(source: Any, processor: Processor, name: str = "the picture") -> Attachment:
    """A picture from whatever :func:`~.images.open_image` takes.

    Raises:
        K3Error: as :func:`~.images.open_image` does.
    """
    if isinstance(source, str) and is_data_url(source):
        source = data_url_bytes(source, name)
    elif isinstance(source, str | Path):
        source, name = read_file(source), str(source)
    image = open_image(source, name)
    medium = processor.image(image)
    kept = source if isinstance(source, bytes) else image
    label = f"image {medium.width}x{medium.height}"
    return Attachment("image", (Place("", label, medium),), lambda: _picture_part(kept))


def film(source: Any, processor: Processor, name: str = "the video") -> Attachment:
    """A film from a path, bytes or a data URL.

    Raises:
        K3Error: as :func:`~.video.open_video` does.
    """
    if isinstance(source, str) and is_data_url(source):
        source = data_url_bytes(source, name)
    if not isinstance(source, str | Path | bytes):
        raise K3Error(f"{name} is a {type(source).__name__}; give a path or the bytes of a file")
    clips = open_video(
        source, fps=processor.sample_fps, frames_per_clip=processor.frames_per_clip, name=name
    )
    places = tuple(
        Place(timestamp(clip.seconds), "video", processor.clip(clip.frames)) for clip in clips
    )
    if isinstance(source, bytes):
        return Attachment(
            "video", places, lambda: {"type": "video", "video": _data_url("video/*", source)}
        )
    path = str(Path(source).expanduser().resolve())
    digests = [place.medium.digest[:16] for place in places]
    return Attachment("video", places, lambda: {"type": "video", "video": path, "digests": digests})


def open_part(
    part: dict[str, Any], source: Any, processor: Processor, name: str = ""
) -> Attachment:
    """What a content part of type image, image_url, video or video_url shows.

    Args:
        part: as it stands in a message.
        source: what it is read from.
        processor: the model's.
        name: what messages call it, if it is no file.

    Raises:
        K3Error: it cannot be opened, or is no longer what it was when it was saved.
    """
    if is_image(part):
        return picture(source, processor, name or "the picture")
    seen = film(source, processor, name or "the video")
    digests = part.get("digests")
    if digests is not None and digests != [m.digest[:16] for m in seen.media]:
        raise K3Error(f"{source} is not the video any more that the conversation is about")
    return seen


def check_count(count: int) -> None:
    """Refuse more pictures and videos than a conversation may have.

    Raises:
        K3Error: there are too many.
    """
    if count > MAX_ATTACHMENTS:
        raise K3Error(
            f"{count} pictures and videos are too many; a conversation has at most "
            f"{MAX_ATTACHMENTS}"
        )


def is_image(part: dict[str, Any]) -> bool:
    """Whether a content part is a picture rather than a film."""
    return part["type"] in ("image", "image_url")


def _picture_part(kept: Any) -> dict[str, Any]:
    from PIL import Image

    if not isinstance(kept, bytes):
        out = io.BytesIO()
        kept.save(out, "PNG")
        kept = out.getvalue()
    with Image.open(io.BytesIO(kept)) as image:
        kind = Image.MIME.get(image.format or "", "image/*")
    return {"type": "image_url", "image_url": {"url": _data_url(kind, kept)}}


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
