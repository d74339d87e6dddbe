"""A run's log: one JSON object a line, told as it is written."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = Callable[[dict[str, Any]], None]


class Log:
    """Appends to ``path`` what lies after ``step``: a run that continues leaves no line twice."""

    def __init__(self, path: Path, step: int, report: Report):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A run that was killed may have left a part of a line.
        whole = (line for line in lines if line.endswith("\n"))
        path.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))
        self._path, self._report = path, report
        self._tokens, self._since = 0, time.perf_counter()

    def __enter__(self) -> "Log":
        self._file = open(self._path, "a")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def count(self, tokens: int) -> None:
        """So many more tokens were trained on."""
        self._tokens += tokens

    def write(self, record: dict[str, Any]) -> None:
        """Add a line, with the speed since the last one."""
        now = time.perf_counter()
        record["tokens_per_second"] = round(self._tokens / (now - self._since))
        self._tokens, self._since = 0, now
        rounded = {k: float(f"{v:.6g}") if type(v) is float else v for k, v in record.items()}
        self._file.write(json.dumps(rounded) + "\n")
        self._file.flush()
        self._report(rounded)
