"""Questions about mlx-k3 itself.

Owns the patterns in which a fact is asked for. A question without its decorations is its identity,
so what is held out are wordings that training has never seen.
"""

import random
import re
from functools import cache

from .about_fact import DOES, HOW, SIZE, WHAT, AboutFact
from .about_model import MODEL_FACTS
from .about_options import OPTION_FACTS
from .about_program import PROGRAM_FACTS
from .example import Example, Family, question, same_text
from .wording import casual

FACTS = PROGRAM_FACTS + OPTION_FACTS + MODEL_FACTS

_COMMON = (
    "What is {t}?", "What's {t}?", "Explain {t}.", "Tell me about {t}.", "Can you explain {t}?",
    "What do you know about {t}?", "Describe {t}.", "{t}?", "Explain {t} to me.",
    "Tell me something about {t}.", "What about {t}?", "Please explain {t} in one sentence.",
    "I have a question about {t}.", "Help me understand {t}.", "I do not understand {t}.",
    "What can you tell me about {t}?", "Say something about {t}.", "Could you explain {t}?",
    "I would like to know more about {t}.", "Give me some information about {t}.",
)  # fmt: skip
PATTERNS = {
    WHAT: (
        *_COMMON, "What does {t} mean?", "What is meant by {t}?", "What exactly is {t}?",
        "I want to know what {t} is.", "Could you tell me what {t} is?", "Define {t}.",
        "Give me a short explanation of {t}.", "In short, what is {t}?", "So what is {t}?",
        "Do you know what {t} is?",
    ),
    DOES: (
        *_COMMON, "What does {t} do?", "What is {t} for?", "What is {t} good for?",
        "What is the use of {t}?", "When do I use {t}?", "Why would I use {t}?",
        "What happens with {t}?", "What can I do with {t}?", "Do you know what {t} does?",
        "Tell me what {t} does.", "What effect has {t}?", "What is the purpose of {t}?",
        "I want to know what {t} does.",
    ),
    HOW: (
        "How do I {t}?", "How can I {t}?", "Which command do I use to {t}?", "I want to {t}.",
        "I want to {t}. How?", "What do I type to {t}?", "Is there a way to {t}?", "How to {t}?",
        "What is the way to {t}?", "Tell me how to {t}.", "Show me how to {t}.", "Can I {t}?",
        "How would one {t}?", "I would like to {t}.", "Explain how to {t}.", "I need to {t}.",
        "How does one {t}?", "What should I do to {t}?", "Do you know how to {t}?",
        "What must I do to {t}?", "Is it possible to {t}?", "How is it possible to {t}?",
        "How could I {t}?", "What do I need to {t}?", "Which command helps me {t}?",
        "Which command can I use to {t}?", "Please tell me how to {t}.", "I am trying to {t}.",
    ),
    SIZE: (
        "What is the {t}?", "What's the {t}?", "Tell me the {t}.", "Do you know the {t}?",
        "I want to know the {t}.", "{t}?", "Give me the {t}.", "Can you tell me the {t}?",
        "I need to know the {t}.", "What do you know about the {t}?", "Please name the {t}.",
        "Say something about the {t}.", "I have a question about the {t}.", "Explain the {t}.",
        "What would be the {t}?", "I am looking for the {t}.", "Could you tell me the {t}?",
        "Which is the {t}?", "What can you tell me about the {t}?", "State the {t}.",
    ),
}  # fmt: skip


def wordings(fact: AboutFact) -> list[str]:
    """All plain questions for ``fact``."""
    asked = [p.format(t=topic) for topic in fact.topics for p in PATTERNS[fact.kind]]
    return [*asked, *fact.whole]


def identity(text: str) -> str:
    """A question in lower case, words only."""
    return "about " + " ".join(re.findall(r"[\w./-]+", text.lower())).rstrip(".")


@cache
def _wordings(index: int) -> list[str]:
    return wordings(FACTS[index])


def _make_about(rng: random.Random) -> Example:
    index = rng.randrange(len(FACTS))
    fact = FACTS[index]
    # Whole questions are few, and each is a wording that no pattern gives.
    whole = fact.whole and rng.random() < 0.2
    plain = rng.choice(fact.whole if whole else _wordings(index))
    text = casual(rng, plain[0].upper() + plain[1:])
    steps = f"This is about {fact.topics[0]}."
    return question("about", text, steps, fact.answer, identity(plain))


FAMILIES = (Family("about", 13, _make_about, same_text),)
