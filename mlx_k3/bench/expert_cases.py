"""The case of the chosen experts, from packed MXFP4."""

from collections.abc import Iterator, Mapping

import mlx.core as mx

from ..config import K3Config
from ..kernels.experts import Packed, mxfp4_experts_reference
from ..models.bank import ResidentBank
from .case import TOLERANCE, Case, State, nbytes, normal, of_tokens
from .sizes import Sizes


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
    expert_bytes = nbytes(*stacks.values()) // E
    k = min(config.num_experts_per_token, E)
    for N in sizes.expert_tokens:
        chosen = mx.argsort(mx.random.uniform(shape=(N, E)), axis=-1)[:, :k].astype(mx.uint32)
        weights = mx.full((N, k), 1 / k)
        z = normal(sizes.dtype, N, D)

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
            f"experts {of_tokens(N)}",
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
