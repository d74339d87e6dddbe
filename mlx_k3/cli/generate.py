"""``mlx-k3 generate``: one prompt in, one answer out."""

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import K3Config
from ..errors import K3Error
from . import loading
from .figures import dropped, experts_data, footer
from .pictures import ImageOption, VideoOption, check_pictures
from .terminal import AnswerPrinter, PromptBar, note

if TYPE_CHECKING:
    from ..chat.generation import Chunk, Reply
    from ..experts.offload import Offload


def generate(
    model: loading.ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option(help="What to answer; - reads it from standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 4096,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens of this total probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer at once, without thinking before.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt's text, without the chat format.")
    ] = False,
    ids: Annotated[
        str | None, typer.Option(help="Token ids to continue, 1,2,3; also without tokenizer.")
    ] = None,
    image: ImageOption = None,
    video: VideoOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and what it cost as one JSON object.")
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
    no_vision: loading.NoVisionOption = False,
) -> None:
    """Answer a prompt.

    The answer goes to standard output; the thinking before it is shown dimmed on a terminal and
    left out elsewhere (--json has both).

    Examples:

        mlx-k3 generate --prompt "What is 47 + 85?"

        mlx-k3 generate ~/kimi-k3-mlx --prompt "What is a delta rule?"

        mlx-k3 generate ~/kimi-k3-mlx --image photo.jpg --prompt "What is this?"

        git diff | mlx-k3 generate ~/kimi-k3-mlx --system "Review this patch." --prompt -

        mlx-k3 generate ~/kimi-k3-mlx --raw --prompt "Once upon a time" --temp 0.8 --seed 1

        mlx-k3 generate ~/kimi-k3-mlx --ids 1,2,3 --max-tokens 8 --json

        mlx-k3 generate ~/kimi-k3-mlx --memory 96GB --context 32k --prompt - < report.txt
    """
    given = _read_prompt(prompt, ids, system, no_thinking, raw)
    images, videos = image or [], video or []
    if raw and (images or videos):
        raise K3Error("pictures belong to the chat format; --raw goes without it")
    how = loading.Loading(
        memory,
        context,
        policy,
        no_prefetch,
        active_experts,
        drop_missed,
        trace,
        activations,
        kv,
        no_vision,
    )
    folder = loading.model_folder(model)
    config = K3Config.from_file(folder)
    if isinstance(given, list):
        _check_ids(given, config.vocab_size)
    check_pictures(images, videos, config, no_vision=no_vision)

    from ..chat.generation import IdsOnly, Sampling, stream_generate

    Sampling(max_tokens, temp, top_p)  # Refuses bad values now: loading may take minutes.
    with loading.open_model(folder, how) as (network, tokenizer), PromptBar() as bar:
        chunks = stream_generate(
            network,
            IdsOnly(config.eos_token_ids) if tokenizer is None else tokenizer,
            given,
            system=system,
            max_tokens=max_tokens,
            temp=temp,
            top_p=top_p,
            seed=seed,
            raw=raw,
            thinking=not no_thinking,
            images=images,
            videos=videos,
            prompt_progress_callback=bar.update,
        )
        reply = _show(chunks, quiet=as_json)
        _tell(reply, tokenizer is not None, network.offload, as_json)


def _show(chunks: Iterator["Chunk"], *, quiet: bool) -> "Reply":
    """Print an answer as it comes, unless ``quiet``; returns the whole of it."""
    if quiet:
        # mlx-lm prints a warning for a model that is large for its GPU.
        with redirect_stdout(sys.stderr):
            *_, last = chunks
    else:
        printer = AnswerPrinter()
        try:
            for last in chunks:
                printer.show(last)
        finally:
            printer.end()
    assert last.reply is not None  # the last chunk has it
    return last.reply


def _tell(reply: "Reply", has_text: bool, offload: "Offload | None", as_json: bool) -> None:
    """What there is to say when an answer is over."""
    if as_json:
        data = _report(reply, has_text) | {"experts": experts_data(reply, offload)}
        print(json.dumps(data, ensure_ascii=False))
        return
    if not has_text:
        print(",".join(map(str, reply.ids)))
    elif reply.finish_reason == "length" and not reply.text:
        note(f"still thinking after {len(reply.ids)} tokens; raise --max-tokens")
    if remark := footer(reply, offload) if sys.stderr.isatty() else dropped(reply, offload):
        note(remark)


def _read_prompt(
    prompt: str | None, ids: str | None, system: str | None, no_thinking: bool, raw: bool
) -> str | list[int]:
    """The text or the ids to answer.

    Raises:
        K3Error: none, both, an empty one, or options that could not act on it.
    """
    if (prompt is None) == (ids is None):
        raise K3Error("give one prompt: --prompt TEXT, --prompt - or --ids 1,2,3")
    if raw or ids is not None:
        for option, value in (("--system", system), ("--no-thinking", no_thinking)):
            if value:
                what = "--ids" if prompt is None else "--raw"
                raise K3Error(f"{option} belongs to the chat format; {what} goes without it")
    if ids is not None:
        try:
            return [int(i) for i in ids.split(",")]
        except ValueError:
            raise K3Error(f"--ids {ids!r} are not numbers with commas between, 1,2,3") from None
    text = sys.stdin.read() if prompt == "-" else prompt or ""
    if not (text if raw else text.strip()):
        raise K3Error("the prompt is empty")
    return text


def _check_ids(ids: list[int], vocab_size: int) -> None:
    for i in ids:
        if not 0 <= i < vocab_size:
            raise K3Error(f"--ids: {i} is outside the vocabulary, 0 to {vocab_size - 1}")


def _report(reply: "Reply", has_text: bool) -> dict[str, Any]:
    return {
        "ids": reply.ids,
        "text": reply.text if has_text else None,
        "reasoning": reply.reasoning if has_text else None,
        "tool_calls": reply.message.get("tool_calls", []),
        "finish_reason": reply.finish_reason,
        "prompt_tokens": reply.prompt_tokens,
        "generated_tokens": len(reply.ids),
        "prompt_tps": reply.prompt_tps,
        "decode_tps": reply.generation_tps,
        "peak_memory_bytes": reply.peak_memory_bytes,
    }
