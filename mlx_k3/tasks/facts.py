"""Made-up facts that the recall tasks hide in a text."""

import random
from dataclasses import dataclass, replace

from .fact_kinds import KINDS, Kind
from .wording import NAMES, name


@dataclass(frozen=True)
class Fact:
    """What is known of one thing, and the words in which it is told."""

    kind: Kind
    about: dict[str, str]
    value: str
    wording: str

    def _text(self, template: str) -> str:
        return template.format(v=self.value, **self.about)

    @property
    def identity(self) -> str:
        """Equal for two facts that answer the same question."""
        return " ".join((self.kind.name, *self.about.values()))

    @property
    def key(self) -> str:
        return f"recall {self.identity} {self.value}"

    @property
    def statement(self) -> str:
        return self._text(self.wording)

    @property
    def update(self) -> str:
        """A statement that replaces an earlier value."""
        return self._text(self.kind.update)

    @property
    def answer(self) -> str:
        return self._text(self.kind.answer or self.kind.statements[0])

    def question(self, rng: random.Random) -> str:
        return self._text(rng.choice(self.kind.questions))

    def changed(self, rng: random.Random) -> "Fact":
        """The same with another value."""
        value = self.value
        while value == self.value:
            value = self.kind.value(rng)
        return replace(self, value=value, wording=rng.choice(self.kind.statements))


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """``count`` facts that answer different questions; of few kinds, so that some are alike."""
    facts: dict[str, Fact] = {}
    kinds = rng.sample(KINDS, min(count, rng.randrange(1, 5)))
    kinds.append(rng.choice([kind for kind in KINDS if kind.about]))  # Others have one question.
    while len(facts) < count:
        kind = rng.choice(kinds)
        about = {
            slot: name(rng) if pool is NAMES else rng.choice(pool)
            for slot, pool in kind.about.items()
        }
        fact = Fact(kind, about, kind.value(rng), rng.choice(kind.statements))
        facts.setdefault(fact.identity, fact)
    return list(facts.values())
