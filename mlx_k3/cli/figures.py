"""What an answer cost, in words for people and as data for scripts.

Knows a reply and its usage by their fields; imports no mlx.
"""

from typing import TYPE_CHECKING, Any

from ..units import format_bytes

if TYPE_CHECKING:
    from ..chat.generation import Reply
    from ..experts.offload import Offload
    from ..experts.usage import Usage


def footer(reply: "Reply", offload: "Offload | None") -> str:
    """One line: speed, and with experts on demand what reading them took.

    Of the answer without its prompt, whose experts are read once, whatever the pool.
    """
    parts = [f"{reply.generation_tps:.3g} tokens/s"] if reply.generation_tps else []
    if offload is not None:
        # An answer of one token is all prompt.
        usage = reply.decode_usage if len(reply.ids) > 1 else reply.usage
        parts += [*_reads(usage), _pool(offload)]
        parts += _dropped(reply, offload)
    return ", ".join(parts)


def dropped(reply: "Reply", offload: "Offload | None") -> str | None:
    """What levers left out of this answer; None if no lever is on."""
    return next(iter(_dropped(reply, offload)), None)


def experts_data(reply: "Reply", offload: "Offload | None") -> dict[str, Any] | None:
    """The ``experts`` of ``--json``: all of the answer, and ``decode``, it without its prompt."""
    if offload is None:
        return None
    return {
        "slots": offload.slots,
        "working_sets": offload.working_sets,
        **reply.usage.as_dict(),
        "decode": reply.decode_usage.as_dict(),
    }


def since_loading(offload: "Offload", usage: "Usage") -> list[str]:
    """Lines for /stats; ``usage`` is all that happened since the model was loaded."""
    ahead = f"{format_bytes(usage.prefetch_bytes)} of it ahead of time"
    lines = [
        f"experts: {format_bytes(usage.read_bytes)} read, {ahead} "
        f"({format_bytes(usage.used_prefetch_bytes)} of that needed)",
        ", ".join([*_reads(usage)[:2], f"waited {usage.stall_seconds:.1f} s", _pool(offload)]),
    ]
    if offload.levers.on:
        lines.append(f"dropped {_percent(usage.dropped_share)} of the experts' weight")
    return lines


def _reads(usage: "Usage") -> list[str]:
    return [
        f"hit rate {_percent(usage.hit_rate)}",
        f"read {format_bytes(usage.read_bytes_per_second)}/s",
        f"waiting {_percent(usage.stall_share)}",
    ]


def _pool(offload: "Offload") -> str:
    return f"{offload.slots:,} slots ({offload.working_sets:.2g} tokens' worth)"


def _dropped(reply: "Reply", offload: "Offload | None") -> list[str]:
    if offload is None or not offload.levers.on:
        return []
    return [f"dropped {_percent(reply.usage.dropped_share)} of the experts' weight"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
