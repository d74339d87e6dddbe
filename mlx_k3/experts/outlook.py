"""The outlook for a model on machines: what fits into each, and the bounds that follow, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..checkpoint.summary import parameters
from ..config import K3Config
from .budget import MemoryPlan, plan_memory
from .estimate import Speeds, estimate, experts_that_fit, work_per_token
from .machine import Device
from .sizes import KV_BITS, Trunk
from .vision_sizes import StoredVision


@dataclass(frozen=True)
class Memory:
    """A budget, on a machine of ``machine_bytes`` of which a model may take ``usable_bytes``."""

    budget_bytes: int
    machine_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Subject:
    """What is planned for: a model whose trunk may be stored in several ways."""

    name: str
    config: K3Config
    trunks: Mapping[str, Trunk]
    """By what the choice is called; the first is the default."""
    slot_bytes: int
    packed_experts: bool
    device: Device
    vision: StoredVision | None = None

    def plan(
        self,
        trunk: str,
        context_tokens: int,
        memory: Memory | None = None,
        kv_bits: int | None = None,
    ) -> MemoryPlan:
        """The plan with one of the trunks; without a ``memory``, for an unlimited one."""
        return plan_memory(
            self.config,
            self.trunks[trunk],
            slot_bytes=self.slot_bytes,
            packed_experts=self.packed_experts,
            context_tokens=context_tokens,
            budget_bytes=memory and memory.budget_bytes,
            device=self.device,
            kv_bits=kv_bits,
            vision=self.vision,
            machine_bytes=memory and memory.machine_bytes,
            usable_bytes=memory and memory.usable_bytes,
        )


def outlook(
    subject: Subject,
    memories: Sequence[Memory],
    speeds: Speeds,
    context_tokens: int,
    prompt_tokens: int,
) -> dict[str, Any]:
    """Every trunk on every memory, least memory first.

    ``minimum_bytes`` and ``resident_bytes`` at the top are the default trunk's.
    """
    config = subject.config
    context_tokens = min(context_tokens, config.max_position_embeddings)
    unlimited = {name: subject.plan(name, context_tokens) for name in subject.trunks}
    default = next(iter(subject.trunks))
    base = unlimited[default]
    return {
        "model": subject.name,
        "device": subject.device,
        "trunk": default,
        "context_tokens": context_tokens,
        "minimum_bytes": base.minimum_bytes,
        "resident_bytes": base.resident_bytes,
        "expert_bytes": subject.slot_bytes,
        "experts": base.experts,
        "experts_per_token": base.experts_per_token,
        "expert_bytes_per_token": base.experts_per_token * subject.slot_bytes,
        "state_bytes": base.state_bytes,
        "vision_bytes": base.vision_bytes,
        "cache_bytes_per_token": base.cache_bytes_per_token,
        "speeds": asdict(speeds),
        "trunks": {
            name: {
                "trunk_bytes": plan.trunk_bytes,
                "minimum_bytes": plan.minimum_bytes,
                "resident_bytes": plan.resident_bytes,
            }
            for name, plan in unlimited.items()
        },
        "longest_context": _longest(subject),
        "plans": [
            _entry(subject, name, plan.minimum_bytes, memory, speeds, context_tokens, prompt_tokens)
            for memory in memories
            for name, plan in unlimited.items()
        ],
    }


def _longest(subject: Subject) -> dict[str, Any]:
    """What a context of all tokens the model knows takes; ``packed`` by bits, for ``--kv``."""
    tokens = subject.config.max_position_embeddings
    default = next(iter(subject.trunks))
    plans = {name: subject.plan(name, tokens) for name in subject.trunks}
    packed = {bits: subject.plan(default, tokens, kv_bits=bits) for bits in KV_BITS}
    return {
        "tokens": tokens,
        "cache_bytes": plans[default].cache_bytes,
        "minimum_bytes": {name: plan.minimum_bytes for name, plan in plans.items()},
        "packed": {
            str(bits): {"cache_bytes": plan.cache_bytes, "minimum_bytes": plan.minimum_bytes}
            for bits, plan in packed.items()
        },
    }


def _entry(
    subject: Subject,
    trunk: str,
    minimum_bytes: int,
    memory: Memory,
    speeds: Speeds,
    context_tokens: int,
    prompt_tokens: int,
) -> dict[str, Any]:
    head = {"memory_bytes": memory.budget_bytes, "trunk": trunk, "minimum_bytes": minimum_bytes}
    if memory.budget_bytes < minimum_bytes:
        return {**head, "fits": False}
    config, active = subject.config, parameters(subject.config)["active"]
    plan = subject.plan(trunk, context_tokens, memory)
    work = work_per_token(config, subject.trunks[trunk], plan, active)
    bounds = estimate(config, plan, work, speeds, prompt_tokens)
    return {
        **head,
        "fits": True,
        **asdict(plan),
        "pool_bytes": plan.pool_bytes,
        "total_bytes": plan.total_bytes,
        "left_free_bytes": plan.left_free_bytes,
        "working_sets": plan.working_sets if plan.experts else None,
        "beyond_default_limit": plan.total_bytes > memory.usable_bytes,
        "pruned_experts": experts_that_fit(config, plan),
        "work": asdict(work),
        "bounds": {
            **asdict(bounds),
            "token_seconds": bounds.token_seconds,
            "prefill_seconds": bounds.prefill_seconds,
        },
    }
