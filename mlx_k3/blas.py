"""Which BLAS MLX multiplies with on a Linux CPU.

Owns one act: loading OpenBLAS before MLX. MLX's CPU wheel carries a reference BLAS, many times
slower; the dynamic linker prefers symbols that are loaded already, so OpenBLAS has to be there
first. Knows nothing of MLX beyond its module's name. On macOS MLX uses Accelerate: nothing to do.
"""

import ctypes
import sys

_ADVICE = (
    "install OpenBLAS for many times the speed on the CPU "
    "(Debian, Ubuntu: apt install libopenblas0; Fedora: dnf install openblas)"
)

_openblas: ctypes.CDLL | None = None
_too_late = False


def preload() -> None:
    """Load OpenBLAS for MLX to use, where the system has it. Takes milliseconds, once.

    Symbols bind when ``mlx.core`` is loaded, so afterwards this changes nothing: :func:`advice`
    then says so.
    """
    global _openblas, _too_late
    if sys.platform != "linux" or _openblas is not None:
        return
    if "mlx.core" in sys.modules:
        _too_late = True
        return
    try:
        _openblas = ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return  # Not installed. Everything works, slower; `mlx-k3 doctor` says what to do.


def name() -> str:
    """What MLX multiplies with on the CPU, for people: ``OpenBLAS 0.3.21 (Haswell)``."""
    if sys.platform != "linux":
        return "Accelerate"
    if _openblas is None:
        return "unknown: MLX was imported first" if _too_late else "reference BLAS of MLX's wheel"
    config, core = _openblas.openblas_get_config, _openblas.openblas_get_corename
    config.restype = core.restype = ctypes.c_char_p
    version = " ".join(config().decode().split()[:2])
    return f"{version} ({core().decode()})"


def advice() -> str | None:
    """What would make products on the CPU faster, or None if nothing is known to."""
    if sys.platform != "linux" or _openblas is not None:
        return None
    return "import mlx_k3 before mlx.core" if _too_late else _ADVICE
