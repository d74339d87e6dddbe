"""``mlx-k3 eval``: how many fresh tasks a model solves, and how well it foretells texts."""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CheckpointError, K3Error
from . import loading
from .terminal import note

if TYPE_CHECKING:
    from ..evaluation.accuracy import Result
    from ..evaluation.perplexity import TextScore
    from ..experts.budget import MemoryPlan

MOST_AT_ONCE = 64  # conversations answered together: from there on a CPU gains little


def evaluate(
    model: loading.ModelArgument = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes the items repeatable. Default: another each time.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this family of tasks; can be repeated.")
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Items of each family.")] = 100,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure the perplexity of this text file; can be repeated. Tasks are then left "
            "out unless --task names some."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="An answer cut at this many tokens counts as wrong.")
    ] = 256,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Have everything answered without thinking.")
    ] = False,
    blind: Annotated[
        bool,
        typer.Option(
            "--blind",
            help="Ask about pictures and show others: how often it is right without seeing.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with some of the failures.")
    ] = False,
    memory: loading.MemoryOption = None,
    context: loading.ContextOption = None,
    policy: loading.PolicyOption = None,
    no_prefetch: loading.NoPrefetchOption = False,
    active_experts: loading.ActiveExpertsOption = None,
    drop_missed: loading.DropMissedOption = None,
    trace: loading.TraceOption = None,
    activations: loading.ActivationsOption = None,
    kv: loading.KvOption = None,
) -> None:
    """Measure a model on tasks with known answers, and on texts.

    Items are made anew from the seed, none of them one that the bundled model was trained on.
    The likeliest answer counts. Tasks about pictures are asked of a model that sees. A text is
    read in windows of --context tokens.

    Examples:

        mlx-k3 eval

        mlx-k3 eval --task addition --task sort --items 500 --seed 1

        mlx-k3 eval ~/kimi-k3-mlx --memory 96GB --max-tokens 4096 --json

        mlx-k3 eval ~/kimi-k3-mlx --text report.txt --context 8k
    """
    from ..evaluation.accuracy import known_families

    how = loading.Loading(
        memory, context, policy, no_prefetch, active_experts, drop_missed, trace, activations, kv
    )
    families = known_families(task or []) if task or not text else []
    texts = {str(path): _read(path) for path in text or []}
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    folder = loading.model_folder(model)
    with loading.open_model(folder, how) as (network, tokenizer), _progress() as begin:
        if tokenizer is None:
            raise CheckpointError(f"{folder} has no tokenizer; there is nothing to ask it in")
        families = _askable(network, families, named=bool(task), blind=blind)
        start = time.perf_counter()
        result = None
        if families:
            result = _ask(
                network,
                tokenizer,
                families,
                begin("tasks", len(families) * items),
                seed=seed,
                items=items,
                max_tokens=max_tokens,
                thinking=not no_thinking,
                blind=blind,
            )
        seconds = time.perf_counter() - start
        scores = {
            file: _foretell(network, tokenizer, file, content, begin)
            for file, content in texts.items()
        }
    if as_json:
        facts = {"model": str(folder), "seed": seed, "items": items, "blind": blind}
        print(json.dumps(facts | _data(result, seconds, scores), ensure_ascii=False))
        return
    if result:
        _print_tasks(result, seed, seconds)
    if scores:
        _print_texts(scores)


def _askable(network: Any, families: list[str], *, named: bool, blind: bool) -> list[str]:
    """The families that make sense: those named, or all that fit the model and the purpose.

    Raises:
        K3Error: ``blind``, and none is about pictures.
    """
    from ..evaluation.accuracy import is_about_pictures, why_without_pictures

    why = why_without_pictures(network)
    if blind:
        families = [family for family in families if is_about_pictures(family)]
        if why or not families:
            raise K3Error(f"--blind acts on tasks about pictures; {why or 'name some of these'}")
    elif why and families and not named:
        note(f"{why}; tasks about pictures are left out")
        families = [family for family in families if not is_about_pictures(family)]
    return families


def _read(path: Path) -> str:
    """The text in ``path``.

    Raises:
        K3Error: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise K3Error(f"--text {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise K3Error(f"--text {path} is not UTF-8 text: byte {e.start} {e.reason}") from None


def _ask(
    network: Any, tokenizer: Any, families: list[str], moved: Callable[[int], None], **how: Any
) -> "Result":
    from ..evaluation.accuracy import measure

    return measure(
        network,
        tokenizer,
        families,
        at_once=lambda tokens: _at_once(network.plan, tokens),
        pass_tokens=network.plan.prompt_tokens,
        progress=lambda: moved(1),
        **how,
    )


def _at_once(plan: "MemoryPlan", tokens: int) -> int:
    """How many conversations of ``tokens`` there is memory for, where one was planned."""
    room_bytes = plan.state_bytes + plan.cache_bytes
    room_bytes += max((plan.budget_bytes or 0) - plan.total_bytes, 0)
    each_bytes = plan.state_bytes + tokens * plan.cache_bytes_per_token
    return min(max(room_bytes // each_bytes, 1), MOST_AT_ONCE)


def _foretell(
    network: Any, tokenizer: Any, file: str, content: str, begin: Callable
) -> "TextScore":
    from ..chat.xtml import encode_text
    from ..evaluation.perplexity import score_text

    ids = encode_text(content, tokenizer)
    if len(ids) < 2:
        raise K3Error(f"--text {file} is too short: the first token has nothing before it")
    return score_text(
        network,
        tokenizer.table,
        ids,
        window_tokens=network.plan.context_tokens,
        progress=begin(file, len(ids) - 1),
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bars on stderr: ``begin(what, steps)`` adds one and gives what moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        # Answers end in bursts.
        speed_estimate_period=300,
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bars:

        def begin(what: str, steps: int) -> Callable[[int], None]:
            bar = bars.add_task(what, total=steps)
            return lambda done: bars.advance(bar, done)

        yield begin


def _data(
    result: "Result | None", seconds: float, scores: dict[str, "TextScore"]
) -> dict[str, Any]:
    data: dict[str, Any] = {"tasks": {}, "failures": [], "tokens_per_second": None}
    if result:
        data["tasks"] = {family: score.share for family, score in result.scores.items()}
        data["failures"] = [asdict(failure) for failure in result.failures]
        data["tokens_per_second"] = result.generated_tokens / seconds
    return data | {
        "perplexity": {file: score.perplexity for file, score in scores.items()},
        "bits_per_byte": {file: score.bits_per_byte for file, score in scores.items()},
    }


def _print_tasks(result: "Result", seed: int, seconds: float) -> None:
    table = _table("task", "items", "right", "95 % interval")
    for family, score in result.scores.items():
        low, high = (f"{100 * bound:.1f}" for bound in score.interval)
        table.add_row(family, f"{score.items:,}", f"{100 * score.share:.1f} %", f"{low} to {high}")
    _show(table)
    print(
        f"Seed {seed}; {result.generated_tokens:,} tokens in {seconds:.0f} s, "
        f"{result.generated_tokens / seconds:.0f} a second"
    )


def _print_texts(scores: dict[str, "TextScore"]) -> None:
    table = _table("text", "tokens", "perplexity", "bits a byte")
    for file, score in scores.items():
        row = f"{score.tokens:,}", f"{score.perplexity:.4g}", f"{score.bits_per_byte:.4g}"
        table.add_row(file, *row)
    _show(table)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(table)
