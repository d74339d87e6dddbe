"""``mlx-k3 chat``: a conversation on the terminal, or line by line from a pipe."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import K3Config
from ..errors import CheckpointError, K3Error
from . import loading
from .conversation import Conversation
from .prompts import open_prompts
from .sessions import named_sessions
from .terminal import note


def chat(
    model: loading.ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop an answer after this many tokens.")] = 4096,
    temp: Annotated[
        float | None,
        typer.Option(help="Temperature. Default: the model's generation_config.json, else 1."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample among the likeliest tokens of this total probability. Default: the "
            "model's generation_config.json, else 1."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer at once, without thinking before.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with a session that /save NAME has saved, and save it after every answer.",
            metavar="NAME",
        ),
    ] = None,
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
    """Talk with a model.

    On a terminal the thinking is shown dimmed, and /help lists what can be typed. From a pipe
    each line is a message, and only the answers are printed.

    Examples:

        mlx-k3 chat

        mlx-k3 chat ~/kimi-k3-mlx

        mlx-k3 chat ~/kimi-k3-mlx --system "Answer in one sentence." --no-thinking

        mlx-k3 chat ~/kimi-k3-mlx --memory 96GB --context 32k

        mlx-k3 chat ~/kimi-k3-mlx --resume holiday

        echo "What is a delta rule?" | mlx-k3 chat ~/kimi-k3-mlx
    """
    if resume is not None:
        named_sessions().existing(resume)
        if system is not None or no_thinking:
            option = "--no-thinking" if no_thinking else "--system"
            raise K3Error(f"{option}: the session {resume!r} has its own; leave it out")
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
    K3Config.from_file(folder)
    recommended = recommended_sampling(folder)
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temp": recommended["temperature"] if temp is None else temp,
        "top_p": recommended["top_p"] if top_p is None else top_p,
    }

    import mlx.core as mx

    from ..chat.session import Sampling, Session

    Sampling(**sampling)  # Refuses bad values now: loading may take minutes.
    with loading.open_model(folder, how, keeps_prompts=True) as (network, tokenizer):
        if tokenizer is None:
            raise CheckpointError(
                f"{folder} has no tokenizer; mlx-k3 generate --ids continues token ids"
            )
        if seed is not None:
            mx.random.seed(seed)
        session = Session(
            network,
            tokenizer,
            system=system,
            thinking=not no_thinking,
            prompts=open_prompts(folder, network),
        )
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if interactive:
            # One Ctrl-C too many, after an answer has stopped, must not end the conversation.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if model is None:
            note(_introduction())
        named, offload = named_sessions(), network.offload
        conversation = Conversation(session, sampling, interactive, named, offload)
        if resume is not None:
            conversation.resume(resume)
        conversation.run(_typed() if interactive else _piped())


def _introduction() -> str:
    """Who the bundled model is and what it can do, in its own words."""
    from ..tasks.talk import ABILITIES, IDENTITY

    return f"{IDENTITY} {ABILITIES}"


def recommended_sampling(model: Path) -> dict[str, float]:
    """Temperature and top_p that the model's makers recommend."""
    values = {"temperature": 1.0, "top_p": 1.0}
    path = model / "generation_config.json"
    if path.exists():
        try:
            given = json.loads(path.read_bytes())
            values |= {key: float(given[key]) for key in values if given.get(key) is not None}
        except (ValueError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is not valid; delete it or convert again") from None
    return values


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _typed() -> Iterator[str]:
    """Messages as they are typed: several lines, with a history across conversations."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    folder = Path(typer.get_app_dir("mlx-k3"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    prompt: PromptSession[str] = PromptSession(
        "> ",
        history=FileHistory(str(folder / "chat-history")),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
    )
    note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            yield prompt.prompt()
        except KeyboardInterrupt:
            note("Ctrl-D or /exit leaves")
        except EOFError:
            return
