"""Pictures and videos in requests: where they may come from, and how the others are refused.

A request brings them itself, as ``data:`` URLs. What else it may name is the owner's decision:
files of one folder, and addresses, which the server then fetches.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..chat.attaching import media_parts, replace_media, url_of
from ..errors import K3Error
from ..loader import require_vision
from ..media.attachments import Attachment, check_count, open_part
from ..media.images import MAX_FILE_BYTES, existing_file, is_data_url
from .errors import ApiError

_TYPES = ("image_url", "video_url")
# For an address that answers, but slowly; others wait meanwhile.
_FETCH_SECONDS = 60.0
_WAIT_SECONDS = 10.0
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Sources:
    """What a request may name: files in ``folder`` or below, and ``urls`` to fetch."""

    folder: Path | None = None
    urls: bool = False


class Pictures:
    """Opens what the messages of requests show to ``model``.

    Args:
        model: what :func:`mlx_k3.load` returns.
        sources: by default, what a request brings itself.
        context_tokens: as soon as pictures alone exceed this, no more are opened.
    """

    def __init__(self, model: Any, sources: Sources, context_tokens: int):
        self._model, self._sources, self._context = model, sources, context_tokens

    def opened(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """``messages`` with all that they show opened, for a prompt to be made of them.

        Raises:
            ApiError: the model sees nothing, or one of them cannot be opened or may not be.
        """
        room = self._context
        _check(len(list(media_parts(messages))))

        def open_(part: dict[str, Any], place: str) -> dict[str, Any]:
            nonlocal room
            attachment = self._open(part, place)
            room -= attachment.tokens
            if room < 0:
                raise ApiError(
                    400,
                    f"the pictures alone have more tokens than the server's context of "
                    f"{self._context:,} (--context)",
                    param=place,
                    code="context_length_exceeded",
                )
            return {"type": part["type"], "attachment": attachment}

        return [
            replace_media(message, f"messages[{i}]", open_) for i, message in enumerate(messages)
        ]

    def _open(self, part: dict[str, Any], place: str) -> Attachment:
        if part["type"] not in _TYPES:
            message = f"a part of type {part['type']!r}; text, image_url and video_url are known"
            raise ApiError(400, message, param=place, code="unsupported_content")
        try:
            processor = require_vision(self._model).processor
        except K3Error as e:
            raise ApiError(400, str(e), param=place, code="unsupported_content") from None
        given = part.get(part["type"])
        if isinstance(given, dict) and given.get("detail") == "low":
            message = "detail 'low': pictures are seen as they are; make it smaller instead"
            raise ApiError(400, message, param=f"{place}.detail", code="unsupported_value")
        url = url_of(part)
        if not isinstance(url, str) or not url:
            message = f"{place}.{part['type']}.url is required"
            raise ApiError(400, message, param=place, code="missing_required_parameter")
        try:
            source = url if is_data_url(url) else self._fetched(url, place)
            return open_part({"type": part["type"]}, source, processor, place)
        except ApiError:
            raise
        except K3Error as e:
            kind = part["type"].removesuffix("_url")
            raise ApiError(400, str(e), param=place, code=f"invalid_{kind}") from None

    def _fetched(self, url: str, place: str) -> Path | bytes:
        try:
            scheme, host, path, _, _ = urlsplit(url)
        except ValueError:
            raise ApiError(400, "no valid URL", param=place, code="invalid_value") from None
        if scheme == "file" and self._sources.folder is not None and host in ("", "localhost"):
            return self._file(unquote(path))
        if scheme in ("http", "https") and self._sources.urls:
            return _fetch(url)
        option = {"file": "--allow-files FOLDER", "http": "--allow-urls", "https": "--allow-urls"}
        raise ApiError(
            400,
            f"the URL begins with {scheme[:20] or 'no scheme'!r}; send the picture itself, as "
            "data:image/png;base64,..."
            + (f" (the server's owner may say {option[scheme]})" if scheme in option else ""),
            param=place,
            code="url_not_allowed",
        )

    def _file(self, path: str) -> Path:
        folder = self._sources.folder
        assert folder is not None
        try:
            file, folder = Path(path).resolve(), folder.resolve()
        except (OSError, ValueError, RuntimeError):
            raise K3Error("the file's path is not valid") from None
        # Said the same way whether the file exists or not.
        if not file.is_relative_to(folder):
            raise K3Error("the file is not in the folder that requests may name files of")
        return existing_file(file)


def _check(count: int) -> None:
    try:
        check_count(count)
    except K3Error as e:
        raise ApiError(400, str(e), param="messages", code="too_many_images") from None


def _fetch(url: str) -> bytes:
    """What is at an address.

    Raises:
        K3Error: nothing, or too much, or it took too long.
    """
    # Without the handlers for files and FTP, to which an address could lead on.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    deadline, data = time.monotonic() + _FETCH_SECONDS, b""
    try:
        with opener.open(url, timeout=_WAIT_SECONDS) as answer:
            while piece := answer.read1(_PIECE_BYTES):
                data += piece
                if len(data) > MAX_FILE_BYTES:
                    raise K3Error(f"there are over {MAX_FILE_BYTES >> 20} MiB at the URL")
                if time.monotonic() > deadline:
                    raise K3Error(f"the URL took over {_FETCH_SECONDS:.0f} seconds")
    except urllib.error.HTTPError as e:
        raise K3Error(f"the URL answers with status {e.code}") from None
    except (OSError, HTTPException, ValueError) as e:
        raise K3Error(f"the URL cannot be fetched: {' '.join(str(e).split())[:200]}") from None
    return data
