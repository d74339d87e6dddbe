"""SiTU-GLU, the activation of K3's MLPs and experts."""

import mlx.core as mx


def situ(gate: mx.array, up: mx.array, beta: float, linear_beta: float | None) -> mx.array:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``, in float32.

    ``gate`` and ``up`` have the same shape; without a ``linear_beta``, ``up`` is used as it is.
    The result has ``up``'s dtype.
    """
    # On a CPU, mx.compile would need a C++ compiler on the user's machine.
    run = _situ if mx.default_device() == mx.cpu else _compiled_situ
    return run(gate, up, beta, linear_beta)


def _situ(gate, up, beta, linear_beta):
    dtype = up.dtype
    gate, up = gate.astype(mx.float32), up.astype(mx.float32)
    if linear_beta is not None:
        up = linear_beta * mx.tanh(up / linear_beta)
    return (beta * mx.tanh(gate / beta) * mx.sigmoid(gate) * up).astype(dtype)


_compiled_situ = mx.compile(_situ, shapeless=True)
