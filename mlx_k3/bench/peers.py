"""The cases as mlx-lm computes them, with its own kernels where it has them on this device.

Knows mlx-lm's K3 model by its parts; a version of mlx-lm without one of them times nothing.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .case import EPS, Case, State

try:
    from mlx_lm.models import gated_delta, kimi_k3
    from mlx_lm.models.kimi_linear import ShortConv1d
    from mlx_lm.models.switch_layers import SwitchGLU
except ImportError:
    kimi_k3 = None

Step = Callable[..., State]

BETA, LINEAR_BETA, LOWER_BOUND = 4.0, 25.0, -5.0  # K3's
L2_EPS = 1e-6
# Where there is no kernel of mlx-lm's, it goes token by token.
MOST_PLAIN_TOKENS = 1024


def mlx_lm_step(case: Case) -> Step | None:
    """``case``'s step by mlx-lm, or None where it has none, or one that takes minutes."""
    if kimi_k3 is None or case.operation not in STEPS:
        return None
    return STEPS[case.operation](case)


def _situ(case: Case) -> Step:
    up = case.inputs["up"]
    return lambda gate: (kimi_k3._situ(up, gate, BETA, LINEAR_BETA),)


def _blocks(blocks: mx.array) -> "kimi_k3.ResidualBlocks":
    """``[N, M, D]`` as mlx-lm keeps them, with what it computes once a block."""
    kept = kimi_k3.ResidualBlocks(EPS)
    for m in range(blocks.shape[1]):
        kept.append(blocks[:, m])
    mx.eval(kept.raw, kept.inv_rms)
    return kept


def _mix(case: Case) -> Step:
    candidates, weight = case.inputs["candidates"], case.inputs["weight"]
    blocks, current = _blocks(candidates[:, :-1]), mx.contiguous(candidates[:, -1])
    mx.eval(current)

    def step(last: mx.array) -> State:
        near = weight + last[0].astype(mx.float32)
        return (kimi_k3._attn_res_mix(blocks, current, near, EPS),)

    return step


def _residual_step(case: Case) -> Step:
    update, weight, norm = _of(case, "update", "weight", "norm")
    blocks = _blocks(case.inputs["blocks"])

    def step(last: mx.array) -> State:
        mixed = kimi_k3._attn_res_mix(blocks, last + update, weight, EPS)
        return (mx.fast.rms_norm(mixed, norm, EPS),)

    return step


def _router(case: Case) -> Step:
    bias, top_k = case.inputs["bias"], case.inputs["top_k"].item()

    def step(logits: mx.array) -> State:
        chosen, weights = kimi_k3._group_expert_select(logits, bias, top_k, 1, 1, 1.0, True)
        return (logits + mx.put_along_axis(mx.zeros_like(logits), chosen, weights, -1),)

    return step


def _experts(case: Case) -> Step:
    chosen, weights = _of(case, "chosen", "weights")
    E, H = case.inputs["gate_proj.scales"].shape[:2]
    D = case.inputs["down_proj.scales"].shape[1]
    switch = SwitchGLU(D, H, E, activation=kimi_k3.SiTU(BETA, LINEAR_BETA))
    nn.quantize(switch, group_size=32, bits=4, mode="mxfp4")
    for name, array in case.inputs.items():
        projection, _, part = name.partition(".")
        if part:
            switch[projection][part] = array
    switch.eval()

    def step(z: mx.array) -> State:
        y = switch(z, chosen)
        return ((y * weights[..., None]).sum(axis=-2).astype(z.dtype),)

    return step


def _decode(case: Case) -> Step:
    names = ("qkv", "a", "b", "g", "A_log", "dt_bias", "norm")
    qkv, a, b, g, A_log, dt_bias, norm = _of(case, *names)
    (B, T, C), H, D = qkv.shape, A_log.size, norm.size
    heads, conv = (B, T, H, D), _short_conv(case, qkv.dtype)

    def step(_: mx.array, conv_state: mx.array, state: mx.array) -> State:
        x, conv_state = conv(qkv, conv_state, None, None)
        q, k, v = (part.reshape(heads) for part in mx.split(x, 3, axis=-1))
        q, k = gated_delta.normalize_qk(q, k, inv_scale=D**-0.5, eps=L2_EPS)
        gate = a.reshape(heads), b, A_log[:, None], dt_bias.reshape(H, D)
        y, state = gated_delta.gated_delta_update(
            *(q, k, v), *gate, state=state, lower_bound=LOWER_BOUND
        )
        y = mx.fast.rms_norm(y, norm.astype(y.dtype), EPS) * mx.sigmoid(g.reshape(heads))
        return y.reshape(B, T, C // 3), conv_state, state

    return mx.compile(step) if T == 1 and mx.metal.is_available() else step  # as its layer does


def _prefill(case: Case) -> Step | None:
    q, k, v, log_decay, beta = _of(case, "q", "k", "v", "log_decay", "beta")
    on_metal = mx.metal.is_available() and mx.default_device().type == mx.gpu
    if not on_metal and q.shape[1] > MOST_PLAIN_TOKENS:
        return None
    update = gated_delta.gated_delta_kernel if on_metal else gated_delta.gated_delta_ops
    return lambda _, state: update(q, k, v, mx.exp(log_decay), beta, state)


def _conv(case: Case) -> Step:
    qkv = case.inputs["qkv"]
    H, D = case.state[0].shape[2:]
    conv = _short_conv(case, qkv.dtype)

    def step(last: mx.array, *rest: mx.array) -> State:
        # Depends on the step before by one small operation, as the kernel's step does.
        x, conv_state = conv(qkv, rest[-1] + last[0, 0, 0, 0], None, None)
        q, k, v = (part.reshape(*qkv.shape[:2], H, D) for part in mx.split(x, 3, axis=-1))
        q, k = gated_delta.normalize_qk(q, k, inv_scale=D**-0.5, eps=L2_EPS)
        return q, k, v, conv_state

    return step


def _gated_norm(case: Case) -> Step:
    x, weight = _of(case, "x", "weight")
    x, weight = (z.astype(case.state[0].dtype) for z in (x, weight))  # as its delta rule gives it
    mx.eval(x, weight)
    return lambda gate: (mx.fast.rms_norm(x, weight, EPS) * mx.sigmoid(gate),)


def _mla(case: Case) -> Step:
    q, latents, keys = _of(case, "q", "latents", "keys")
    q_key = q[..., -keys.shape[-1] :]

    def step(q_latent: mx.array) -> State:
        scores = q_key @ keys.swapaxes(-1, -2)
        return (
            mx.fast.scaled_dot_product_attention(
                q_latent, latents, latents, scale=1.0, mask=scores
            ),
        )

    return step


def _short_conv(case: Case, dtype: mx.Dtype) -> "ShortConv1d":
    weight = case.inputs["weight"]
    conv = ShortConv1d(*weight.shape)
    conv.conv.weight = weight[..., None].astype(dtype)
    mx.eval(conv.parameters())
    return conv


def _of(case: Case, *names: str) -> tuple[mx.array, ...]:
    return tuple(case.inputs[name] for name in names)


STEPS: dict[str, Callable[[Case], Step | None]] = {
    "situ": _situ,
    "attention_residual": _mix,
    "residual_step": _residual_step,
    "router": _router,
    "experts": _experts,
    "kda_decode": _decode,
    "kda": _prefill,
    "kda_conv": _conv,
    "gated_rms_norm": _gated_norm,
    "mla_decode": _mla,
}
