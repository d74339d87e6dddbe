"""How memory is spent: one formula, for the plan that is shown and for the model that is loaded.

The order of spending is the trunk (never paged), state, cache, a prompt's residual stream, scratch,
and slots for experts with what is left. Knows sizes only; nothing here allocates or measures.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.extents import open_experts
from ..checkpoint.index import LocalFolder, open_checkpoint
from ..config import K3Config
from ..errors import BudgetError, K3Error
from ..media.processor import Processor
from ..units import format_bytes, parse_bytes
from . import machine
from .machine import Device
from .sizes import Sizes, Trunk, stored_trunk
from .vision_sizes import StoredVision, stored_vision

DEFAULT_CONTEXT = 4096
PROMPT_SHARE = 1 / 8  # of what slots could have, at most, for a longer prompt in one pass
RESIDENT_PROMPT = 2048  # tokens in one pass where all experts are in memory, if there is room
EXPANDED_SHARE = 1 / 8  # of the machine's memory, at most, for expanded experts on a CPU


@dataclass(frozen=True)
class MemoryPlan:
    """What goes where. All sizes in bytes; ``budget_bytes`` None means without limit."""

    device: Device
    context_tokens: int
    kv_bits: int | None
    """Of a number in MLA's cache where that is packed."""
    prompt_tokens: int
    """Of a prompt that go through the layers together: each expert is read once for them."""
    block_tokens: int
    """Of those, how many a layer takes at once."""
    budget_bytes: int | None
    machine_bytes: int | None

    process_bytes: int
    trunk_bytes: int
    state_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    prompt_bytes: int
    scratch_bytes: int
    vision_bytes: int
    """The vision tower, and what its largest picture takes beside the scratch."""
    expanded_bytes: int
    """Float copies of packed experts, on a CPU, where all experts are in memory; else 0."""

    resident: bool
    """Whether all experts are loaded as part of the model; else they are read on demand."""
    slot_bytes: int
    slots: int
    experts: int
    """Of all layers together."""
    experts_per_token: int
    """Of all layers together: one working set."""
    minimum_bytes: int
    """The least budget that works."""
    resident_bytes: int
    """The least budget that keeps all experts in memory."""

    @property
    def pool_bytes(self) -> int:
        """Memory of all slots."""
        return self.slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """What the process will occupy at its peak."""
        return (
            self.process_bytes
            + self.trunk_bytes
            + self.state_bytes
            + self.cache_bytes
            + self.prompt_bytes
            + self.scratch_bytes
            + self.vision_bytes
            + self.expanded_bytes
            + self.pool_bytes
        )

    @property
    def left_free_bytes(self) -> int | None:
        """What other programs keep; None if the machine is not known."""
        return None if self.machine_bytes is None else self.machine_bytes - self.total_bytes

    @property
    def working_sets(self) -> float:
        """Slots over the experts of one token. Below 1 a pool hits next to nothing."""
        return self.slots / self.experts_per_token if self.experts_per_token else math.inf


class StoredModel(NamedTuple):
    """What a plan has to know of a model."""

    config: K3Config
    trunk: Trunk
    slot_bytes: int
    packed_experts: bool
    vision: StoredVision | None = None


def format_at_least(nbytes: int) -> str:
    """A size to type that is no less than ``nbytes``: 1234567890 -> ``1.24GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= size:
            # A hundredth more, not rounded up: reading it back may lose a byte.
            whole, hundredths = divmod(nbytes * 100 // size + 1, 100)
            return f"{whole}.{hundredths:02}{unit}"
    return str(nbytes)


def parse_memory(memory: str | int | None) -> int | None:
    """``"24GB"``, a number of bytes, ``"auto"`` (measured now) or None (unlimited) as bytes.

    Raises:
        K3Error: it is none of these.
    """
    if memory == "auto":
        return machine.auto_budget_bytes()
    if isinstance(memory, str):
        return parse_bytes(memory)
    if memory is not None and memory < 0:
        raise K3Error(f"a memory budget of {memory} bytes; write for example 24GB")
    return memory


def plan_folder(
    folder: str | Path,
    memory: str | int | None,
    *,
    context_tokens: int = DEFAULT_CONTEXT,
    dtype: str | None = None,
    kv_bits: int | None = None,
    vision: bool = True,
) -> MemoryPlan:
    """The plan for loading the converted ``folder`` on this machine.

    Args:
        folder: the model.
        memory: see :func:`parse_memory`. The pool takes no more than this machine can spare.
        context_tokens: prompt and answers together.
        dtype: floats are recast to it, as :func:`mlx_k3.load` does.
        kv_bits: MLA's cache is packed in so many bits.
        vision: there will be pictures, if the model sees any.

    Raises:
        BudgetError: it cannot work; the message holds the arithmetic.
        CheckpointError: the folder is incomplete or damaged.
    """
    budget_bytes = parse_memory(memory)
    model = stored_model(folder)
    return plan_memory(
        model.config,
        model.trunk,
        slot_bytes=model.slot_bytes,
        packed_experts=model.packed_experts,
        context_tokens=context_tokens,
        budget_bytes=budget_bytes,
        device=machine.device(),
        dtype=dtype,
        kv_bits=kv_bits,
        vision=model.vision if vision else None,
        machine_bytes=machine.total_memory_bytes(),
        usable_bytes=machine.usable_memory_bytes(),
    )


def stored_model(folder: str | Path) -> StoredModel:
    """What a converted folder holds, from its headers.

    Raises:
        CheckpointError: it is incomplete or damaged.
    """
    experts, config = open_experts(folder), K3Config.from_file(folder)
    checkpoint = open_checkpoint(LocalFolder(Path(folder)))
    return StoredModel(
        config=config,
        trunk=stored_trunk(checkpoint),
        slot_bytes=max(map(experts.expert_bytes, experts.layers), default=0),
        packed_experts=any(len(experts.pieces(layer)) > 3 for layer in experts.layers),
        vision=stored_vision(config, Processor.from_folder(folder), checkpoint),
    )


def plan_memory(
    config: K3Config,
    trunk: Trunk,
    *,
    slot_bytes: int,
    context_tokens: int,
    budget_bytes: int | None,
    device: Device,
    packed_experts: bool = True,
    dtype: str | None = None,
    kv_bits: int | None = None,
    vision: StoredVision | None = None,
    machine_bytes: int | None = None,
    usable_bytes: int | None = None,
) -> MemoryPlan:
    """Divide ``budget_bytes``.

    Args:
        config: the model.
        trunk: its tensors, without experts and vision.
        slot_bytes: size of the largest expert.
        context_tokens: prompt and answers together.
        budget_bytes: None is unlimited, 0 is nothing.
        device: where it runs; a CPU computes in float32.
        packed_experts: whether they are quantized.
        dtype: floats are recast to it.
        kv_bits: MLA's cache is packed in so many bits.
        vision: the tower, if there will be pictures.
        machine_bytes, usable_bytes: what the machine has, and what the model may have of it at
            most. A budget beyond that is cut to it; experts that all fit are kept regardless.

    Raises:
        BudgetError: the budget is below the plan's minimum.
    """
    sizes = Sizes(config, trunk, context_tokens, device, dtype, kv_bits, vision)
    experts, k = sum(config.expert_counts), config.num_experts_per_token
    layer_slots = min(k, experts)
    resident_slot_bytes = slot_bytes if packed_experts else sizes.resident_expert_bytes(slot_bytes)
    resident_bytes = sizes.least_bytes(experts * resident_slot_bytes)
    minimum_bytes = min(sizes.least_bytes(layer_slots * slot_bytes), resident_bytes)
    if budget_bytes is not None and budget_bytes < minimum_bytes:
        raise BudgetError(_refusal(sizes, layer_slots * slot_bytes, minimum_bytes, budget_bytes))

    spend_bytes = budget_bytes
    if budget_bytes is not None and usable_bytes is not None:
        spend_bytes = min(budget_bytes, max(usable_bytes, minimum_bytes))
    prompt_tokens, slots, expanded_bytes = sizes.block_tokens, experts, 0
    resident = spend_bytes is None or spend_bytes >= resident_bytes
    if not resident:
        extra_bytes = int((spend_bytes - minimum_bytes) * PROMPT_SHARE)
        prompt_tokens += sizes.more_tokens(extra_bytes)
        slots = (spend_bytes - sizes.fixed_bytes(prompt_tokens)) // slot_bytes
        # Where float experts are wider in memory than in slots, slots for all may fit earlier.
        slots = min(slots, experts)
    else:
        room_bytes = math.inf if spend_bytes is None else spend_bytes - resident_bytes
        if device == "cpu" and packed_experts and machine_bytes is not None:
            wanted = experts * 3 * config.expert_dim * config.moe_intermediate_size * 4
            limit = min(int(machine_bytes * EXPANDED_SHARE), room_bytes)
            expanded_bytes = wanted if wanted <= limit else 0
        room_bytes = min(room_bytes - expanded_bytes, sizes.prompt_bytes(RESIDENT_PROMPT))
        prompt_tokens = min(prompt_tokens + sizes.more_tokens(room_bytes), RESIDENT_PROMPT)
    return MemoryPlan(
        device=device,
        context_tokens=sizes.context_tokens,
        kv_bits=kv_bits,
        prompt_tokens=prompt_tokens,
        block_tokens=sizes.block_tokens,
        budget_bytes=budget_bytes,
        machine_bytes=machine_bytes,
        process_bytes=sizes.process_bytes,
        trunk_bytes=sizes.trunk_bytes,
        state_bytes=sizes.state_bytes,
        cache_bytes=sizes.cache_bytes,
        cache_bytes_per_token=sizes.cache_bytes_per_token,
        prompt_bytes=sizes.prompt_bytes(prompt_tokens),
        scratch_bytes=sizes.scratch_bytes,
        vision_bytes=sizes.vision_bytes,
        expanded_bytes=expanded_bytes,
        slot_bytes=resident_slot_bytes if resident else slot_bytes,
        slots=slots,
        resident=resident,
        experts=experts,
        experts_per_token=k * len(config.moe_layers),
        minimum_bytes=minimum_bytes,
        resident_bytes=resident_bytes,
    )


def _refusal(sizes: Sizes, pool_bytes: int, minimum_bytes: int, budget_bytes: int) -> str:
    parts = {
        "trunk": sizes.trunk_bytes,
        "state and cache": sizes.state_bytes + sizes.cache_bytes,
        "vision tower and a picture": sizes.vision_bytes,
        "prompt and scratch": sizes.prompt_bytes(sizes.block_tokens) + sizes.scratch_bytes,
        "one layer's active experts": pool_bytes,
        "process": sizes.process_bytes,
    }
    sum_of = " + ".join(f"{what} {format_bytes(n)}" for what, n in parts.items() if n)
    return (
        f"a memory budget of {format_bytes(budget_bytes)} is too little for a context of "
        f"{sizes.context_tokens:,} tokens: {sum_of} = {minimum_bytes:,} bytes; give at least "
        f"{format_at_least(minimum_bytes)}, shorten the context, or convert with a smaller --trunk"
    )
