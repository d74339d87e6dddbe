"""How a command loads a model: the options that all of them share, and what follows from them.

A command declares its options with the types below, makes a :class:`Loading` of them before
anything slow, and works inside ``with open_model(folder, loading)``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import nano
from ..config import K3Config
from ..errors import K3Error
from ..units import format_bytes, parse_bytes, parse_tokens
from .convert import progress_bar
from .prompts import leave_room
from .terminal import note

if TYPE_CHECKING:
    from ..experts.budget import MemoryPlan
    from ..experts.lossy import Levers

_PANEL = "A model larger than memory"

ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        help="A folder that mlx-k3 convert wrote. Without: the very small model that travels "
        "with mlx-k3, to try the program."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="What the process may occupy, as 24GB, or auto for what is free now. Experts that do "
        "not fit are read when they are needed. Default: all of the model if the machine can hold "
        "it, else auto.",
        rich_help_panel=_PANEL,
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        help="Tokens of prompt and answers to plan memory for, as 32k. Default: 4k.",
        rich_help_panel=_PANEL,
    ),
]
KvOption = Annotated[
    int | None,
    typer.Option(
        help="Keep MLA's cache in 8 or 4 bits: longer contexts fit. Lossy: answers change.",
        metavar="BITS",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        help="Which expert makes room for another: lru, the one unused longest, or lfu, the one "
        "used least often. Default: lru.",
        rich_help_panel=_PANEL,
    ),
]
NoPrefetchOption = Annotated[
    bool,
    typer.Option(
        "--no-prefetch",
        help="Read nothing before it is asked for.",
        rich_help_panel=_PANEL,
    ),
]
ActiveExpertsOption = Annotated[
    int | None,
    typer.Option(
        help="Use only the N heaviest experts of a token. Lossy: answers change.",
        metavar="N",
        rich_help_panel=_PANEL,
    ),
]
DropMissedOption = Annotated[
    float | None,
    typer.Option(
        help="Leave out experts that would have to be read, up to this share of a token's weight, "
        "as 0.1. Lossy: answers change.",
        metavar="SHARE",
        rich_help_panel=_PANEL,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Record which experts are used and read, for mlx-k3 trace.", rich_help_panel=_PANEL
    ),
]

ActivationsOption = Annotated[
    str | None,
    typer.Option(
        help="mxfp8 rounds what the experts read to MXFP8, as in K3's training: answers change a "
        "little. Default: nothing is rounded.",
        metavar="mxfp8",
    ),
]
NoVisionOption = Annotated[
    bool,
    typer.Option(
        "--no-vision",
        help="Leave out what sees pictures, and save its memory.",
    ),
]


@dataclass(frozen=True)
class Loading:
    """The options above, checked as far as they can be without a model.

    Raises:
        K3Error: a value makes no sense.
    """

    memory: str | None = None
    context: str | None = None
    policy: str | None = None
    no_prefetch: bool = False
    active_experts: int | None = None
    drop_missed: float | None = None
    trace: Path | None = None
    activations: str | None = None
    kv: int | None = None
    no_vision: bool = False

    def __post_init__(self) -> None:
        from ..experts.policy import POLICIES

        if self.memory not in (None, "auto"):
            parse_bytes(self.memory)
        if self.context is not None:
            parse_tokens(self.context)
        if self.policy is not None and self.policy not in POLICIES:
            raise K3Error(f"--policy {self.policy}: there are {' and '.join(POLICIES)}")
        if self.activations not in (None, "mxfp8"):
            raise K3Error(f"--activations {self.activations}: there is mxfp8")
        if self.kv not in (None, 8, 4):
            raise K3Error(f"--kv {self.kv}: there are 8 and 4")
        self.levers()

    def levers(self) -> "Levers | None":
        """What may be left out; None for nothing."""
        from ..experts.lossy import Levers

        if self.active_experts is None and self.drop_missed is None:
            return None
        if self.drop_missed == 0:
            raise K3Error("--drop-missed 0 drops nothing; give a share, or leave it out")
        return Levers(self.active_experts, self.drop_missed or 0.0)

    def check(self, plan: "MemoryPlan", config: K3Config) -> None:
        """Refuse what could not act on this model.

        Raises:
            K3Error: an option that would change nothing.
        """
        k = config.num_experts_per_token
        if self.active_experts is not None and self.active_experts >= k:
            raise K3Error(
                f"--active-experts {self.active_experts}: a token of this model has {k} experts; "
                "give fewer, or leave it out"
            )
        if self.no_vision and config.vision_config is None:
            raise K3Error("--no-vision: this model reads text only; leave it out")
        given = {
            "--policy": self.policy,
            "--no-prefetch": self.no_prefetch,
            "--active-experts": self.active_experts,
            "--drop-missed": self.drop_missed,
            "--trace": self.trace,
        }
        idle = [option for option, value in given.items() if value not in (None, False)]
        if plan.resident and idle:
            raise K3Error(
                f"{idle[0]} acts on experts that are read on demand, but all of this model fits in "
                f"memory; leave it out, or give --memory below {format_bytes(plan.resident_bytes)}"
            )


@contextmanager
def open_model(
    folder: Path, loading: Loading, *, keeps_prompts: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Load the model in ``folder``; gives it and its tokenizer, and closes it at the end.

    Meanwhile a Mac keeps it in memory. Ended without an error, what was used most is remembered
    and read ahead the next time. If the command ``keeps_prompts``, a part of the memory is left
    for that; :func:`~.prompts.open_prompts` then gives the cache.

    Raises:
        K3Error: the folder cannot be loaded, does not fit, or an option could not act on it.
    """
    from ..experts import machine
    from ..loader import load, plan_load

    config = K3Config.from_file(folder)
    context = {"kv_bits": loading.kv, "vision": not loading.no_vision}
    if loading.context is not None:
        context["context_tokens"] = parse_tokens(loading.context)
    memory_bytes, plan = _plan(folder, loading.memory, context)
    kept_bytes = 0
    if keeps_prompts:
        memory_bytes, kept_bytes = leave_room(plan, memory_bytes)
        plan = plan_load(folder, memory_bytes, **context)
    loading.check(plan, config)
    if sys.stderr.isatty():
        note(_summary(plan))
    with machine.wired(plan.total_bytes + kept_bytes):
        model, tokenizer = load(
            folder,
            memory=memory_bytes,
            trace=loading.trace,
            policy=loading.policy or "lru",
            prefetch=not loading.no_prefetch,
            levers=loading.levers(),
            activations=loading.activations,
            **context,
        )
        if loading.activations is not None:
            note("the experts read their inputs in MXFP8, as in K3's training")
        if loading.kv is not None:
            note(f"the cache of MLA layers is packed in {loading.kv} bits")
        model.kept_bytes = kept_bytes
        if model.offload is None:
            yield model, tokenizer
            return
        try:
            with _warm(folder, config, model.offload, ahead=not loading.no_prefetch):
                yield model, tokenizer
        finally:
            model.offload.close()


def model_folder(given: Path | None) -> Path:
    """The folder a command works on: the bundled model if none is given."""
    if given is not None:
        return given
    note("no MODEL given: this is the bundled nano model, see --help")
    return bundled_model()


def bundled_model() -> Path:
    """The bundled model's folder. The first time, it is converted under a bar."""
    if nano.is_converted():
        return nano.converted()
    note("preparing the bundled model, this once")
    with progress_bar() as advance:
        return nano.converted(advance)


def _plan(
    folder: Path, memory: str | None, context: dict[str, int | None]
) -> tuple[int | None, "MemoryPlan"]:
    """The budget in bytes, and what it gives. Measured once, so that loading sees the same."""
    from ..experts import machine
    from ..experts.budget import parse_memory
    from ..loader import plan_load

    if memory is not None:
        memory_bytes = parse_memory(memory)
        return memory_bytes, plan_load(folder, memory_bytes, **context)
    memory_bytes = machine.usable_memory_bytes()
    plan = plan_load(folder, memory_bytes, **context)
    if not plan.resident:
        memory_bytes = parse_memory("auto")
        plan = plan_load(folder, memory_bytes, **context)
        note(
            f"the whole model needs {format_bytes(plan.resident_bytes)}, more than this machine "
            f"can spare; it runs within {format_bytes(memory_bytes)}, reading experts on demand"
        )
    return memory_bytes, plan


def _summary(plan: "MemoryPlan") -> str:
    """What the plan gives, in a line."""
    if plan.resident:
        return f"all experts in memory, {format_bytes(plan.total_bytes)} in all"
    return (
        f"experts on demand: {plan.slots:,} slots for {plan.experts:,} experts "
        f"({format_bytes(plan.pool_bytes)}, {plan.working_sets:.2g} tokens' worth), "
        f"{format_bytes(plan.total_bytes)} in all"
    )


@contextmanager
def _warm(folder: Path, config: K3Config, offload: Any, *, ahead: bool) -> Iterator[None]:
    """Read ``ahead`` what was used most before; remember it, unless there is an error."""
    from ..experts.heat import Heat, heat_file

    file = heat_file(nano.cache_folder(), folder)
    layers = config.moe_layers
    heat = Heat.load(file, layers, [config.expert_counts[layer] for layer in layers])
    offload.store.heat = heat
    if ahead:
        offload.warm_up()
    yield
    try:
        heat.save(file)
    except OSError as e:
        note(f"{file}: what was used most could not be saved: {e.strerror}")
