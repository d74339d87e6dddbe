"""Processes that are killed while they keep prompts never leave anything that loads wrongly."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mlx_k3 import nano
from mlx_k3.chat.prompt_cache import PromptCache

from .support.prompts import FakeModel, content

KILLS = 25
TEXTS = 12
MODEL = FakeModel(width=200_000)


def text(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=1500)


def keep_writing(folder, seed: int, started) -> None:
    """A process that keeps beginnings of the texts, in a folder too small for them."""
    rng = random.Random(seed)
    prompts = PromptCache(MODEL, "c" * 64, memory_bytes=0, folder=folder, disk_bytes=10**7)
    started.set()
    while True:
        ids = text(rng.randrange(TEXTS))
        cache, rest = prompts.fetch(ids)
        end = len(ids) - len(rest)
        more = rest[: rng.choice([1, 100, 600])]
        prompts.store(ids[: end + len(more)], MODEL.read(more, cache))


def test_kills_at_random_moments(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    rng, found, unfinished = random.Random(4), 0, 0
    for kill in range(KILLS):
        started = [context.Event() for _ in range(2)]
        writers = [
            context.Process(target=keep_writing, args=(tmp_path, 2 * kill + i, event))
            for i, event in enumerate(started)
        ]
        for writer in writers:
            writer.start()
        for event in started:
            event.wait(30)
        time.sleep(rng.uniform(0, 0.15))
        for writer in writers:
            writer.kill()
            writer.join()
            assert writer.exitcode == -signal.SIGKILL
        unfinished += any(file.suffix == ".partial" for file in tmp_path.iterdir())
        prompts = PromptCache(MODEL, "c" * 64, memory_bytes=0, folder=tmp_path)
        assert not any(file.suffix == ".partial" for file in tmp_path.iterdir())
        for seed in range(TEXTS):
            ids = text(seed)
            cache, rest = prompts.fetch(ids)
            if len(rest) < len(ids):
                read = MODEL.read(ids[: len(ids) - len(rest)], MODEL.make_cache())
                assert content(cache) == content(read)
                found += 1
    # It happened what this is about: writing was interrupted, and there was something to find.
    assert unfinished > KILLS / 10
    assert found > KILLS


@pytest.mark.slow
def test_a_chat_that_is_killed_goes_on_with_the_same_answers(tmp_path):
    """The command itself: killed anywhere, a session then says what it would have said."""
    questions = ["What is 12 + 30?", "And 5 + 5?", "Sort these: pear, fig, apple", "Who are you?"]
    first, *others = questions

    def chat(home, lines, *options, kill_after=None):
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mlx_k3",
                "chat",
                str(nano.converted()),
                "--temp",
                "0",
                *options,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
            text=True,
        )
        if kill_after is not None:
            process.stdin.write("\n".join(lines) + "\n")
            process.stdin.flush()
            time.sleep(kill_after)
            process.kill()
        return process.communicate("" if kill_after else "\n".join(lines) + "\n")[0]

    def messages(home):
        path = next(home.rglob("sessions/talk.json"))
        return json.loads(path.read_text())["messages"]

    whole = tmp_path / "whole"
    chat(whole, [first, *others, "/save talk"])
    wanted = messages(whole)
    killed = tmp_path / "killed"
    chat(killed, [first, "/save talk"])
    rng = random.Random(5)
    while len(messages(killed)) < len(wanted):
        left = questions[len(messages(killed)) // 2 :]
        chat(killed, left, "--resume", "talk", kill_after=rng.uniform(0.5, 6))
        assert messages(killed) == wanted[: len(messages(killed))]
