"""Sizes as people write them: ``24GB``, ``1.5 GiB``, ``13GB/s``; and a context of ``32k`` tokens.

Decimal and binary suffixes mean what they say: 1 GB = 10^9 bytes, 1 GiB = 2^30 bytes. Context
lengths are counted in powers of two: 32k tokens are 32768.
"""

import re

from .errors import K3Error

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*(?:/s)?\s*")

_TOKENS = re.compile(r"\s*([0-9]+)\s*([kKmM]?)\s*")


def parse_bytes(text: str) -> int:
    """``"24GB"`` -> 24_000_000_000. Accepts a trailing ``/s`` for rates.

    Raises:
        K3Error: if ``text`` is not a number with an optional unit.
    """
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].upper())
    if unit is None:
        raise K3Error(f"{text!r} is not a size; write for example 24GB or 512MiB")
    return int(float(match[1]) * unit)


def parse_tokens(text: str) -> int:
    """``"32k"`` -> 32768, ``"1M"`` -> 1048576, ``"5000"`` -> 5000.

    Raises:
        K3Error: ``text`` is not a number of tokens above 0.
    """
    match = _TOKENS.fullmatch(text)
    tokens = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if tokens < 1:
        raise K3Error(f"{text!r} is not a number of tokens; write for example 32k")
    return tokens


def format_bytes(n: float) -> str:
    """17547264 -> ``"17.5 MB"`` (decimal units, three significant digits)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n) < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or abs(n) >= 99.95 else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB" if abs(n) < 999.5 else f"{n:.0f} TB"
