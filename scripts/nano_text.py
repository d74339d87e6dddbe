"""The text that the bundled checkpoint's vocabulary is learned from.

Everyday words, small sums and the chat format's own words, the same every time.
"""

import random
from collections.abc import Iterator

SEED = 20260


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words("""
time year people way day man woman child world school life hand part place week case point company
number group problem fact house water room mother area money story month book eye job word side kind
head friend father power hour game line end member city name team minute idea body information face
level office door person art history party result morning reason research girl boy moment air
teacher force education river mountain garden kitchen table window letter machine model memory layer
expert token answer question sentence language picture light sound colour summer winter
""")
VERBS = _words("""
be have do say get make go know take see come think look want give use find tell ask work seem feel
try leave call keep let begin help show hear play run move live believe bring happen write provide
sit stand lose pay meet include continue set learn change lead understand watch follow stop create
speak read allow add spend grow open walk win offer remember love consider appear buy wait serve
send expect build stay fall cut reach remain
""")
ADJECTIVES = _words("""
good new first last long great little own other old right big high different small large next early
young important few public bad same able warm cold bright quiet simple short clear strong whole free
better full special easy ready
""")
LINKS = _words("and but or so because when while if although before after since until as")
WHERE = _words("in on at by near under over behind into from with without for about to of")
WHO = _words("I you he she it we they")
CHAT = _words("""
message role="user" role="assistant" role="system" role="tool" think response tools call tool=""
index="1" argument key="" type="string" type="number" type="boolean" json
""")
SENTENCES = (
    "The {adj} {noun} will {verb} {where} the {noun2}.",
    "{who} can {verb} the {noun}, {link} the {noun2} would {verb2}.",
    "There are {a} {noun}s and {b} {noun2}s {where} this {adj} place.",
    "This is not {adj}; {who} should {verb} that {noun} {link} {who} could {verb2}.",
    "What is {a} plus {b}? The answer is {c}.",
    "Please explain how the {noun} works, {who} said {where} the {noun2}.",
)


def sentences(count: int) -> Iterator[str]:
    """``count`` plain sentences, and as many lines of the chat format's words."""
    rng = random.Random(SEED)
    for _ in range(count):
        a, b = rng.randrange(100), rng.randrange(100)
        yield rng.choice(SENTENCES).format(
            a=a,
            b=b,
            c=a + b,
            noun=rng.choice(NOUNS),
            noun2=rng.choice(NOUNS),
            verb=rng.choice(VERBS),
            verb2=rng.choice(VERBS),
            adj=rng.choice(ADJECTIVES),
            link=rng.choice(LINKS),
            where=rng.choice(WHERE),
            who=rng.choice(WHO),
        )
        yield " ".join(rng.sample(CHAT, 4)) + "\n"
