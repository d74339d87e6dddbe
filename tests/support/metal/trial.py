"""Kernels made up on the spot, to try the host runner."""

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_k3.kernels.build import Kernel, Launch


def trial(
    folder: Path,
    body: str,
    x: mx.array,
    *,
    helpers: str = "// Nothing.",
    shape: tuple[int, ...] | None = None,
    groups: tuple[int, int, int] = (1, 1, 1),
    threads: int = 64,
    template: tuple = (),
) -> Launch:
    """A launch of ``body``, kept in ``folder`` as the kernel ``tried``.

    It has one input ``x`` and one output ``y`` of ``x``'s dtype and of ``shape``, if not ``x``'s.
    """
    text = f"{helpers}\n\nKERNEL {{\n{textwrap.dedent(body).strip()}\n}}\n"
    own = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    own.mkdir(exist_ok=True)
    (own / "tried.h").write_text(text)
    kernel = Kernel("tried", ("x",), ("y",), folder=own)
    outputs = ((x.shape if shape is None else shape, x.dtype),)
    return Launch(kernel, (x,), outputs, groups, threads, template, ())


def without_each_barrier(folder: Path, launch: Launch) -> Iterator[tuple[int, Launch]]:
    """``launch`` less one barrier of its kernel's own file, for every one, and the line it had."""
    kernel = launch.kernel
    text = (kernel.folder / f"{kernel.name}.h").read_text()
    for number, found in enumerate(re.finditer(r"\b(?:SIMD_)?BARRIER(?:_DEVICE)?\(\);", text)):
        own = folder / f"{kernel.name}_{number}"
        own.mkdir()
        (own / f"{kernel.name}.h").write_text(text[: found.start()] + text[found.end() :])
        yield (
            text.count("\n", 0, found.start()) + 1,
            replace(launch, kernel=replace(kernel, folder=own)),
        )
