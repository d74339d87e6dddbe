"""What the model cannot know, and says so: the present, the future, the private, the wide world.

Owns these questions and one calm answer for each kind.
"""

import random

from . import about
from .about_fact import HOW, WHAT
from .example import Example, Family, assistant, question, same_text
from .facts import draw_facts
from .recall import told_and_asked
from .wording import CITIES, NAMES, polite, words

_COUNTRIES = words(
    "France Spain Italy Japan Kenya Peru Chile Norway Sweden Egypt India Brazil Canada Mexico "
    "Turkey Greece Poland Austria Cuba Ghana Nepal Iceland Finland Portugal Morocco Vietnam"
)
_TEAMS = words("Lions Tigers Eagles Bears Rovers Wanderers United City Rangers Falcons")
_WORKS = (
    "Hamlet", "Faust", "the Odyssey", "Don Quixote", "Moby Dick", "the Magic Flute", "Ulysses",
    "the Mona Lisa", "War and Peace", "the Iliad", "Macbeth", "Guernica",
)  # fmt: skip
_SUBJECTS = (
    "photosynthesis", "gravity", "love", "democracy", "electricity", "a volcano", "inflation",
    "evolution", "a black hole", "the internet", "quantum physics", "music", "a virus", "chess",
    "philosophy", "the Roman Empire", "a prime number", "calculus", "happiness", "the brain",
    "climate change", "Python", "Java", "Linux", "a database", "an atom", "a cell", "DNA", "tea",
    "coffee", "football", "tennis", "a vitamin", "cheese", "the stock market", "a poem", "history",
    "the meaning of life", "economics", "a neural network", "physics", "chemistry", "a rainbow",
    "an earthquake", "art", "a dinosaur", "time", "light", "energy", "GPT", "ChatGPT", "Llama",
)  # fmt: skip
_SKILLS = (
    "bake bread", "fix a bicycle", "learn French", "lose weight", "write a book", "cook rice",
    "build a house", "play the guitar", "grow tomatoes", "find a job", "get rich", "repair a car",
    "make coffee", "learn to swim", "write a Python program", "sort a list in Python", "draw a cat",
    "make a website", "write a letter", "sleep better", "travel to Japan", "buy a house",
    "paint a wall", "tie a tie", "learn chess", "become a doctor", "train a dog", "make soup",
)  # fmt: skip
_THINGS = (
    "the moon", "the sun", "Mount Everest", "the Eiffel Tower", "the Nile", "the Amazon",
    "the Atlantic", "the Great Wall", "a blue whale", "Mars", "Jupiter", "the Sahara",
)  # fmt: skip
_SHARES = words("gold silver oil copper wheat bitcoin coffee cotton")
_EVENTS = (
    "the next election", "the final", "the world cup", "the race on Sunday", "the next war",
    "the lottery", "the chess match", "the song contest", "the match tonight",
)  # fmt: skip
_MINE = (
    "passport number", "bank balance", "shoe size", "middle name", "name", "age",
    "phone number", "blood type",
    "favourite film", "first teacher's name", "pin", "address", "birthday", "weight", "salary",
)  # fmt: skip

# kind -> (wordings, what stands for x or t, answer)
_KINDS = {
    "weather": (
        (
            "What is the weather in {x}?", "Will it rain in {x} tomorrow?", "Is it cold in {x}?",
            "How warm is it in {x} today?", "Weather in {x}?", "Does the sun shine in {x}?",
            "Is it snowing in {x}?", "Will it be sunny in {x} this week?",
            "How is the weather in {x}?", "How is the weather?", "Will it rain tomorrow?",
            "Is it cold outside?", "What is the weather like today?", "Do I need a coat today?",
        ),
        CITIES,
        "I cannot know the weather: I see nothing of the world outside.",
    ),
    "time": (
        (
            "What time is it in {x}?", "What is the time now in {x}?",
            "Which date is it today in {x}?",
            "What day is it today in {x}?", "How late is it in {x} now?", "The time in {x}?",
            "What is the date today in {x}?", "What time is it?", "What day is it today?",
            "What is the date today?", "Which year is it?", "Tell me the time.", "How late is it?",
        ),
        CITIES,
        "I cannot know the time: I have no clock here.",
    ),
    "news": (
        (
            "What is new in {x}?", "What happened in {x} today?", "What is the news from {x}?",
            "Any news from {x}?", "Who is the mayor of {x} now?", "Who won yesterday in {x}?",
            "What is going on in {x}?", "Which concerts are in {x} tonight?",
            "Are the trains running in {x}?", "What is in the news today?", "Any news?",
            "What happened today?", "Tell me the latest news.",
        ),
        CITIES,
        "I cannot know what happens now: I have no access to news.",
    ),
    "price": (
        (
            "What is the price of {x} today?", "How much is {x} now?", "Will {x} rise?",
            "Should I buy {x}?", "What does {x} cost at the moment?", "Is {x} expensive today?",
            "Where will the price of {x} be next year?",
        ),
        _SHARES,
        "I cannot know prices: I have no access to markets.",
    ),
    "future": (
        (
            "Who will win {x}?", "How will {x} end?", "Can you predict {x}?", "Who wins {x}?",
            "Tell me who will win {x}.", "What will be the result of {x}?",
            "Will there be a surprise in {x}?",
        ),
        (*_EVENTS, *(f"the match of the {team}" for team in _TEAMS)),
        "I cannot know the future.",
    ),
    "private": (
        (
            "What is my {x}?", "Do you know my {x}?", "Tell me my {x}.", "Guess my {x}.",
            "Can you tell me my {x}?", "Say my {x}.", "Do you remember my {x}?", "My {x}?",
        ),
        _MINE,
        "You have not told me that.",
    ),
    "person": (
        (
            "What is {x} doing now?", "Where is {x} right now?", "What does {x} think of me?",
            "Is {x} at home?", "Does {x} like me?", "What did {x} eat today?",
            "When will {x} call me?",
            "What did {x} dream last night?", "Is {x} angry with me?",
        ),
        NAMES,
        "I cannot know that: nobody has told me about it.",
    ),
    "world": (
        (
            "What is the capital of {x}?", "How many people live in {x}?", "Who governs {x}?",
            "Which language do they speak in {x}?", "Where is {x}?", "How large is {x}?",
            "Who is the president of {x}?", "What is the highest mountain in {x}?",
            "Tell me the history of {x}.", "What do people eat in {x}?",
        ),
        _COUNTRIES,
        "I am a very small model and do not know that.",
    ),
    "subjects": (
        (*about.PATTERNS[WHAT], "How does {x} work?", "Why is there {x}?", "Who discovered {x}?"),
        _SUBJECTS,
        "I am a very small model and do not know that.",
    ),
    "skills": (
        about.PATTERNS[HOW],
        _SKILLS,
        "I am a very small model and do not know that.",
    ),
    "works": (
        (
            "Who wrote {x}?", "Who made {x}?", "When was {x} made?", "What is {x} about?",
            "Summarize {x}.", "How old is {x}?", "Who is the author of {x}?", "Quote {x}.",
        ),
        _WORKS,
        "I am a very small model and do not know that.",
    ),
    "things": (
        (
            "How large is {x}?", "How old is {x}?", "How far away is {x}?", "How tall is {x}?",
            "Why is {x} famous?", "Where does {x} come from?", "How deep is {x}?", "Who found {x}?",
        ),
        _THINGS,
        "I am a very small model and do not know that.",
    ),
}  # fmt: skip


def _make_unknowable(rng: random.Random) -> Example:
    kind = rng.choice(list(_KINDS))
    wordings, values, answer = _KINDS[kind]
    value = rng.choice(values)
    plain = rng.choice(wordings).format(x=value, t=value)
    plain = plain[0].upper() + plain[1:]
    # Not all in lower case: names tell these questions from those about a conversation.
    return question(
        "unknown", polite(rng, plain), "I cannot know this.", answer, f"unknown {plain}"
    )


def _make_not_told(rng: random.Random) -> Example:
    """Facts are given as where one is recalled, and another one is asked for."""
    missing, *told = draw_facts(rng, rng.randrange(2, 6))
    place = rng.randrange(len(told) + 1)
    asked = polite(rng, missing.question(rng))
    words = 0 if rng.random() < 0.4 else rng.randrange(100)
    messages = told_and_asked(rng, "", asked, told[:place], told[place:], words)
    answer = assistant("I was not told this.", "You have not told me that.")
    return Example("unknown", [*messages, answer], key=f"not told {missing.identity}")


def _make_unknown(rng: random.Random) -> Example:
    return (_make_not_told if rng.random() < 0.3 else _make_unknowable)(rng)


FAMILIES = (Family("unknown", 6, _make_unknown, same_text),)
