"""A conversation on the terminal: what is typed, to the session; what comes back, to the screen.

Owns the commands that begin with a slash. Where lines come from is :mod:`.chat`'s business.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chat.saved import is_name
from ..errors import K3Error
from ..units import format_bytes
from .figures import dropped, footer, since_loading
from .pictures import dropped as dropped_files
from .pictures import named_file
from .terminal import AnswerPrinter, PromptBar, note

if TYPE_CHECKING:
    from ..chat.saved import NamedSessions
    from ..chat.session import Reply, Session
    from ..experts.offload import Offload
    from ..media.attachments import Attachment

HELP = """\
/help           this list
/reset          forget the conversation
/image FILE     show a picture with the next message; or drop it onto the line
/video FILE     show a video with the next message
/retry [TEXT]   answer the last message again, or TEXT in its place
/save NAME      save the conversation under a name, or in a file, as talk.json
/load NAME      take up a saved conversation
/system [TEXT]  show or set the system message
/stats          tokens and speed so far
/exit           leave (also Ctrl-D)
Enter sends, Alt-Enter (or Esc, Enter) begins a new line, Ctrl-C stops an answer."""


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
    """What is typed, to the session; what comes back, to the terminal.

    >>> conversation = Conversation(session, sampling, interactive, named, offload)
    >>> conversation.resume("holiday")
    >>> conversation.run(lines)
    """

    def __init__(
        self,
        session: "Session",
        sampling: dict[str, Any],
        interactive: bool,
        named: "NamedSessions",
        offload: "Offload | None" = None,
    ):
        self._session, self._offload = session, offload
        self._at_loading = offload and offload.usage()
        self._sampling = sampling
        self._interactive = interactive
        self._named = named
        self._shown: list[Attachment] = []  # With the next message.
        self._resumed: Path | None = None  # Is saved again after every answer.
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/reset": lambda _: self._reset(),
            "/image": lambda path: self._show([named_file(path, "/image")], []),
            "/video": lambda path: self._show([], [named_file(path, "/video")]),
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/system": self._system,
            "/stats": lambda _: self._stats(),
        }

    def resume(self, name: str) -> None:
        """Go on with the session ``name``, and save it after every answer, until another begins.

        Raises:
            K3Error: there is none, or it cannot be read.
        """
        self._resumed = self._named.existing(name)
        self._session.load(self._resumed)
        note(f"{len(self._session.messages)} messages of {name}")

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
                self._take(line, command, rest.strip())
            except K3Error as e:
                if not self._interactive:
                    raise
                note(str(e))

    def _take(self, line: str, command: str, rest: str) -> None:
        if command in self._commands:
            self._commands[command](rest)
            return
        if self._interactive:
            line, images, videos = dropped_files(line)
            self._show(images, videos)
            command = line.partition(" ")[0]
        if command.startswith("/") and command.count("/") == 1:
            raise K3Error(f"no command {command}; /help lists them")
        if line.strip():
            self._answer(line)

    def _answer(self, text: str | list[dict[str, Any]]) -> None:
        printer = AnswerPrinter()
        with StopRequest() as stop, PromptBar() as bar:

            def reading_the_prompt(done: int, total: int) -> None:
                if stop.made:
                    raise KeyboardInterrupt
                bar.update(done, total)

            shown, self._shown = self._shown, []
            turn = self._session.turn(
                text, images=shown, prompt_progress_callback=reading_the_prompt, **self._sampling
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
        if self._resumed is not None:
            self._session.save(self._resumed, with_states=True)
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

    def _show(self, images: list[str], videos: list[str]) -> None:
        for path, shown in zip(
            [*images, *videos], self._session.opened(images, videos), strict=True
        ):
            self._shown.append(shown)
            note(f"{path}: {shown.tokens:,} tokens, with your next message")

    def _reset(self) -> None:
        self._session.reset()
        self._shown.clear()
        self._resumed = None  # Another conversation begins; what is saved stays.

    def _retry(self, text: str) -> None:
        question = self._session.take_back()
        if text:
            self._shown = [*self._session.shown(question), *self._shown]
        self._answer(text or question)

    def _save(self, name: str) -> None:
        path = self._path(name, "/save")
        if is_name(name):
            self._named.make_folder()
        self._session.save(path, with_states=is_name(name))
        note(f"{len(self._session.messages)} messages in {path}")

    def _load(self, name: str) -> None:
        path = self._path(name, "/load")
        self._session.load(self._named.existing(name) if is_name(name) else path)
        self._resumed = None
        note(f"{len(self._session.messages)} messages from {path}")

    def _path(self, name: str, command: str) -> Path:
        if not name:
            raise K3Error(f"{command} needs a name: {command} holiday")
        return self._named.path(name) if is_name(name) else Path(name).expanduser()

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
