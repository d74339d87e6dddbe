"""How people put things: small changes of a question that do not change its answer.

Owns the decorations and the words that several tasks share. Knows no task.
"""

import random


def words(text: str) -> tuple[str, ...]:
    """The words of a list that is written as one text."""
    return tuple(text.split())


NAMES = words(
    "Ada Adam Alma Amir Anna Anton Arun Astrid Ben Bela Bruno Carla Cem Clara Cleo Dana Daniel "
    "David Dora Elif Ella Emil Emma Erik Eva Fatima Felix Finn Frida Georg Greta Hana Hugo Ida "
    "Igor Ines Ivan Jana Jonas Julia Karim Kenji Lara Leo Lena Lina Luca Lucy Maja Marco Maria "
    "Mark Mehmet Mila Mira Nadia Nils Nina Noah Nora Olga Omar Oscar Paula Peter Pia Priya Rosa "
    "Sam Sara Sofia Sven Tara Theo Tim Tom Uma Vera Victor Wanda Yuki Yusuf Zoe"
)
CITIES = words(
    "Athens Basel Berlin Bern Boston Cairo Chicago Delhi Dublin Geneva Hanoi Helsinki Istanbul "
    "Kyoto Lagos Lima Lisbon London Lyon Madrid Malmo Milan Mumbai Nairobi Oslo Paris Porto Prague "
    "Quito Riga Rome Seoul Sofia Sydney Tokyo Toronto Turin Vienna Warsaw Zurich"
)
COLOURS = words("red blue green yellow black white brown orange purple grey pink silver")
WORDS = words(
    "apple arrow anchor banana basket bottle button camera candle carrot castle chair cherry cloud "
    "coffee copper dragon drum eagle engine falcon feather fish flower forest fox garden ghost "
    "glass guitar hammer harbor honey horse house island ivory jacket jungle kettle key king kite "
    "ladder lamp lemon lion magnet maple mirror monkey moon needle nest night ocean olive onion "
    "orange paper parrot pencil pepper piano planet queen quilt rabbit radio river robot rocket "
    "salt sand shadow silver spoon table tiger tower train tree umbrella unicorn valley velvet "
    "violin wagon walnut water whale window winter wolf yacht yellow yogurt zebra zipper"
)

_ONSETS = words("b br d dr f g gr h j k kl l m n p pr r s st t tr v w z")
_CODAS = ("", "", "n", "r", "l", "k", "s", "x", "m")
_BEFORE = (
    "Please tell me: ", "Can you tell me: ", "Hi! ", "Hello, ", "Quick question: ", "Please: ",
    "A question: ", "Hey, ", "Tell me, ", "I wonder: ", "One more thing: ", "Next: ", "OK, ",
)  # fmt: skip
_AFTER = (" Please.", " Thanks.", " Thank you!", " Thanks!")


def name(rng: random.Random) -> str:
    """A first name, sometimes one that nobody has: it can only be copied."""
    return rng.choice(NAMES) if rng.random() < 0.8 else made_up(rng).capitalize()


def made_up(rng: random.Random) -> str:
    """A word of two or three syllables that means nothing."""
    syllables = [rng.choice(_ONSETS) + rng.choice("aeiou") for _ in range(rng.randrange(2, 4))]
    return "".join(syllables) + rng.choice(_CODAS)


def polite(rng: random.Random, text: str) -> str:
    """``text``, now and then with a word before or after it, in lower case or without its mark."""
    dice = rng.random()
    if dice < 0.55:
        return text
    if rng.random() < 0.5 and not text.startswith("I "):
        text = text[0].lower() + text[1:]
    if dice < 0.75:
        return rng.choice(_BEFORE) + text
    if dice < 0.82:
        return text + rng.choice(_AFTER)
    return text.rstrip("?.") if dice < 0.92 else text


def casual(rng: random.Random, text: str) -> str:
    """As :func:`polite`, also all in lower case, and sometimes with a slip of the keyboard."""
    text = polite(rng, text)
    if rng.random() < 0.25:
        text = text.lower()
    return _slip(rng, text) if rng.random() < 0.08 else text


def _slip(rng: random.Random, text: str) -> str:
    """Two neighbouring letters swapped, or one left out, inside a longer plain word."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if not long:
        return text
    place = rng.choice(long)
    word = words[place]
    at = rng.randrange(1, len(word) - 2)
    middle = word[at + 1] + word[at] if rng.random() < 0.6 else word[at]
    words[place] = word[:at] + middle + word[at + 2 :]
    return " ".join(words)
