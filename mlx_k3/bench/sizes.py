"""Of what the cases are made: K3's sizes, as much of them as a purpose needs."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ..config import K3Config


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
        tokens=(1, 64),
        expert_tokens=(1, 16),
        decode=((1, 1),),
        prompts=(128,),
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
