"""Bounds from arithmetic: how long a token and a prompt must take, given a machine's speeds.

Bytes and products over rates, nothing measured and nothing modelled but one thing: where experts
that are in memory matter, every expert counts as equally likely. Real routing prefers some.
"""

from dataclasses import dataclass

from ..config import K3Config
from .budget import MemoryPlan
from .sizes import Trunk, loaded_bytes


@dataclass(frozen=True)
class Speeds:
    """What a machine does a second."""

    ssd_bytes: float
    memory_bytes: float
    flops: float


@dataclass(frozen=True)
class Work:
    """What one token asks for: bytes that are read from memory, and multiply-adds times two."""

    trunk_bytes: int
    """The trunk, less the rows of the embedding that are not looked up."""
    expert_bytes: int
    """The working set: the active experts of all layers."""
    state_bytes: int
    """KDA state, read and written, and the whole context's cache."""
    flops: int


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on time, each as if the others took none."""

    hit_share: float
    """Of the experts, if all were equally likely."""
    read_bytes: float
    """From the SSD, a token."""
    ssd_seconds: float
    memory_seconds: float
    compute_seconds: float
    prefill_tokens: int
    prefill_read_bytes: float
    prefill_ssd_seconds: float
    prefill_compute_seconds: float

    @property
    def token_seconds(self) -> float:
        """A decoded token takes at least this."""
        return max(self.ssd_seconds, self.memory_seconds, self.compute_seconds)

    @property
    def prefill_seconds(self) -> float:
        """The prompt takes at least this."""
        return max(self.prefill_ssd_seconds, self.prefill_compute_seconds)


def work_per_token(config: K3Config, trunk: Trunk, plan: MemoryPlan, active: int) -> Work:
    """What decoding one token at the end of the plan's context costs; ``active`` parameters."""
    embedding = 0
    if not config.tie_word_embeddings:
        recast = "float32" if plan.device == "cpu" else None
        embedding = sum(
            loaded_bytes(config, name, *stored, recast)
            for name, stored in trunk.items()
            if "model.embed_tokens." in name
        )
    return Work(
        trunk_bytes=plan.trunk_bytes - embedding,
        expert_bytes=plan.experts_per_token * plan.slot_bytes,
        state_bytes=2 * plan.state_bytes + plan.cache_bytes,
        flops=2 * active,
    )


def estimate(
    config: K3Config, plan: MemoryPlan, work: Work, speeds: Speeds, prompt_tokens: int
) -> Bounds:
    """The bounds for a token, and for a prompt of ``prompt_tokens``."""
    hits = 1.0 if plan.resident else plan.slots / plan.experts
    if plan.working_sets < 1:
        hits = 0.0  # by the time a layer comes round again its experts have left
    read_bytes = work.expert_bytes * (1 - hits)
    memory_bytes = work.trunk_bytes + work.expert_bytes + work.state_bytes
    prefill_read_bytes = 0.0
    if not plan.resident:
        whole, rest = divmod(prompt_tokens, plan.prompt_tokens)
        touched = whole * touched_experts(config, plan.prompt_tokens)
        touched += touched_experts(config, rest)
        prefill_read_bytes = touched * plan.slot_bytes
    return Bounds(
        hit_share=hits,
        read_bytes=read_bytes,
        ssd_seconds=read_bytes / speeds.ssd_bytes,
        memory_seconds=memory_bytes / speeds.memory_bytes,
        compute_seconds=work.flops / speeds.flops,
        prefill_tokens=prompt_tokens,
        prefill_read_bytes=prefill_read_bytes,
        prefill_ssd_seconds=prefill_read_bytes / speeds.ssd_bytes,
        prefill_compute_seconds=prompt_tokens * work.flops / speeds.flops,
    )


def touched_experts(config: K3Config, tokens: int) -> float:
    """How many experts of all layers ``tokens`` touch together, if all are equally likely."""
    k = config.num_experts_per_token
    counts = (config.expert_counts[layer] for layer in config.moe_layers)
    return sum(count * (1 - (1 - k / count) ** tokens) for count in counts)


def experts_that_fit(config: K3Config, plan: MemoryPlan) -> int:
    """To how many experts a layer the model would have to be pruned to stay in the pool."""
    layers = len(config.moe_layers)
    return min(plan.slots // layers, max(config.expert_counts)) if layers else 0
