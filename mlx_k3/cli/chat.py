"""``mlx-k3 chat``: a conversation on the terminal, or line by line from a pipe."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import K3Config
from ..errors import CheckpointError, K3Error
from ..units import format_bytes
from . import loading
from .figures import dropped, footer, since_loading
from .terminal import AnswerPrinter, PromptBar, note

if TYPE_CHECKING:
    from ..chat.session import Reply, Session
    from ..experts.offload import Offload

HELP = """\
/help           this list
/reset          forget the conversation
/save FILE      write the conversation
/load FILE      take up a written conversation
/system [TEXT]  show or set the system message
/stats          tokens and speed so far
/exit           leave (also Ctrl-D)
Enter sends, Alt-Enter (or Esc, Enter) begins a new line, Ctrl-C stops an answer."""


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
    memory: loading.MemoryOption = None,
    context: loading.ContextOption = None,
    policy: loading.PolicyOption = None,
    no_prefetch: loading.NoPrefetchOption = False,
    active_experts: loading.ActiveExpertsOption = None,
    drop_missed: loading.DropMissedOption = None,
    trace: loading.TraceOption = None,
) -> None:
    """Talk with a model.

    On a terminal the thinking is shown dimmed, and /help lists what can be typed. From a pipe
    each line is a message, and only the answers are printed.

    Examples:

        mlx-k3 chat

        mlx-k3 chat ~/kimi-k3-mlx

        mlx-k3 chat ~/kimi-k3-mlx --system "Answer in one sentence." --no-thinking

        mlx-k3 chat ~/kimi-k3-mlx --memory 96GB --context 32k

        echo "What is a delta rule?" | mlx-k3 chat ~/kimi-k3-mlx
    """
    how = loading.Loading(memory, context, policy, no_prefetch, active_experts, drop_missed, trace)
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
    with loading.open_model(folder, how) as (network, tokenizer):
        if tokenizer is None:
            raise CheckpointError(
                f"{folder} has no tokenizer; mlx-k3 generate --ids continues token ids"
            )
        if seed is not None:
            mx.random.seed(seed)
        session = Session(network, tokenizer, system=system, thinking=not no_thinking)
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if interactive:
            # One Ctrl-C too many, after an answer has stopped, must not end the conversation.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if model is None:
            note(_introduction())
        conversation = Conversation(session, sampling, interactive, network.offload)
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


class StopRequest:
    """While entered, Ctrl-C asks for an end (``made``); a second one interrupts at once."""

    def __init__(self) -> None:
        self.made = False

    def __enter__(self) -> "StopRequest":
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, *_: object) -> None:
        if self.made:
            raise KeyboardInterrupt
        self.made = True


class Conversation:
    """What is typed, to the session; what comes back, to the terminal."""

    def __init__(
        self,
        session: "Session",
        sampling: dict[str, Any],
        interactive: bool,
        offload: "Offload | None" = None,
    ):
        self._session, self._offload = session, offload
        self._at_loading = offload and offload.usage()
        self._sampling = sampling
        self._interactive = interactive
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/reset": lambda _: session.reset(),
            "/save": self._save,
            "/load": self._load,
            "/system": self._system,
            "/stats": lambda _: self._stats(),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Until /exit or the input's end. On a terminal a mistake is told, and it goes on.

        Raises:
            K3Error: a mistake in input that is not typed.
        """
        for line in lines:
            command, _, rest = line.strip().partition(" ")
            if command == "/exit":
                return
            try:
                if command in self._commands:
                    self._commands[command](rest.strip())
                elif command.startswith("/") and command.count("/") == 1:
                    raise K3Error(f"no command {command}; /help lists them")
                elif line.strip():
                    self._answer(line)
            except K3Error as e:
                if not self._interactive:
                    raise
                note(str(e))

    def _answer(self, text: str) -> None:
        printer = AnswerPrinter()
        with StopRequest() as stop, PromptBar() as bar:

            def reading_the_prompt(done: int, total: int) -> None:
                if stop.made:
                    raise KeyboardInterrupt
                bar.update(done, total)

            turn = self._session.turn(
                text, prompt_progress_callback=reading_the_prompt, **self._sampling
            )
            try:
                for chunk in turn:
                    printer.show(chunk)
                    if stop.made and chunk.reply is None:
                        turn.close()
            except KeyboardInterrupt:
                stop.made = True
            finally:
                printer.end()
        if stop.made and not self._interactive:
            raise KeyboardInterrupt
        if stop.made:
            note("stopped")
        elif self._session.reply:
            self._remark(self._session.reply, printer.wrote_text)

    def _remark(self, reply: "Reply", has_text: bool) -> None:
        if reply.finish_reason == "length":
            what = "answer" if has_text else "thinking"
            note(f"the {what} was cut at {self._sampling['max_tokens']} tokens (--max-tokens)")
        show = footer if self._interactive else dropped
        if remark := show(reply, self._offload):
            note(remark)

    def _save(self, file: str) -> None:
        path = _named(file, "/save")
        self._session.save(path)
        note(f"{len(self._session.messages)} messages in {path}")

    def _load(self, file: str) -> None:
        path = _named(file, "/load")
        self._session.load(path)
        note(f"{len(self._session.messages)} messages from {path}")

    def _system(self, text: str) -> None:
        if text:
            self._session.system = text
        else:
            print(self._session.system or "no system message")

    def _stats(self) -> None:
        stats, reply = self._session.stats, self._session.reply
        print(
            f"{stats.answers} answers, {stats.generated_tokens} tokens; prompts of "
            f"{stats.prompt_tokens} tokens, {stats.cached_tokens} of them kept from before"
        )
        if reply is not None:
            print(
                f"last answer: prompt {reply.prompt_tps:.1f} tokens/s, "
                f"answer {reply.generation_tps:.1f} tokens/s, "
                f"peak memory {format_bytes(reply.peak_memory_bytes)}"
            )
        if self._offload is not None:
            usage = self._offload.usage() - self._at_loading
            print("\n".join(since_loading(self._offload, usage)))


def _named(file: str, command: str) -> Path:
    if not file:
        raise K3Error(f"{command} needs a file: {command} talk.json")
    return Path(file).expanduser()
