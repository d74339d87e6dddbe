"""Pictures and films that a person names on the command line: checked before anything slow."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..config import K3Config
from ..errors import K3Error, UnsupportedError

_PANEL = "What the model sees"

ImageOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A picture that the prompt is about; repeat for more.",
        metavar="FILE",
        rich_help_panel=_PANEL,
    ),
]
VideoOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A video that the prompt is about; repeat for more.",
        metavar="FILE",
        rich_help_panel=_PANEL,
    ),
]

# A path in a line: in quotes, or with a backslash before each blank, as terminals paste it.
_PATH = re.compile(
    r"""'(?P<single>[~/][^'\n]*)'|"(?P<double>[~/][^"\n]*)"|(?P<bare>[~/](?:\\.|[^\s\\])*)"""
)


def check_pictures(
    images: Sequence[str], videos: Sequence[str], config: K3Config, *, no_vision: bool
) -> None:
    """Open all of them once: loading a model may take minutes.

    Raises:
        K3Error: one cannot be opened, or there are too many.
        UnsupportedError: the model sees nothing.
    """
    if not images and not videos:
        return
    if no_vision:
        raise K3Error("--no-vision leaves out what sees pictures; leave it out, or the pictures")
    if config.vision_config is None:
        raise UnsupportedError(
            "this model reads text only: it has no vision tower to see pictures with"
        )
    from ..media.attachments import check_count
    from ..media.images import open_image
    from ..media.video import open_video

    check_count(len(images) + len(videos))
    for path in images:
        open_image(path)
    for path in videos:
        open_video(path, fps=1, frames_per_clip=1)


def dropped(line: str) -> tuple[str, list[str], list[str]]:
    """What is left of a line without the pictures and films in it, and their paths.

    Files that are dragged onto a terminal come as absolute paths. Anything else is text.
    """
    from ..media.attachments import IMAGE_SUFFIXES, VIDEO_SUFFIXES

    images: list[str] = []
    videos: list[str] = []

    def take(match: re.Match[str]) -> str:
        path = match["single"] or match["double"] or _unescaped(match["bare"] or "")
        suffix = Path(path).suffix.lower()
        found = images if suffix in IMAGE_SUFFIXES else videos if suffix in VIDEO_SUFFIXES else None
        if found is None or not _is_file(path):
            return match[0]
        found.append(path)
        return " "

    rest = _PATH.sub(lambda m: take(m) if _begins_word(line, m.start()) else m[0], line)
    return (rest.strip() if images or videos else line), images, videos


def named_file(text: str, command: str) -> str:
    """The path behind a command, with or without the quotes a terminal puts around it.

    Raises:
        K3Error: there is none.
    """
    if not text:
        raise K3Error(f"{command} needs a file: {command} photo.jpg")
    if _is_file(text):
        return text
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return _unescaped(text)


def _unescaped(path: str) -> str:
    return re.sub(r"\\(.)", r"\1", path)


def _begins_word(line: str, at: int) -> bool:
    return at == 0 or line[at - 1].isspace()


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError):  # too long a name; no home
        return False
