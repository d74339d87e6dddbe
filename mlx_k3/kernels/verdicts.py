"""Which kernels ``mlx-k3 doctor`` found wrong on this device, so that nothing uses them.

Owns a small file in the user's cache: for each device and version, a kernel's name and what was
wrong with it. Knows nothing of how that was found.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx

from ..errors import KernelError
from ..files import replace_file
from ..folders import cache_folder
from ..version import __version__

_all_trusted = False


def refused() -> Mapping[str, str]:
    """The kernels that are not used on this device, and why."""
    return MappingProxyType({}) if _all_trusted else _stored()


def refusal() -> str | None:
    """:func:`refused` in one line; None if nothing is."""
    if not refused():
        return None
    names = ", ".join(f"{name} ({why})" for name, why in sorted(refused().items()))
    return f"GPU kernels not used here, since mlx-k3 doctor found them wrong: {names}"


@contextmanager
def all_trusted() -> Iterator[None]:
    """Use every kernel in a block, to try it."""
    global _all_trusted
    before, _all_trusted = _all_trusted, True
    try:
        yield
    finally:
        _all_trusted = before


def record(findings: Mapping[str, str]) -> Path:
    """Keep what is wrong with which kernel of this device, in place of what was kept before.

    Returns the file.

    Raises:
        KernelError: it cannot be written.
    """
    file = _file()
    try:
        known = _read(file)
    except KernelError:
        known = {}  # What cannot be read is of no use to anyone.
    known[_key()] = dict(findings)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(known, indent=1).encode())
    except OSError as e:
        raise KernelError(
            f"{file}: {e.strerror}; which kernels are right here cannot be kept"
        ) from None
    _stored.cache_clear()
    return file


@cache
def _stored() -> Mapping[str, str]:
    return MappingProxyType(_read(_file()).get(_key(), {}))


def _read(file: Path) -> dict[str, dict[str, str]]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        known = None
    kinds = (dict, dict, str)
    if not _is_nested(known, kinds):
        raise KernelError(f"{file} cannot be read; write it anew with mlx-k3 doctor")
    return known


def _is_nested(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether ``value`` is made of dictionaries as deep as ``kinds`` says."""
    kind, *inner = kinds
    if not isinstance(value, kind):
        return False
    return not inner or all(_is_nested(x, tuple(inner)) for x in value.values())


def _file() -> Path:
    return cache_folder() / "kernels.json"


def _key() -> str:
    """What a finding holds for: another device or version has to be tried anew."""
    device = mx.device_info().get("device_name", "unknown")
    return f"{device}, mlx {version('mlx')}, mlx-k3 {__version__}"
