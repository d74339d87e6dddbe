"""Going on equals never having stopped: random conversations against models that read all anew."""

import json
import random
from functools import lru_cache
from pathlib import Path

import pytest

from mlx_k3 import nano
from mlx_k3.chat import prefix_tree, prompt_cache, reading
from mlx_k3.chat.generation import generate
from mlx_k3.chat.prompt_cache import PromptCache
from mlx_k3.chat.reading import stops
from mlx_k3.chat.session import Session
from mlx_k3.loader import assemble, load

from .support.models import convert_golden
from .support.offload import offloaded
from .support.prompts import Counting, answer

END = 7
MODELS = ["nano", "tiny-text", "tiny-kimi-linear", "offloaded"]
# Fifty in all on the bundled model and on the first random one; some of them on every run.
QUICK, ALL = range(2), range(50)


@pytest.fixture(scope="module")
def models(golden, tmp_path_factory):
    """Models by name, loaded when they are asked for."""
    out = tmp_path_factory.mktemp("models")

    @lru_cache
    def folder(name):
        return convert_golden(golden, name, out)

    @lru_cache
    def model(name):
        if name == "nano":
            return load(nano.converted(), dtype="float32")[0]
        return assemble(folder(name), "float32")

    with offloaded(folder("tiny-text"), 12) as on_demand:
        yield lambda name: on_demand if name == "offloaded" else model(name)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that short texts have many."""
    for module in (prefix_tree, prompt_cache, reading):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 16)


class Talk:
    """A conversation in ids: messages that end with END, and what a prompt cache should know."""

    def __init__(self, model, folder: Path, seed: int):
        self.rng = random.Random(seed)
        self.model, self.folder = Counting(model), folder
        self.messages: list[list[int]] = [self.message()]
        self.known: set[tuple[int, ...]] = set()
        # Half of the conversations have all the room they want, and so can be counted.
        self.is_counted = seed % 2 == 0
        self.open()

    def open(self) -> None:
        """Begin a process."""
        kept = 4 * 10**5
        memory, disk = (None, None) if self.is_counted else (self.rng.choice([0, kept]), 2 * kept)
        self.prompts = PromptCache(
            self.model, "a" * 64, memory_bytes=memory, folder=self.folder, disk_bytes=disk
        )

    def message(self) -> list[int]:
        """Some ids that end a message."""
        n = self.rng.choice([1, 3, 10, 40, 120])
        return [*self.rng.choices(range(10, 450), k=n), END]

    def ids(self) -> list[int]:
        """All messages, and the beginning of an answer."""
        return [*(token for message in self.messages for token in message), 3, 4]

    def step(self) -> None:
        """One thing that a person, an app or a machine does."""
        action = self.rng.choice(
            ["ask", "ask", "again", "edit", "cut", "restart", "anew", "stop", "lose", "interrupt"]
        )
        getattr(self, action)()

    def ask(self, after: int | None = None) -> None:
        """Say something, and go on with the answer."""
        self.messages.append(self.message())
        self.again(after)

    def again(self, after: int | None = None) -> None:
        """Answer once more."""
        ids, tokens = self.ids(), self.rng.choice([1, 2, 6])
        best = max((len(k) for k in self.known if k == tuple(ids[: len(k)])), default=0)
        best = min(best, len(ids) - 1)
        self.model.calls = []
        _, generated = answer(
            self.model, ids, self.prompts, tokens, [END], after, prefill_step_size=64
        )
        read = self.model.read(len(generated))
        wanted = generate(self.model, None, ids, max_tokens=tokens)
        assert generated == wanted[: len(generated)]
        kept = [*(ids[:stop] for stop in stops(ids, len(ids) - read, _Stops)), [*ids, *generated]]
        if self.is_counted:
            assert len(ids) - read == best
        self.known |= {tuple(k) for k in kept}
        self.messages.append([*ids[-2:], *generated, END])

    def edit(self) -> None:
        """Say something else instead of an earlier message."""
        place = self.rng.randrange(len(self.messages))
        self.messages[place:] = [self.message()]
        self.again()

    def cut(self) -> None:
        """Forget some messages, and answer what is left."""
        self.messages = self.messages[: self.rng.randrange(len(self.messages)) + 1]
        self.again()

    def anew(self) -> None:
        """Begin another conversation with the same first message."""
        self.messages = self.messages[:1]
        self.ask()

    def stop(self) -> None:
        """Leave in the middle of an answer."""
        self.ask(after=self.rng.choice([1, 2]))

    def interrupt(self) -> None:
        """Leave while the prompt is read."""
        self.messages.append([*self.rng.choices(range(10, 450), k=150), END])
        ids = self.ids()

        def leave(done, total):
            if done >= 64:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            answer(self.model, ids, self.prompts, prefill_step_size=64,
                   prompt_progress_callback=leave, stop_ids=[END])  # fmt: skip
        start = len(ids) - len(self.prompts.fetch(ids)[1])
        if self.is_counted:
            assert start >= 64
        self.known |= {tuple(ids[:n]) for n in range(start + 1) if self._has(ids, n)}

    def _has(self, ids: list[int], n: int) -> bool:
        return n > 0 and len(self.prompts.fetch([*ids[:n], 1])[1]) == 1

    def restart(self) -> None:
        """The process ends, and another begins."""
        self.open()

    def lose(self) -> None:
        """Files go missing, and the memory with the process."""
        if not self.is_counted and self.folder.is_dir():
            for file in sorted(self.folder.iterdir()):
                if self.rng.random() < 0.3:
                    file.unlink()
        self.open()


class _Stops:
    eos_token_ids = (END,)


def converse(models, name: str, seed: int, folder: Path, steps: int = 6) -> None:
    talk = Talk(models(name), folder, seed)
    talk.again()
    for _ in range(steps):
        talk.step()


@pytest.mark.parametrize("seed", QUICK)
@pytest.mark.parametrize("name", MODELS)
def test_random_conversations(models, tmp_path, name, seed):
    converse(models, name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL[len(QUICK) :])
@pytest.mark.parametrize("name", MODELS[:2])
def test_more_random_conversations(models, tmp_path, name, seed):
    converse(models, name, seed, tmp_path, steps=12)


QUESTIONS = ["What is 12 + 30?", "And 5 + 5?", "Who are you?", "Sort: pear, fig, apple", "Thanks."]


@pytest.fixture(scope="module")
def bundled():
    return load(nano.converted(), dtype="float32")


@pytest.mark.parametrize("seed", range(2))
def test_random_sessions_of_the_bundled_model(bundled, tmp_path, seed):
    sessions(bundled, tmp_path, seed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_random_sessions_of_the_bundled_model(bundled, tmp_path, seed):
    sessions(bundled, tmp_path, seed, 10)


def sessions(bundled, folder: Path, seed: int, steps: int) -> None:
    """As people have them: asked, asked again, edited, saved, stopped, taken up elsewhere."""
    rng, (model, tokenizer) = random.Random(seed), bundled
    talk = folder / "talk.json"

    def begin():
        prompts = PromptCache(model, "b" * 64, memory_bytes=10**6, folder=folder / "prompts")
        session = Session(model, tokenizer, system="Be brief.", prompts=prompts)
        if talk.exists():
            session.load(talk)
        return session

    session = begin()
    for _ in range(steps):
        question = rng.choice(QUESTIONS)
        action = rng.choice(["ask", "again", "edit", "restart", "stop"])
        if action in ("again", "edit") and session.messages:
            before = session.take_back()
            question = before if action == "again" else question
        if action == "restart":
            session.save(talk)
            session = begin()
        turn = session.turn(question, max_tokens=25)
        generated = []
        for chunk in turn:
            generated.append(chunk.token)
            if action == "stop" and len(generated) == 5:
                turn.close()
                break
        fresh = Session(model, tokenizer, system=session.system)
        fresh._messages, fresh._generated = session.messages[:-1], dict(session._generated)
        fresh._generated.pop(len(fresh._messages), None)
        wanted = generate(model, None, fresh._prompt(), max_tokens=25)
        assert generated == wanted[: len(generated)]
    session.save(talk)
    assert json.loads(talk.read_text())["messages"] == session.messages
