"""``mlx-k3 sessions``: the conversations that have a name."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..chat.saved import NamedSessions
from ..units import format_bytes
from .prompts import prompts_folder
from .terminal import note


def sessions(
    delete: Annotated[
        str | None,
        typer.Option(help="Delete a session and what is kept of it.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the conversations saved by /save NAME in a chat.

    The size is that of the messages and of the model's states on the disk, with which a session
    goes on without being read again; without them it is read anew.

    Examples:

        mlx-k3 sessions

        mlx-k3 chat --resume holiday

        mlx-k3 sessions --delete holiday
    """
    named = named_sessions()
    if delete is not None:
        _delete(named, delete)
        return
    found = _found(named)
    if as_json:
        print(json.dumps({"sessions": found}))
    elif not found:
        note("no sessions; /save NAME in a chat makes one")
    else:
        _print(found)


def named_sessions() -> NamedSessions:
    """Those of this user."""
    return NamedSessions(Path(typer.get_app_dir("mlx-k3")) / "sessions")


def _delete(named: NamedSessions, name: str) -> None:
    from ..chat.cache_folder import CacheFolder

    states = {session.name: set(session.states) for session in named}
    named.delete(name)
    only_here = states.pop(name, set()).difference(*states.values())
    folder = CacheFolder(prompts_folder(), "", None)
    for key in only_here:
        folder.forget(key)


def _found(named: NamedSessions) -> list[dict[str, Any]]:
    from ..chat.cache_folder import CacheFolder

    folder = CacheFolder(prompts_folder(), "", None)
    return [
        {
            "name": session.name,
            "messages": session.messages,
            "bytes": session.nbytes,
            "state_bytes": folder.bytes_of(session.states),
            "age_seconds": max(time.time() - session.saved_at, 0.0),
        }
        for session in named
    ]


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for name in ("name", "messages", "size", "saved"):
        table.add_column(name, justify="left" if name == "name" else "right", no_wrap=True)
    for session in found:
        size = format_bytes(session["bytes"] + session["state_bytes"])
        age = f"{_age(session['age_seconds'])} ago"
        table.add_row(session["name"], str(session["messages"]), size, age)
    Console(highlight=False, markup=False).print(table)


def _age(seconds: float) -> str:
    """``"3 days"``: in the largest unit of which there is at least one."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if n := int(seconds // length):
            return f"{n} {unit}{'s' if n > 1 else ''}"
    return "a moment"
