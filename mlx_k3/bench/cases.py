"""The list of what is tried and timed: every operation that has a kernel, at K3's sizes.

A case is a step from one state to the next, through the public operation. Which path that takes is
up to :func:`mlx_k3.kernels.using`, so a kernel and its reference run the very same lines. Owns
inputs, and what a step moves and computes at least; knows nothing of clocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .. import kernels
from ..config import K3Config
from ..kernels.experts import Packed, mxfp4_experts_reference
from ..kernels.kda_conv import kda_conv
from ..kernels.kda_decode import kda_decode
from ..kernels.mla_decode import mla_decode, mla_decode_pays, mla_decode_reference
from ..models.bank import ResidentBank

State = Sequence[mx.array]

CHAIN = 32  # steps that are evaluated at once
PREFILL_CHAIN = 4
BLOCKS = 8  # of Attention Residuals, in K3's last layers
EPS = 1e-5
# Of the output's scale. Inputs of 16 bits are rounded once more here and there.
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    operation: str
    name: str
    kernels: tuple[str, ...]  # what it runs on a GPU
    state: State
    step: Callable[..., State]  # the next state
    least_bytes: int  # a step reads and writes
    tolerance: float
    flops: int = 0  # of a step's products
    chain: int = CHAIN
    inputs: Mapping[str, mx.array] = field(default_factory=dict)  # what stays, for other programs
    twin: Callable[..., State] | None = None  # where plain MLX rounds more than the reference does


class Sizes(NamedTuple):
    """Of what the cases are made."""

    config: K3Config
    experts: int  # in memory; a token takes some of them
    dtype: mx.Dtype
    tokens: tuple[int, ...] = (1, 8, 512)  # of element-wise steps
    expert_tokens: tuple[int, ...] = (1, 2, 3, 8, 64)
    decode: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (1, 2), (1, 4), (1, 8))  # rows, tokens
    prompts: tuple[int, ...] = (1024, 4096, 16384)
    exact_prompts: tuple[int, ...] = (4096,)  # in float32
    contexts: tuple[int, ...] = (4096, 65536, 1 << 20)  # that a token attends to


def k3_sizes(experts: int, dtype: mx.Dtype = mx.bfloat16) -> Sizes:
    """K3's own sizes, with ``experts`` of its 896."""
    file = Path(__file__).parents[1] / "experts" / "kimi-k3-config.json"
    return Sizes(K3Config.from_file(file), experts, dtype)


def doctor_sizes() -> Sizes:
    """K3's widths, few tokens and experts: seconds, and half a gigabyte."""
    return k3_sizes(32)._replace(
        tokens=(1, 512),
        expert_tokens=(1, 4),
        decode=((1, 1), (1, 4)),
        prompts=(512,),
        exact_prompts=(512,),
        contexts=(4096,),
    )


def cpu_sizes() -> Sizes:
    """For a machine where only plain operations run: float32, in which a CPU computes."""
    return k3_sizes(32, mx.float32)._replace(
        tokens=(1, 512),
        expert_tokens=(1, 16),
        decode=((1, 1),),
        prompts=(512,),
        exact_prompts=(),
        contexts=(),
    )


def tiny_sizes() -> Sizes:
    """The same cases in small, to see that they run."""
    sizes = k3_sizes(5)
    config = replace(
        sizes.config,
        hidden_size=64,
        kda_num_heads=2,
        kda_head_dim=32,
        routed_expert_hidden_size=96,
        moe_intermediate_size=64,
        num_experts_per_token=3,
    )
    return sizes._replace(
        config=config,
        tokens=(1, 5),
        expert_tokens=(1, 4),
        decode=((1, 1), (1, 3)),
        prompts=(40,),
        exact_prompts=(40,),
        contexts=(),
    )


def cases(sizes: Sizes, only: Sequence[str] | None = None) -> Iterator[Case]:
    """The cases of the groups in ``only``, by default of all; a case's arrays live as long as it.

    The numbers are random and the same every time.
    """
    for group in GROUPS if only is None else only:
        mx.random.seed(0)
        yield from GROUPS[group](sizes)


def situ_cases(sizes: Sizes) -> Iterator[Case]:
    """Of the experts of a token, of the shared experts, and of a block of a prompt."""
    config, dtype = sizes.config, sizes.dtype
    inner = config.moe_intermediate_size
    wide = inner * config.num_shared_experts
    chosen = config.num_experts_per_token
    for rows, width in ((chosen, inner), (1, wide), (sizes.tokens[-1], wide)):
        gate, up = _normal(dtype, rows, width), _normal(dtype, rows, width)

        def step(gate: mx.array, up: mx.array = up) -> State:
            betas = config.activation_situ_beta, config.activation_situ_linear_beta
            return (kernels.situ(gate, up, *betas),)

        yield Case(
            "situ",
            f"situ {rows} x {width}",
            ("situ",),
            (gate,),
            step,
            _nbytes(gate, up, gate),
            TOLERANCE[dtype],
            inputs={"up": up},
        )


def residual_cases(sizes: Sizes) -> Iterator[Case]:
    """The mix of 8 blocks and the running sum: alone, and with the addition and norm around it."""
    D, dtype = sizes.config.hidden_size, sizes.dtype
    weight, norm = _normal(mx.float32, D), _normal(dtype, D)
    for N in sizes.tokens:
        blocks, update = _normal(dtype, N, BLOCKS, D), _normal(dtype, N, D)
        candidates = _normal(dtype, N, BLOCKS + 1, D)

        def mix(last: mx.array, candidates: mx.array = candidates) -> State:
            # The weight depends on the step before; it costs every path the same two operations.
            near = weight + last[0].astype(mx.float32)
            return (kernels.attention_residual(candidates, near, EPS),)

        def step(last: mx.array, blocks: mx.array = blocks, update: mx.array = update) -> State:
            return (kernels.residual_step(blocks, last, update, weight, norm, EPS)[0],)

        one = Case(
            "attention_residual",
            f"attention_residual {_tokens(N)}",
            ("attention_residual",),
            (update,),
            mix,
            (BLOCKS + 2) * update.nbytes,
            TOLERANCE[dtype],
            inputs={"candidates": candidates, "weight": weight},
        )
        yield one
        yield replace(
            one,
            operation="residual_step",
            name=f"residual_step {_tokens(N)}",
            step=step,
            least_bytes=(BLOCKS + 4) * update.nbytes,
            inputs={"blocks": blocks, "update": update, "weight": weight, "norm": norm},
        )


def router_cases(sizes: Sizes) -> Iterator[Case]:
    """The chosen experts and their weights, which two operations more add to the next logits."""
    E, top_k = sizes.config.expert_counts[-1], sizes.config.num_experts_per_token
    bias = _normal(mx.float32, E)
    for N in (sizes.tokens[0], sizes.tokens[-1]):
        logits = _normal(mx.float32, N, E)

        def step(logits: mx.array) -> State:
            chosen, weights = kernels.route(logits, bias, top_k)
            return (logits + mx.put_along_axis(mx.zeros_like(logits), chosen, weights, -1),)

        yield Case(
            "router",
            f"router {_tokens(N)}",
            ("router",),
            (logits,),
            step,
            _nbytes(logits, bias) + N * top_k * 8,
            TOLERANCE[mx.float32],
            inputs={"bias": bias, "top_k": mx.array(top_k)},
        )


def experts_cases(sizes: Sizes) -> Iterator[Case]:
    """The chosen experts of some tokens; without the kernels, MLX's gathered products.

    Beyond a few tokens MLX sorts; on CUDA it compiles that for more than a minute, once. On a CPU
    many tokens go expert by expert.
    """
    config = sizes.config
    E, D, H = sizes.experts, config.expert_dim, config.moe_intermediate_size
    stacks = expert_stacks(E, D, H)
    mx.eval(stacks)
    bank = ResidentBank.over(config, stacks)
    expert_bytes = _nbytes(*stacks.values()) // E
    k = min(config.num_experts_per_token, E)
    for N in sizes.expert_tokens:
        chosen = mx.argsort(mx.random.uniform(shape=(N, E)), axis=-1)[:, :k].astype(mx.uint32)
        weights = mx.full((N, k), 1 / k)
        z = _normal(sizes.dtype, N, D)

        def step(z: mx.array, chosen: mx.array = chosen, weights: mx.array = weights) -> State:
            return (bank(z, chosen, weights),)

        def twin(z: mx.array, chosen: mx.array = chosen, weights: mx.array = weights) -> State:
            # Token by token: every expert that is unpacked for it takes some 130 MB.
            rows = []
            for n in range(len(z)):
                one = slice(n, n + 1)
                rows.append(_exact_experts(config, stacks, z[one], chosen[one], weights[one]))
                mx.eval(rows[-1])
            return (mx.concatenate(rows),)

        yield Case(
            "experts",
            f"experts {_tokens(N)}",
            ("mxfp4_gate_up", "mxfp4_down"),
            (z,),
            step,
            len(set(chosen.flatten().tolist())) * expert_bytes + 2 * z.nbytes,
            TOLERANCE[sizes.dtype],
            flops=6 * N * k * D * H,
            inputs={**stacks, "chosen": chosen, "weights": weights},
            twin=twin,
        )


def _exact_experts(
    config: K3Config,
    stacks: Mapping[str, mx.array],
    z: mx.array,
    chosen: mx.array,
    weights: mx.array,
) -> mx.array:
    names = ("gate_proj", "up_proj", "down_proj")
    packed = (Packed(stacks[f"{name}.weight"], stacks[f"{name}.scales"]) for name in names)
    betas = config.activation_situ_beta, config.activation_situ_linear_beta
    return mxfp4_experts_reference(z, chosen, weights, *packed, beta=betas[0], linear_beta=betas[1])


def expert_stacks(E: int, D: int, H: int) -> dict[str, mx.array]:
    """Random MXFP4 experts, each another, of which outputs are near the size of inputs."""
    stacks = {}
    turn = (mx.arange(E, dtype=mx.uint32) * 0x9E3779B1)[:, None, None]
    for name, rows, columns in (("gate", H, D), ("up", H, D), ("down", D, H)):
        codes = mx.random.randint(0, 256, (rows, columns // 2), mx.uint8).view(mx.uint32)
        stacks[f"{name}_proj.weight"] = codes ^ turn
        stacks[f"{name}_proj.scales"] = mx.full((E, rows, columns // 32), 120, mx.uint8)
    return stacks


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
    qkv, a, g = (_normal(dtype, B, T, n * H * D) for n in (3, 1, 1))
    b, conv = _normal(dtype, B, T, H), _normal(dtype, B, W - 1, 3 * H * D)
    weight = 0.5 * _normal(mx.float32, 3 * H * D, W)
    A_log, dt_bias, norm = (_normal(mx.float32, n) for n in (H, H * D, D))
    state = _normal(mx.float32, B, H, D, D)

    def step(_: mx.array, conv: mx.array, state: mx.array) -> State:
        inputs = qkv, conv, weight, a, A_log, dt_bias, b, g, norm, state
        return kda_decode(*inputs, lower_bound=config.gate_lower_bound, eps=EPS)

    names = ("qkv", "weight", "a", "A_log", "dt_bias", "b", "g", "norm")
    arrays = (qkv, weight, a, A_log, dt_bias, b, g, norm)
    return Case(
        "kda_decode",
        f"kda_decode {B} x {_tokens(T)}",
        ("kda_decode",),
        (a, conv, state),
        step,
        _nbytes(*arrays, a) + 2 * _nbytes(conv, state),
        TOLERANCE[dtype],
        inputs=dict(zip(names, arrays, strict=True)),
    )


def prefill_case(sizes: Sizes, T: int, dtype: mx.Dtype) -> Case:
    """The delta rule over a prompt; the state goes from step to step."""
    H, D = sizes.config.kda_num_heads, sizes.config.kda_head_dim
    q, k = (kernels.l2norm(_normal(mx.float32, 1, T, H, D)) for _ in range(2))
    v = _normal(dtype, 1, T, H, D)
    q, k = ((D**-0.5 * q).astype(dtype), k.astype(dtype))
    log_decay = -5 * mx.random.uniform(shape=(1, T, H, D))
    beta = mx.random.uniform(shape=(1, T, H))
    output, state = mx.zeros((1, T, H, D)), _normal(mx.float32, 1, H, D, D)
    mx.eval(q, k, v, log_decay, beta, output, state)

    def step(_: mx.array, state: mx.array) -> State:
        return kernels.kda(q, k, v, log_decay, beta, state)

    exact = " float32" if dtype == mx.float32 != sizes.dtype else ""
    return Case(
        "kda",
        f"kda {_tokens(T)}{exact}",
        ("kda_prefill_chunks", "kda_prefill_states"),
        (output, state),
        step,
        _nbytes(q, k, v, log_decay, beta, output) + 2 * state.nbytes,
        TOLERANCE[dtype],
        flops=7 * T * H * D * D,
        chain=PREFILL_CHAIN,
        inputs={"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta},
    )


def conv_case(sizes: Sizes, T: int) -> Case:
    """Convolution and norm over a prompt; the convolution's inputs go from step to step."""
    config, dtype = sizes.config, sizes.dtype
    H, D, W = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    qkv = _normal(dtype, 1, T, 3 * H * D)
    weight = 0.5 * _normal(mx.float32, 3 * H * D, W)
    conv, heads = mx.zeros((1, W - 1, 3 * H * D), dtype), mx.zeros((1, T, H, D), dtype)

    def step(q: mx.array, k: mx.array, v: mx.array, conv: mx.array) -> State:
        # The weight depends on the step before, for one small operation.
        return kda_conv(qkv, weight + q[0, 0, 0, 0], conv, H)

    return Case(
        "kda_conv",
        f"kda_conv {_tokens(T)}",
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
    x, gate = _normal(mx.float32, 1, T, H, D), _normal(sizes.dtype, 1, T, H, D)
    weight = _normal(mx.float32, D)

    def step(gate: mx.array) -> State:
        return (kernels.gated_rms_norm(x, gate, weight, EPS),)

    return Case(
        "gated_rms_norm",
        f"gated_rms_norm {_tokens(T)}",
        ("gated_rms_norm",),
        (gate,),
        step,
        _nbytes(x, gate, gate),
        TOLERANCE[sizes.dtype],
        chain=PREFILL_CHAIN,
        inputs={"x": x, "weight": weight},
    )


def mla_cases(sizes: Sizes) -> Iterator[Case]:
    """One token's attention to latents, where there is a kernel for it: on NVIDIA's Hopper."""
    config, dtype = sizes.config, sizes.dtype
    H, rank, shared = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    for T in sizes.contexts:
        q = 0.1 * _normal(dtype, 1, H, 1, config.qk_nope_head_dim + shared)
        blocks = [(_normal(dtype, 1, 1, T, rank), _normal(dtype, 1, 1, T, shared))]
        if not mla_decode_pays(q, blocks, rank):
            return

        def step(q_latent: mx.array, q: mx.array = q, blocks: list = blocks, T: int = T) -> State:
            here = mla_decode_pays(q, blocks, rank)
            return ((mla_decode if here else mla_decode_reference)(q, q_latent, blocks, T),)

        yield Case(
            "mla_decode",
            f"mla_decode {_tokens(T)}",
            ("mla_decode", "mla_merge"),
            (0.1 * _normal(dtype, 1, H, 1, rank),),
            step,
            _nbytes(*blocks[0]),
            TOLERANCE[dtype],
            flops=2 * H * T * (2 * rank + shared),
            chain=PREFILL_CHAIN,
            inputs={"q": q, "latents": blocks[0][0], "keys": blocks[0][1]},
        )


GROUPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "situ": situ_cases,
    "residual": residual_cases,
    "router": router_cases,
    "experts": experts_cases,
    "kda": kda_cases,
    "mla": mla_cases,
}


def _normal(dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _nbytes(*arrays: mx.array) -> int:
    return sum(x.nbytes for x in arrays)


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"
