"""How an answer appears: the thinking dimmed, the answer plain, and nothing but text.

Knows chunks of an answer by their ``text`` and ``reasoning`` only; imports no mlx.
"""

import sys
from typing import Any

from rich.console import Console

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


def note(text: str) -> None:
    """A remark beside the answer, on stderr."""
    Console(file=sys.stderr, highlight=False, markup=False).print(text, style="dim")
