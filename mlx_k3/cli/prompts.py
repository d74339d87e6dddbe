"""The prompt cache of a command: where it is kept, and which part of the memory it gets."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import nano

if TYPE_CHECKING:
    from ..chat.prompt_cache import PromptCache
    from ..experts.budget import MemoryPlan

KEPT_SHARE = 1 / 16  # of what slots for experts could have, at most, for states of prompts


def open_prompts(folder: Path, model: Any) -> "PromptCache":
    """The cache for a ``model`` that was opened to keep prompts, in memory and on the disk."""
    from ..chat.prompt_cache import open_prompt_cache

    return open_prompt_cache(folder, model, kept_in=prompts_folder(), memory_bytes=model.kept_bytes)


def prompts_folder() -> Path:
    """Where states of prompts are kept from one run to the next."""
    return nano.cache_folder() / "prompts"


def leave_room(plan: "MemoryPlan", memory_bytes: int) -> tuple[int, int]:
    """Memory for the model, and for states of prompts: a few, if experts have enough then.

    ``plan`` is what all of the memory would give the model.
    """
    from ..chat.prompt_cache import wanted_bytes
    from ..experts import machine

    memory_bytes = min(memory_bytes, max(machine.usable_memory_bytes(), plan.minimum_bytes))
    if plan.resident:
        spare = memory_bytes - plan.resident_bytes
    else:
        spare = int((memory_bytes - plan.minimum_bytes) * KEPT_SHARE)
    kept_bytes = min(wanted_bytes(plan), spare)
    if kept_bytes < plan.state_bytes:
        return memory_bytes, 0
    return memory_bytes - kept_bytes, kept_bytes
