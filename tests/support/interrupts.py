"""Ctrl-C between any two lines of the experts' code."""

import linecache
import sys
from pathlib import Path

import mlx_k3.experts

CODE = Path(mlx_k3.experts.__file__).parent


class interrupted_at:
    """Raise KeyboardInterrupt when this thread reaches the ``n``-th line of the experts' code.

    Swallows it. ``lines`` is how many lines were reached.
    """

    def __init__(self, n: int, without: str = ""):
        self.lines, self._n, self._without = 0, n, without

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, kind, error, trace):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _call(self, frame, event, arg):
        file = frame.f_code.co_filename
        inside = file.startswith(str(CODE)) and not file.endswith(self._without or "/")
        return self._line if inside else None

    def _line(self, frame, event, arg):
        # Python handles signals after calls and jumps: not where a `with` line is reached again,
        # before what leaves its block, and not at a `try` line, before what it guards.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith(("with ", "try:")):
            self.lines += 1
            if self.lines == self._n:
                raise KeyboardInterrupt
        return self._line
