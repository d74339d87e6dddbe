"""``mlx-k3 plan``: what fits into a memory, and the bounds on speed that follow."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import K3Config
from ..errors import K3Error
from ..units import parse_bytes, parse_tokens
from .plan_table import print_plan

if TYPE_CHECKING:
    from ..checkpoint.names import ExpertForm
    from ..experts.machine import Device
    from ..experts.outlook import Memory, Subject
    from ..experts.sizes import Trunk

KIMI_K3 = "kimi-k3"
MACS = "64GB,96GB,128GB,192GB,256GB,512GB"
SSD = "13GB/s"
CONTEXT = 32 * 1024
TRUNKS = ("q8", "mxfp8", "q6", "q4", "bf16")


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A model folder, or kimi-k3 for the real one, unseen.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory to plan for, or several: 64GB,128GB. auto measures this machine. "
            f"By default auto, and for kimi-k3 {MACS}.",
        ),
    ] = None,
    ssd: Annotated[
        str | None,
        typer.Option(
            help=f"What the SSD reads a second; by default {SSD}, or as measured.",
        ),
    ] = None,
    bandwidth: Annotated[str, typer.Option(help="What the memory reads a second.")] = "546GB/s",
    tflops: Annotated[
        float, typer.Option(min=0.001, help="10^12 floating-point operations a second.")
    ] = 18.0,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of prompt and answers together: 4096, 32k, 1M. By default 32k for "
            "kimi-k3, and for a folder what loading it plans for."
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Tokens of the prompt whose time is shown.")] = "512",
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure how fast experts are read from this folder or file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what fits into a memory, and how fast it can be at best.

    kimi-k3 is planned for Macs, from the release's configuration: no weights are needed. A folder
    is planned for this machine, as loading it with the same --memory does; memory this machine
    does not have is taken as that of a machine of that size.

    Times are bounds, not promises: bytes over rates, with the rates you give.

    Examples:

        mlx-k3 plan kimi-k3

        mlx-k3 plan kimi-k3 --memory 128GB,512GB --context 128k --ssd 6GB/s

        mlx-k3 plan ~/kimi-k3-mlx --memory 24GB --measure ~/kimi-k3-mlx

        mlx-k3 plan --measure /Volumes/fast/large.file
    """
    if model is None and measure is None:
        raise K3Error("name a model folder, kimi-k3, or --measure PATH")
    context_tokens = None if context is None else parse_tokens(context)
    prompt_tokens = parse_tokens(prompt)
    rates = [parse_bytes(text) for text in (ssd or SSD, bandwidth)]
    if not all(rates):
        raise K3Error("--ssd and --bandwidth must be above 0")
    facts: dict[str, Any] = {}
    if measure is not None:
        facts["measured"] = _measure(measure)
        if ssd is None:
            rates[0] = facts["measured"]["bytes_per_second"]
    if model is not None:
        from ..experts.budget import DEFAULT_CONTEXT
        from ..experts.estimate import Speeds
        from ..experts.outlook import outlook

        if context_tokens is None:
            context_tokens = CONTEXT if model == KIMI_K3 else DEFAULT_CONTEXT
        subject = _real_model() if model == KIMI_K3 else _folder(Path(model))
        memories = _memories(memory, subject.device, of_macs=model == KIMI_K3)
        speeds = Speeds(*rates, tflops * 1e12)
        facts |= outlook(subject, memories, speeds, context_tokens, prompt_tokens)
    if as_json:
        print(json.dumps(facts))
    else:
        print_plan(facts)


def _measure(path: Path) -> dict[str, Any]:
    from ..experts.measure import measure_disk

    speed = measure_disk(path)
    return {
        "path": speed.path,
        "mode": speed.mode,
        "read_bytes": speed.read_bytes,
        "seconds": speed.seconds,
        "bytes_per_second": speed.bytes_per_second,
    }


def _real_model() -> "Subject":
    """Kimi K3 on a Mac."""
    config = K3Config.from_file(Path(__file__).parent.parent / "experts" / "kimi-k3-config.json")
    return _unconverted(KIMI_K3, config, "mxfp4", "metal")


def _folder(folder: Path) -> "Subject":
    """A converted folder as it is, or a release with every choice of its conversion."""
    from mlx_k3.convert.plan import expert_form

    from ..checkpoint.index import LocalFolder, open_checkpoint
    from ..checkpoint.names import is_mlx_name
    from ..experts.budget import stored_model
    from ..experts.machine import device
    from ..experts.outlook import Subject

    checkpoint = open_checkpoint(LocalFolder(folder))
    if not any(is_mlx_name(name) for name in checkpoint.files):
        config = K3Config.from_file(folder)
        return _unconverted(str(folder), config, expert_form(config, checkpoint), device())
    model = stored_model(folder)
    return Subject(
        name=str(folder),
        config=model.config,
        trunks={"stored": model.trunk},
        slot_bytes=model.slot_bytes,
        packed_experts=model.packed_experts,
        device=device(),
        vision=model.vision,
    )


def _unconverted(name: str, config: K3Config, experts: "ExpertForm", device: "Device") -> "Subject":
    from ..checkpoint.names import expert_tensors
    from ..checkpoint.writer import tensor_bytes
    from ..experts.outlook import Subject
    from ..experts.vision_sizes import stored_vision
    from ..media.processor import Processor

    sizes = [
        sum(
            tensor_bytes(t.dtype or t.sources[0].dtypes[0], t.shape[1:])
            for t in expert_tensors(config, layer, experts)
        )
        for layer in config.moe_layers
    ]
    return Subject(
        name=name,
        config=config,
        trunks={choice: trunk_as(config, choice) for choice in TRUNKS},
        slot_bytes=max(sizes, default=0),
        packed_experts=experts == "mxfp4",
        device=device,
        vision=stored_vision(config, Processor()),
    )


def trunk_as(config: K3Config, choice: str) -> "Trunk":
    """The trunk as ``convert --trunk CHOICE`` stores it."""
    from mlx_k3.convert.profiles import profile

    from ..checkpoint.names import layer_tensors, stem_tensors

    how, trunk = profile(choice), {}
    layers = [t for i in range(config.num_hidden_layers) for t in layer_tensors(config, i)]
    for tensor in (*layers, *stem_tensors(config)):
        dtype = tensor.dtype or tensor.sources[0].dtypes[0]
        if how.applies(tensor):
            trunk |= dict(how.stored(tensor, dtype))
        else:
            trunk[tensor.name] = (dtype, tensor.shape)
    return trunk


def _memories(text: str | None, device: "Device", *, of_macs: bool) -> list["Memory"]:
    """Budgets and the machines they are on: this one, or one of the size that is named."""
    from ..experts import machine
    from ..experts.budget import parse_memory
    from ..experts.outlook import Memory

    share = machine.GPU_SHARE if device == "metal" else 1 - machine.SYSTEM_SHARE
    memories = []
    for part in (text or (MACS if of_macs else "auto")).split(","):
        auto = part.strip() == "auto"
        budget_bytes = parse_memory(part.strip())
        here = auto or (not of_macs and budget_bytes <= machine.total_memory_bytes())
        if here:
            total_bytes, usable_bytes = machine.total_memory_bytes(), machine.usable_memory_bytes()
        else:
            total_bytes, usable_bytes = budget_bytes, int(budget_bytes * share)
        memories.append(Memory(budget_bytes, total_bytes, usable_bytes))
    return memories
