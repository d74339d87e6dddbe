"""Kernels made up on the spot, to try the host runner."""

import hashlib
import textwrap
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
