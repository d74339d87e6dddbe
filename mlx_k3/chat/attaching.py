"""Pictures and films in a conversation's messages: found, opened, and counted.

Owns what a part may name as its source. What opens them is
:mod:`mlx_k3.media.attachments`; where they stand in a prompt is :mod:`~.xtml`'s business.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import K3Error, UnsupportedError
from ..loader import require_vision
from ..media.attachments import Attachment, check_count, is_image, open_part, picture
from ..media.attachments import film as open_film
from ..media.images import is_data_url
from ..media.medium import Medium
from .xtml import MEDIA_PARTS

Message = dict[str, Any]
Source = Any
"""A path, bytes, a data URL, a Pillow image or an array; of a film a path, bytes or a data URL."""


def attach(
    messages: Sequence[Message],
    model: Any,
    *,
    images: Sequence[Source] = (),
    videos: Sequence[Source] = (),
) -> list[Message]:
    """``messages`` with every picture and film in them opened, for ``model`` to see.

    A part of type image or video has its source under that name, or without one takes the next of
    ``images`` or ``videos``; image_url and video_url are OpenAI's forms. What is open stays as it
    is.

    Raises:
        K3Error: one cannot be opened, there are too many, or more are given than have places.
        UnsupportedError: the model sees nothing.
    """
    check_count(sum(1 for _ in media_parts(messages)))
    waiting = {True: list(images), False: list(videos)}

    def opened(part: Message, place: str) -> Message:
        if isinstance(part.get("attachment"), Attachment):
            return part
        source = _source(part)
        if source is None:
            queue = waiting[is_image(part)]
            if not queue:
                raise K3Error(f"{place} is an {part['type']} part without a source")
            source = queue.pop(0)
        processor = require_vision(model).processor
        return part | {"attachment": open_part(part, source, processor, place)}

    attached = [
        replace_media(message, f"messages[{i}]", opened) for i, message in enumerate(messages)
    ]
    if left := len(waiting[True]) + len(waiting[False]):
        raise K3Error(f"{left} more pictures or videos are given than the messages have places for")
    return attached


def attachments(
    model: Any, images: Sequence[Source] = (), videos: Sequence[Source] = ()
) -> list[Attachment]:
    """Pictures, then films, opened for ``model``; what is open stays as it is.

    Raises:
        K3Error: as :func:`attach` does.
    """
    check_count(len(images) + len(videos))
    opened = []
    for name, sources, open_ in (("images", images, picture), ("videos", videos, open_film)):
        for i, source in enumerate(sources):
            if not isinstance(source, Attachment):
                source = open_(source, require_vision(model).processor, f"{name}[{i}]")
            opened.append(source)
    return opened


def question(text: str, shown: Sequence[Attachment]) -> Message:
    """A user's message: what is shown, then the text."""
    if not shown:
        return {"role": "user", "content": text}
    parts: list[Message] = [{"type": each.type, "attachment": each} for each in shown]
    if text:
        parts.append({"type": "text", "text": text})
    return {"role": "user", "content": parts}


def media_of(messages: Sequence[Message]) -> list[Medium]:
    """What the tower has to read for ``messages``, all of them open."""
    return [medium for part in media_parts(messages) for medium in part["attachment"].media]


def detached(messages: Sequence[Message]) -> list[Message]:
    """``messages`` as plain JSON, from which they can be opened again."""

    def written(part: Message, _: str) -> Message:
        return part["attachment"].as_part()

    return [replace_media(message, "", written) for message in messages]


def media_parts(messages: Sequence[Message]) -> Iterator[Message]:
    """All content parts that are pictures or films."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in content if _is_medium(part)) if _is_list(content) else ()


def replace_media(
    message: Message, place: str, replace: Callable[[Message, str], Message]
) -> Message:
    """``message`` with ``replace`` of every picture and film, which is told where it stands."""
    content = message.get("content") if isinstance(message, dict) else None
    if not _is_list(content) or not any(map(_is_medium, content)):
        return message
    replaced = [
        replace(part, f"{place}.content[{i}]") if _is_medium(part) else part
        for i, part in enumerate(content)
    ]
    return message | {"content": replaced}


def url_of(part: Message) -> Any:
    """The URL of an image_url or video_url part, in either form in use."""
    given = part.get(part["type"])
    return given.get("url") if isinstance(given, dict) else given


def _source(part: Message) -> Source:
    if part["type"] in ("image", "video"):
        return part.get(part["type"])
    url = url_of(part)
    if not isinstance(url, str) or is_data_url(url):
        return url
    scheme = urlsplit(url).scheme.lower()
    if scheme in ("http", "https"):
        raise UnsupportedError(f"{url[:100]} is not fetched; download it, and give the file")
    return unquote(urlsplit(url).path) if scheme == "file" else url


def _is_list(content: Any) -> bool:
    return isinstance(content, list)


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in MEDIA_PARTS
