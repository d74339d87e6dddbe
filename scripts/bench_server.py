#!/usr/bin/env python3
"""Many requests to a real server by the real client: what each kind takes, and whether it grows.

    python scripts/bench_server.py                    # the bundled model, 1000 requests, 4 clients
    python scripts/bench_server.py --requests 200 --clients 20

The prompt cache is on and begins empty. Each client holds conversations of three turns with numbers
of its own: plain, streamed, with a tool's result, as JSON of a schema, and one that is left in the
middle. Memory, open files and threads are read after every tenth of the requests.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import openai

MODEL = "k3-nano"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class Conversation:
    """Turns of one client, each with its kind."""

    def __init__(self, client: openai.OpenAI, rng: random.Random):
        self.client, self.rng, self.messages = client, rng, []

    def turn(self, kind: str) -> None:
        """One request; raises if what comes back is not what was asked for."""
        a, b = self.rng.randrange(10, 99), self.rng.randrange(10, 99)
        self.messages.append({"role": "user", "content": f"What is {a} + {b}?"})
        getattr(self, f"_{kind}")()

    def _plain(self, **options: Any) -> None:
        reply = self._ask(**options)
        self.messages.append(reply.choices[0].message)

    def _streamed(self) -> None:
        chunks = self._ask(stream=True)
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.messages.append({"role": "assistant", "content": said})

    def _tool(self) -> None:
        self._plain(tools=[CALCULATOR], tool_choice="required")
        for call in self.messages[-1].tool_calls or []:
            json.loads(call.function.arguments)
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": "132"})
        self._plain(tools=[CALCULATOR])

    def _schema(self) -> None:
        self.messages[-1]["content"] = "Anna is 30 years old. Give her name and age as JSON."
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        self._plain(response_format=form)
        found = json.loads(self.messages[-1].content)
        assert set(found) == {"name", "age"} and isinstance(found["age"], int)

    def _left(self) -> None:
        stream = self._ask(stream=True, max_tokens=1000)
        for _ in zip(range(self.rng.randrange(1, 12)), stream, strict=False):
            pass
        stream.close()
        self.messages.pop()

    def _ask(self, **options: Any) -> Any:
        return self.client.chat.completions.create(
            model=MODEL, messages=self.messages, reasoning_effort="low", **options
        )


KINDS = ("plain", "streamed", "tool", "schema", "left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder))
        try:
            seconds, states = drive(process.pid, url, args.requests, args.clients)
            kept = sum(f.stat().st_size for f in Path(folder).rglob("*.safetensors"))
        finally:
            process.terminate()
            process.wait(60)
    print("| after requests | memory, MB | open files | threads |\n| --- | --- | --- | --- |")
    for row in states:
        print("| {} | {:.1f} | {} | {} |".format(*row))
    print("\n| kind | requests | median, s |\n| --- | --- | --- |")
    for kind, times in sorted(seconds.items()):
        print(f"| {kind} | {len(times)} | {median(times):.3f} |")
    print(f"\n{kept / 1e6:.1f} MB of prompts in the folder; exit code {process.returncode}")


def start(folder: Path) -> tuple[subprocess.Popen, str]:
    """The server with a cache folder of its own, and its address."""
    from mlx_k3 import nano

    converted = nano.converted()
    (folder / "mlx-k3").mkdir()
    (folder / "mlx-k3" / converted.name).symlink_to(converted)
    command = [sys.executable, "-m", "mlx_k3", "serve", "--port", "0", "--temp", "0"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if found := re.search(r" answers at (\S+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    sys.exit("the server did not start")


def drive(
    pid: int, url: str, requests: int, clients: int
) -> tuple[dict[str, list[float]], list[tuple]]:
    """Seconds of each kind, and the process's state after every tenth."""
    seconds, states, lock = defaultdict(list), [], threading.Lock()
    numbers = itertools.count()

    def one(seed: int) -> None:
        rng = random.Random(seed)
        with openai.OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
            while True:
                talk = Conversation(client, rng)
                for kind in rng.choices(KINDS, k=3):
                    with lock:
                        number = next(numbers)
                        if number % max(requests // 10, 1) == 0:
                            states.append((number, *state_of(pid)))
                    if number >= requests:
                        return
                    begin = time.perf_counter()
                    talk.turn(kind)
                    with lock:
                        seconds[kind].append(time.perf_counter() - begin)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
    return seconds, states


def state_of(pid: int) -> tuple[float, int, int]:
    """Memory in MB, open files and threads of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory, threads = (
        int(re.search(rf"^{n}:\s+(\d+)", status, re.M)[1]) for n in ("VmRSS", "Threads")
    )
    return memory * 1024 / 1e6, len(os.listdir(f"/proc/{pid}/fd")), threads


if __name__ == "__main__":
    main()
