"""The cases of Kimi Delta Attention, and of one token's attention to latents."""

from collections.abc import Iterator

import mlx.core as mx

from .. import kernels
from ..kernels.kda_conv import kda_conv
from ..kernels.kda_decode import kda_decode
from ..kernels.mla_decode import mla_decode, mla_decode_pays, mla_decode_reference
from .case import EPS, PREFILL_CHAIN, TOLERANCE, Case, State, nbytes, normal, of_tokens
from .sizes import Sizes


def kda_cases(sizes: Sizes) -> Iterator[Case]:
    """A layer's few tokens, and the parts of a prompt."""
    for B, T in sizes.decode:
        yield decode_case(sizes, B, T)
    for T in sizes.prompts:
        yield prefill_case(sizes, T, sizes.dtype)
        yield conv_case(sizes, T)
        yield norm_case(sizes, T)
    for T in sizes.exact_prompts:
        yield prefill_case(sizes, T, mx.float32)


def decode_case(sizes: Sizes, B: int, T: int) -> Case:
    """All of a layer between its projections; state and convolution go from step to step."""
    config, dtype = sizes.config, sizes.dtype
    H, D, W = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    qkv, a, g = (normal(dtype, B, T, n * H * D) for n in (3, 1, 1))
    b, conv = normal(dtype, B, T, H), normal(dtype, B, W - 1, 3 * H * D)
    weight = 0.5 * normal(mx.float32, 3 * H * D, W)
    A_log, dt_bias, norm = (normal(mx.float32, n) for n in (H, H * D, D))
    state = normal(mx.float32, B, H, D, D)

    def step(_: mx.array, conv: mx.array, state: mx.array) -> State:
        inputs = qkv, conv, weight, a, A_log, dt_bias, b, g, norm, state
        return kda_decode(*inputs, lower_bound=config.gate_lower_bound, eps=EPS)

    names = ("qkv", "weight", "a", "A_log", "dt_bias", "b", "g", "norm")
    arrays = (qkv, weight, a, A_log, dt_bias, b, g, norm)
    return Case(
        "kda_decode",
        f"kda_decode {B} x {of_tokens(T)}",
        ("kda_decode",),
        (a, conv, state),
        step,
        nbytes(*arrays, a) + 2 * nbytes(conv, state),
        TOLERANCE[dtype],
        inputs=dict(zip(names, arrays, strict=True)),
    )


def prefill_case(sizes: Sizes, T: int, dtype: mx.Dtype) -> Case:
    """The delta rule over a prompt; the state goes from step to step."""
    H, D = sizes.config.kda_num_heads, sizes.config.kda_head_dim
    q, k = (kernels.l2norm(normal(mx.float32, 1, T, H, D)) for _ in range(2))
    v = normal(dtype, 1, T, H, D)
    q, k = ((D**-0.5 * q).astype(dtype), k.astype(dtype))
    log_decay = -5 * mx.random.uniform(shape=(1, T, H, D))
    beta = mx.random.uniform(shape=(1, T, H))
    output, state = mx.zeros((1, T, H, D)), normal(mx.float32, 1, H, D, D)
    mx.eval(q, k, v, log_decay, beta, output, state)

    def step(_: mx.array, state: mx.array) -> State:
        return kernels.kda(q, k, v, log_decay, beta, state)

    exact = " float32" if dtype == mx.float32 != sizes.dtype else ""
    return Case(
        "kda",
        f"kda {of_tokens(T)}{exact}",
        ("kda_prefill_chunks", "kda_prefill_states"),
        (output, state),
        step,
        nbytes(q, k, v, log_decay, beta, output) + 2 * state.nbytes,
        TOLERANCE[dtype],
        flops=7 * T * H * D * D,
        chain=PREFILL_CHAIN,
        inputs={"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta},
    )


def conv_case(sizes: Sizes, T: int) -> Case:
    """Convolution and norm over a prompt; the convolution's inputs go from step to step."""
    config, dtype = sizes.config, sizes.dtype
    H, D, W = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    qkv = normal(dtype, 1, T, 3 * H * D)
    weight = 0.5 * normal(mx.float32, 3 * H * D, W)
    conv, heads = mx.zeros((1, W - 1, 3 * H * D), dtype), mx.zeros((1, T, H, D), dtype)

    def step(q: mx.array, k: mx.array, v: mx.array, conv: mx.array) -> State:
        # The weight depends on the step before, for one small operation.
        return kda_conv(qkv, weight + q[0, 0, 0, 0], conv, H)

    return Case(
        "kda_conv",
        f"kda_conv {of_tokens(T)}",
        ("kda_prefill_conv",),
        (heads, heads, heads, conv),
        step,
        2 * qkv.nbytes,
        TOLERANCE[dtype],
        chain=PREFILL_CHAIN,
        inputs={"qkv": qkv, "weight": weight},
    )


def norm_case(sizes: Sizes, T: int) -> Case:
    """The gated norm of a prompt's outputs; a step's result is the next one's gate."""
    H, D = sizes.config.kda_num_heads, sizes.config.kda_head_dim
    x, gate = normal(mx.float32, 1, T, H, D), normal(sizes.dtype, 1, T, H, D)
    weight = normal(mx.float32, D)

    def step(gate: mx.array) -> State:
        return (kernels.gated_rms_norm(x, gate, weight, EPS),)

    return Case(
        "gated_rms_norm",
        f"gated_rms_norm {of_tokens(T)}",
        ("gated_rms_norm",),
        (gate,),
        step,
        nbytes(x, gate, gate),
        TOLERANCE[sizes.dtype],
        chain=PREFILL_CHAIN,
        inputs={"x": x, "weight": weight},
    )


def mla_cases(sizes: Sizes) -> Iterator[Case]:
    """One token's attention to latents, where there is a kernel for it: on NVIDIA's Hopper."""
    config, dtype = sizes.config, sizes.dtype
    H, rank, shared = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    for T in sizes.contexts:
        q = 0.1 * normal(dtype, 1, H, 1, config.qk_nope_head_dim + shared)
        blocks = [(normal(dtype, 1, 1, T, rank), normal(dtype, 1, 1, T, shared))]
        if not mla_decode_pays(q, blocks, rank):
            return

        def step(q_latent: mx.array, q: mx.array = q, blocks: list = blocks, T: int = T) -> State:
            here = mla_decode_pays(q, blocks, rank)
            return ((mla_decode if here else mla_decode_reference)(q, q_latent, blocks, T),)

        yield Case(
            "mla_decode",
            f"mla_decode {of_tokens(T)}",
            ("mla_decode", "mla_merge"),
            (0.1 * normal(dtype, 1, H, 1, rank),),
            step,
            nbytes(*blocks[0]),
            TOLERANCE[dtype],
            flops=2 * H * T * (2 * rank + shared),
            inputs={"q": q, "latents": blocks[0][0], "keys": blocks[0][1]},
        )
