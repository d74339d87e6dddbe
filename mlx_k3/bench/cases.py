"""The list of what is tried and timed: every operation that has a kernel.

A step goes through the public operation. Which path that takes is up to
:func:`mlx_k3.kernels.using`, so a kernel and its reference run the very same lines. Owns inputs;
knows nothing of clocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from .. import kernels
from .attention_cases import kda_cases, mla_cases
from .case import EPS, TOLERANCE, Case, State, nbytes, normal, of_tokens
from .expert_cases import experts_cases
from .sizes import Sizes

BLOCKS = 8  # of Attention Residuals, in K3's last layers


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
        gate, up = normal(dtype, rows, width), normal(dtype, rows, width)

        def step(gate: mx.array, up: mx.array = up) -> State:
            betas = config.activation_situ_beta, config.activation_situ_linear_beta
            return (kernels.situ(gate, up, *betas),)

        yield Case(
            "situ",
            f"situ {rows} x {width}",
            ("situ",),
            (gate,),
            step,
            nbytes(gate, up, gate),
            TOLERANCE[dtype],
            inputs={"up": up},
        )


def residual_cases(sizes: Sizes) -> Iterator[Case]:
    """The mix of 8 blocks and the running sum: alone, and with the addition and norm around it."""
    D, dtype = sizes.config.hidden_size, sizes.dtype
    weight, norm = normal(mx.float32, D), normal(dtype, D)
    for N in sizes.tokens:
        blocks, update = normal(dtype, N, BLOCKS, D), normal(dtype, N, D)
        candidates = normal(dtype, N, BLOCKS + 1, D)

        def mix(last: mx.array, candidates: mx.array = candidates) -> State:
            # The weight depends on the step before; it costs every path the same two operations.
            near = weight + last[0].astype(mx.float32)
            return (kernels.attention_residual(candidates, near, EPS),)

        def step(last: mx.array, blocks: mx.array = blocks, update: mx.array = update) -> State:
            return (kernels.residual_step(blocks, last, update, weight, norm, EPS)[0],)

        one = Case(
            "attention_residual",
            f"attention_residual {of_tokens(N)}",
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
            name=f"residual_step {of_tokens(N)}",
            step=step,
            least_bytes=(BLOCKS + 4) * update.nbytes,
            inputs={"blocks": blocks, "update": update, "weight": weight, "norm": norm},
        )


def router_cases(sizes: Sizes) -> Iterator[Case]:
    """The chosen experts and their weights, which two operations more add to the next logits."""
    E, top_k = sizes.config.expert_counts[-1], sizes.config.num_experts_per_token
    bias = normal(mx.float32, E)
    for N in (sizes.tokens[0], sizes.tokens[-1]):
        logits = normal(mx.float32, N, E)

        def step(logits: mx.array) -> State:
            chosen, weights = kernels.route(logits, bias, top_k)
            return (logits + mx.put_along_axis(mx.zeros_like(logits), chosen, weights, -1),)

        yield Case(
            "router",
            f"router {of_tokens(N)}",
            ("router",),
            (logits,),
            step,
            nbytes(logits, bias) + N * top_k * 8,
            TOLERANCE[mx.float32],
            inputs={"bias": bias, "top_k": mx.array(top_k)},
        )


GROUPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "situ": situ_cases,
    "residual": residual_cases,
    "router": router_cases,
    "experts": experts_cases,
    "kda": kda_cases,
    "mla": mla_cases,
}
