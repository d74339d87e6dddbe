"""A real server in a process of its own, and the real client for it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai

from mlx_k3 import nano

KEY = "sk-test"
MODEL = "k3-nano"
START_SECONDS = 60


class Server:
    """``mlx-k3 serve`` on a free port; ``cache`` is its cache folder, else one of its own."""

    def __init__(
        self,
        *options: str,
        key: str | None = KEY,
        model: Path | None = None,
        cache: Path | None = None,
    ):
        command = [sys.executable, "-m", "mlx_k3", "serve", *([str(model)] if model else [])]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        if key is not None:
            environment["MLX_K3_API_KEY"] = key
        # What it keeps of prompts is its own; the converted model is not made anew.
        self._cache = tempfile.TemporaryDirectory()
        cache = cache or Path(self._cache.name)
        converted, own = nano.converted(), cache / "mlx-k3"
        own.mkdir(exist_ok=True)
        if not (own / converted.name).exists():
            (own / converted.name).symlink_to(converted)
        environment["XDG_CACHE_HOME"] = str(cache)
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--temp", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            # A shell that runs tests in the background has its children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.key = key
        self.lines: list[str] = []
        self._found = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._found.wait(START_SECONDS) or not self.base_url:
            self.close()
            raise AssertionError(f"it did not start: {self.log}")

    def _read(self) -> None:
        self.base_url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r" answers at (\S+)", line):
                self.base_url = match[1]
                self._found.set()
        self._found.set()

    @property
    def log(self) -> str:
        """All it wrote so far."""
        return "".join(self.lines)

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client for it."""
        key = self.key or "none"
        return openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=0, **options)

    def get(self, path: str, **headers: Any) -> httpx2.Response:
        """A plain request with the key."""
        headers = {"Authorization": f"Bearer {self.key}"} | headers
        return httpx2.get(self.base_url.removesuffix("/v1") + path, headers=headers, timeout=60)

    def figure(self, name: str) -> float:
        """A value of the metrics page."""
        [value] = re.findall(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.M)
        return float(value)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def close(self) -> None:
        """End it at once, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._cache.cleanup()


@contextmanager
def serving(*options: str, **how: Any) -> Iterator[Server]:
    """A server for as long as the context lasts."""
    server = Server(*options, **how)
    try:
        yield server
    finally:
        server.close()


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """The answer to one message."""
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)
