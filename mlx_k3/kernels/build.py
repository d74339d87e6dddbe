"""A kernel's text becomes a kernel of the device at hand.

Owns the choice of the backend, the text that MLX compiles for it, and the compiled kernels. Knows
nothing of what a kernel computes. A kernel's file in ``source/`` holds helper functions and, last,
the body between ``KERNEL {`` and ``}``; docs/kernels.md describes the dialect it is written in.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

from ..errors import KernelError
from .verdicts import refused

Backend = Literal["metal", "cuda", "reference"]
Output = tuple[Sequence[int], mx.Dtype]

SOURCE = Path(__file__).parent / "source"
SIMD = 32
# Metal passes inputs with fewer elements in another address space, so their kernels differ.
SMALL = 8

# What a body knows of its place. MLX passes a Metal builtin only if the body has its name.
BUILTINS = {
    "LANE": ("thread_index_in_simdgroup", "threadIdx.x % 32"),
    "SIMD_GROUP": ("simdgroup_index_in_threadgroup", "threadIdx.x / 32"),
    "THREAD": ("thread_index_in_threadgroup", "threadIdx.x"),
    "GROUP_X": ("threadgroup_position_in_grid.x", "blockIdx.x"),
    "GROUP_Y": ("threadgroup_position_in_grid.y", "blockIdx.y"),
    "GROUP_Z": ("threadgroup_position_in_grid.z", "blockIdx.z"),
}

_forced: Backend | None = None


def backend() -> Backend:
    """Which path the operations take: a GPU's kernels, or ``"reference"``, plain MLX ops."""
    return _forced or _device_backend()


@cache
def _device_backend() -> Backend:
    if mx.default_device().type != mx.gpu:
        return "reference"
    return "metal" if mx.metal.is_available() else "cuda"


@contextmanager
def using(name: Backend) -> Iterator[None]:
    """Have the operations take path ``name`` in a block, in every thread of the process."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


class Text(NamedTuple):
    """What MLX is given for one kernel."""

    name: str
    header: str
    body: str


@dataclass(slots=True)  # made for every call: frozen ones take thrice as long
class Launch:
    """One run of a kernel."""

    kernel: "Kernel"
    inputs: tuple[mx.array, ...]
    outputs: tuple[Output, ...]
    groups: tuple[int, int, int]
    threads: int
    template: tuple[tuple[str, int | bool | mx.Dtype], ...]
    constants: tuple[tuple[str, float], ...]

    def text(self, dialect: Literal["metal", "cuda"]) -> Text:
        """The text; its name says all that it depends on, as MLX may reuse code by name."""
        inputs = tuple((x.dtype, x.ndim == 0, x.size < SMALL) for x in self.inputs)
        dtypes = tuple(dtype for _, dtype in self.outputs)
        return _text(self.kernel, dialect, self.threads, self.constants, (inputs, dtypes))


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel written in ``source/NAME.h``, compiled when it first runs.

    ``inputs`` and ``outputs`` name the pointers its body sees, in order; ``needs`` the parts of the
    dialect beyond the prelude, such as ``"mma"`` of ``mma.metal.h`` and ``mma.cuda.h``.
    ``shared_bytes`` is what the group shares beyond its arrays, for kernels of CUDA alone.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needs: tuple[str, ...] = ()
    folder: Path = SOURCE
    shared_bytes: int = 0

    @property
    def runs(self) -> bool:
        """Whether it is to be used: there is a GPU, and doctor found nothing wrong with it."""
        return backend() != "reference" and self.name not in refused()

    def parts(self) -> tuple[str, str]:
        """The helpers and the body in the kernel's file."""
        helpers, _, body = _read(self.folder / f"{self.name}.h").partition("\nKERNEL {\n")
        body, end, rest = body.rpartition("\n}")
        if not end or rest.strip():
            raise ValueError(f"{self.name}.h does not end with KERNEL {{ ... }}")
        return helpers + "\n", body + "\n"

    def __call__(
        self,
        *inputs: mx.array,
        outputs: Sequence[Output],
        groups: tuple[int, int, int],
        threads: int,
        template: Mapping[str, int | bool | mx.Dtype] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> list[mx.array]:
        """Run the kernel on the GPU.

        Args:
            inputs: one array for each name; made contiguous when they are not.
            outputs: shape and dtype of every output; what the kernel does not write is undefined.
            groups: how many threadgroups, along x, y and z.
            threads: of a group, a multiple of 32; ``GROUP_SIZE`` to the body.
            template: integers, booleans and types the body is compiled for.
            constants: float32 values it is compiled with.

        Raises:
            KernelError: it does not compile, or the device has not what it asks for.
        """
        if len(inputs) != len(self.inputs) or len(outputs) != len(self.outputs) or threads % SIMD:
            raise ValueError(f"kernel {self.name}: wrong number of inputs, outputs or threads")
        template = tuple(template.items()) if template else ()
        constants = tuple(constants.items()) if constants else ()
        launch = Launch(self, inputs, tuple(outputs), groups, threads, template, constants)
        return LAUNCHERS[backend()](launch)


def _on_metal(launch: Launch) -> list[mx.array]:
    # Scalars and small inputs are other parameters there.
    forms = tuple([(x.ndim == 0, x.size < SMALL) for x in launch.inputs])
    return _run("metal", launch, forms)


def _on_cuda(launch: Launch) -> list[mx.array]:
    return _run("cuda", launch, None)


# How each backend runs a kernel. The reference has none: who asks for it does not get here.
LAUNCHERS: dict[str, Callable[[Launch], list[mx.array]]] = {"metal": _on_metal, "cuda": _on_cuda}


@dataclass(slots=True)
class _Compiled:
    """What launches have in common that differ in their arrays' values and sizes alone."""

    call: Callable[..., list[mx.array]]  # MLX's
    template: list[tuple[str, int | bool | mx.Dtype]]
    output_dtypes: list[mx.Dtype]
    tried: bool = False


_compiled: dict[tuple, _Compiled] = {}


def _run(dialect: Literal["metal", "cuda"], launch: Launch, forms: tuple | None) -> list[mx.array]:
    """Run ``launch``; ``forms`` is what the text depends on beside all that is known here."""
    inputs, outputs, threads = launch.inputs, launch.outputs, launch.threads
    dtypes = [dtype for _, dtype in outputs]
    key = (
        *(launch.kernel, dialect, threads, launch.template, launch.constants, forms),
        *[x.dtype for x in inputs],
        *dtypes,
    )
    compiled = _compiled.get(key)
    if compiled is None:
        call = _mlx_kernel(launch.kernel, dialect, launch.text(dialect))
        compiled = _compiled[key] = _Compiled(call, list(launch.template), dtypes)
    x, y, z = launch.groups
    results = compiled.call(
        inputs=[*inputs],
        template=compiled.template,
        grid=(x * threads, y, z),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=compiled.output_dtypes,
    )
    if not compiled.tried and _can_evaluate(inputs):
        # MLX compiles when it evaluates, wherever that is; here it is known which kernel fails.
        try:
            mx.eval(results)
        except RuntimeError as e:
            raise KernelError(
                f"the GPU kernel {launch.kernel.name} does not run here ({_gist(str(e))}); mlx-k3 "
                "doctor tries all kernels and has plain operations take the place of such"
            ) from e
        compiled.tried = True
    return results


def _can_evaluate(inputs: Sequence[mx.array]) -> bool:
    """Evaluates ``inputs``; False inside ``mx.compile`` and ``mx.vmap``, which trace only."""
    try:
        mx.eval(*inputs)
    except ValueError:
        return False
    return True


def _gist(message: str) -> str:
    """The line of a compiler's message that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


@cache
def _mlx_kernel(kernel: Kernel, dialect: str, text: Text) -> Callable[..., list[mx.array]]:
    factory = mx.fast.metal_kernel if dialect == "metal" else mx.fast.cuda_kernel
    more = {"shared_memory": kernel.shared_bytes} if kernel.shared_bytes else {}
    return factory(
        name=text.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        header=text.header,
        source=text.body,
        **more,
    )


@cache
def _text(kernel: Kernel, dialect: str, threads: int, constants: tuple, types: tuple) -> Text:
    helpers, body = kernel.parts()
    files = [f"{part}.{dialect}.h" for part in ("prelude", *kernel.needs)]
    prelude = "\n".join(_read(SOURCE / file) for file in files)
    values = "".join(f"#define {key} ({float(value)!r}f)\n" for key, value in constants)
    header = f"{prelude}\n#define GROUP_SIZE {threads}\n{values}\n{helpers}\n"
    body = _builtins(body, dialect) + body
    digest = hashlib.sha256(repr((header, body, types)).encode()).hexdigest()
    return Text(f"{kernel.name}_{digest[:16]}", header, body)


def _builtins(body: str, dialect: str) -> str:
    which = 0 if dialect == "metal" else 1
    return "".join(
        f"  const uint {name} = {sources[which]};\n"
        for name, sources in BUILTINS.items()
        if re.search(rf"\b{name}\b", body)
    )


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
