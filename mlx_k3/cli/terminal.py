"""How an answer appears: the thinking dimmed, the answer plain, and nothing but text.

Also what appears beside it: notes, and a bar for a long prompt. Knows chunks of an answer by
their ``text`` and ``reasoning`` only; imports no mlx.
"""

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

# A prompt that takes longer than this gets a bar.
BAR_AFTER_SECONDS = 2.0

# A model may write escape sequences; a terminal would obey them.
_UNPRINTABLE = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


class AnswerPrinter:
    """Prints an answer as it comes.

    On a terminal the thinking is shown dimmed. Elsewhere only the answer proper is written: a
    reader of the output could not tell the two apart.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._thinking = False
        self.wrote_text = False

    def show(self, chunk: Any) -> None:
        """Print what a chunk brought."""
        if not self._console.is_terminal:
            if chunk.text:
                self.wrote_text = True
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            return
        if chunk.reasoning:
            self._thinking = True
            text = chunk.reasoning.translate(_UNPRINTABLE)
            self._console.print(text, style="dim", end="", soft_wrap=True)
        if chunk.text:
            sys.stdout.write("\n\n" if self._thinking else "")
            self._thinking = False
            self.wrote_text = True
            # Not by rich, which would replace tabs.
            sys.stdout.write(chunk.text.translate(_UNPRINTABLE))
            sys.stdout.flush()

    def end(self) -> None:
        """Finish the line."""
        if self._console.is_terminal or self.wrote_text:
            sys.stdout.write("\n")
        sys.stdout.flush()


class PromptBar:
    """How far a long prompt has been read and how long it will take, on stderr if a terminal.

    >>> with PromptBar() as bar:
    ...     stream_generate(model, tokenizer, prompt, prompt_progress_callback=bar.update)
    """

    def __init__(self) -> None:
        self._begin: float | None = None
        self._progress: Progress | None = None

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` tokens are read."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = now
        if done >= total:
            self.close()
        elif self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done)
        elif sys.stderr.isatty() and now - self._begin > BAR_AFTER_SECONDS:
            self._progress = _bar()
            self._progress.add_task("reading the prompt", total=total, completed=done)
            self._progress.start()

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "PromptBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bar() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens, time left"),
        # Layers of experts come seconds apart: the usual half minute is too short a memory.
        TimeLeft(),
        speed_estimate_period=300,
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def note(text: str) -> None:
    """A remark beside the answer, on stderr."""
    console = Console(file=sys.stderr, highlight=False, markup=False)
    console.print(text, style="dim", soft_wrap=True)
