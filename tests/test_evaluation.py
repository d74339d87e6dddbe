"""Batched answers, scores of task families, and perplexity."""

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_k3 import K3Error, UnsupportedError, load, nano, tasks
from mlx_k3.chat.generation import stream_generate
from mlx_k3.convert.stream import convert
from mlx_k3.evaluation import accuracy
from mlx_k3.evaluation.accuracy import Score, known_families, measure
from mlx_k3.evaluation.batch import Answer, Batch, render_prompt
from mlx_k3.evaluation.perplexity import score_text
from mlx_k3.loader import assemble

from .support.oracle import Oracle, transcript, transcripts

FAMILIES = ["addition", "recall_short", "tools", "tools_turns", "json", "talk"]
SEED, ITEMS = 7, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluation") / "nano"
    convert(nano.path(), out, trunk="bf16")
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def examples(family, seed=SEED, items=ITEMS):
    """What ``measure`` asks."""
    rng = random.Random(f"{seed} {family}")
    return [tasks.example(family, rng, "held-out") for _ in range(items)]


def oracle(tokenizer, spoken):
    return Oracle(spoken, len(tokenizer.table.pieces), lost=tokenizer.encode("x")[0])


def knows(tokenizer, families=FAMILIES, **settings):
    """A model that answers every item right."""
    spoken = (transcripts(tokenizer, e, **settings) for f in families for e in examples(f))
    return oracle(tokenizer, [ids for several in spoken for ids in several])


def exam(model, tokenizer, families=FAMILIES, **options):
    options = {"at_once": lambda tokens: 8, **options}
    return measure(
        model,
        tokenizer,
        families,
        **{"seed": SEED, "items": ITEMS, "max_tokens": 400, "pass_tokens": 256, **options},
    )


# Answers in batches


def conversations(count):
    rng = random.Random(1)
    texts = [f"What is {rng.randrange(99)}?" + " well" * rng.randrange(20) for _ in range(count)]
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize("settings", [{}, {"thinking": False}])
def test_a_batch_answers_as_one_by_one(loaded, settings):
    model, tokenizer = loaded
    asked = conversations(8)
    options = {"max_tokens": 16, **settings}
    alone = [[*stream_generate(model, tokenizer, c, **options)][-1].reply for c in asked]
    for at_once, pass_tokens in [(1, 512), (5, 40)]:
        together = Batch(model, tokenizer, max_tokens=16, at_once=at_once, pass_tokens=pass_tokens)
        for i, messages in enumerate(asked):
            together.ask(i, render_prompt(tokenizer, messages, **settings))
        answers = dict(together.answers())
        assert len(answers) == len(asked)
        for i, reply in enumerate(alone):
            assert answers[i] == Answer(reply.message, reply.ids, reply.finish_reason)


def test_a_batch_with_experts_on_demand_answers_as_in_memory(folder, loaded):
    def answers(model, at_once):
        together = Batch(model, loaded[1], max_tokens=8, at_once=at_once, pass_tokens=64)
        for i, messages in enumerate(conversations(5)):
            together.ask(i, render_prompt(loaded[1], messages))
        return dict(together.answers())

    offloaded = assemble(folder, slots=24)
    try:
        assert answers(offloaded, 4) == answers(loaded[0], 4) == answers(loaded[0], 1)
    finally:
        offloaded.offload.close()


def test_settings_that_many_share_are_read_once(tokenizer):
    asked = [
        {"role": "user", "content": text} for text in ("one", "two and more words", "three words")
    ]
    prompts = [render_prompt(tokenizer, [message]) for message in asked]
    head = prompts[0].settings
    assert head > 20 and len({tuple(p.ids[:head]) for p in prompts}) == 1
    model = oracle(tokenizer, [])
    together = Batch(model, tokenizer, max_tokens=1, at_once=1)
    for i, p in enumerate(prompts):
        together.ask(i, p)
    list(together.answers())
    # Each answer of one token computes the one after it as well.
    assert model.read_tokens == head + sum(len(p.ids) - head + 1 for p in prompts)


def test_a_conversation_that_goes_on_continues_its_cache(tokenizer):
    example = next(e for e in examples("tools") if e.messages[-2]["role"] == "tool")
    first, second = transcripts(tokenizer, example)
    model = oracle(tokenizer, [first, second])
    settings = {"tools": example.tools}
    together = Batch(model, tokenizer, max_tokens=400, at_once=2)
    before = tasks.asked(example)
    together.ask("it", render_prompt(tokenizer, before, **settings))
    heard = []
    for name, answer in together.answers():
        heard.append((name, answer))
        if len(heard) == 1:
            said = [answer.message, *example.messages[len(before) + 1 : -1]]
            together.ask("it", render_prompt(tokenizer, [*before, *said], **settings))
    assert [name for name, _ in heard] == ["it", "it"]
    assert heard[-1][1].message["content"] == example.messages[-1]["content"]
    assert model.read_tokens == len(second)  # nothing twice


def test_a_model_that_runs_on_into_another_turn_is_stopped(tokenizer):
    questions = [[{"role": "user", "content": text}] for text in ("Hi", "Hello")]
    said, other = (
        transcript(tokenizer, question, {"role": "assistant", "content": "Good day " * times})
        for question, times in zip(questions, (1, 9), strict=True)
    )
    # Instead of the end of its message, the beginning of the next.
    said = [*said[:-4], *render_prompt(tokenizer, questions[0], thinking_effort=None).ids]
    model = oracle(tokenizer, [said, other])
    alone = [[*stream_generate(model, tokenizer, q, max_tokens=300)][-1].reply for q in questions]
    together = Batch(model, tokenizer, max_tokens=300, at_once=2)
    for i, question in enumerate(questions):
        together.ask(i, render_prompt(tokenizer, question))
    answers = dict(together.answers())
    for i, reply in enumerate(alone):
        assert answers[i] == Answer(reply.message, reply.ids, reply.finish_reason)
        assert reply.finish_reason == "stop" and "Good day" in reply.text


def test_a_token_that_the_tokenizer_does_not_know_is_never_chosen(tokenizer):
    class WithSpareRows(Oracle):
        def __call__(self, ids, cache):
            logits = super().__call__(ids, cache)
            return mx.concatenate([logits, mx.full((*ids.shape, 3), 99.0)], axis=-1)

    question = [{"role": "user", "content": "Hi"}]
    answer = {"role": "assistant", "content": "Hello"}
    rows = len(tokenizer.table.pieces)
    model = WithSpareRows([transcript(tokenizer, question, answer)], rows, lost=0)
    together = Batch(model, tokenizer, max_tokens=99)
    together.ask(0, render_prompt(tokenizer, question))
    assert dict(together.answers())[0].message == answer


class Heavy(Oracle):
    """Carries a state of a megabyte a row along."""

    def make_cache(self):
        return [*super().make_cache(), ArraysCache(1)]

    def __call__(self, ids, cache):
        state = cache[1][0]
        state = mx.zeros((len(ids), 1 << 18)) if state is None else state + 1
        cache[1][0] = state
        return super().__call__(ids, cache) + 0 * state[:, None, :1]


def test_who_waits_to_go_on_keeps_no_memory_of_a_whole_batch(tokenizer):
    asked = [e for e in examples("tools", items=40) if e.messages[-2]["role"] == "tool"]
    spoken = [ids for e in asked for ids in transcripts(tokenizer, e)]
    model = Heavy(spoken, len(tokenizer.table.pieces), lost=tokenizer.encode("x")[0])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    result = exam(model, tokenizer, ["tools"], items=40)
    peak_bytes = mx.get_peak_memory() - before
    assert result.scores["tools"].right >= len(asked) > 30
    # Some batches of 8 while one is computed from another, and a row of each who waits.
    assert peak_bytes < 64 << 20


# Scores of families


def test_whoever_knows_all_answers_has_all_points(tokenizer):
    families = list(tasks.FAMILIES)
    moved = []
    result = exam(knows(tokenizer, families), tokenizer, families, progress=lambda: moved.append(1))
    assert {family: score.share for family, score in result.scores.items()} == dict.fromkeys(
        families, 1.0
    )
    assert list(result.scores) == families
    assert result.failures == [] and len(moved) == ITEMS * len(families)
    spoken = (t for f in families for e in examples(f) for t in [*transcripts(tokenizer, e)])
    assert result.generated_tokens < sum(map(len, spoken))


def test_without_thinking(tokenizer):
    result = exam(knows(tokenizer, thinking=False), tokenizer, thinking=False)
    assert all(score.share == 1 for score in result.scores.values())
    result = exam(knows(tokenizer), tokenizer, thinking=False, max_tokens=20)
    assert all(score.share == 0 for score in result.scores.values())


def test_one_wrong_answer_costs_one_point_and_is_shown(tokenizer):
    spoken, changed = [], examples("addition")[2]
    for e in examples("addition"):
        *before, answer = e.messages
        if e is changed or e == changed:
            answer = answer | {"content": "I think it is 7."}
        spoken.append(transcript(tokenizer, before, answer))
    result = exam(oracle(tokenizer, spoken), tokenizer, ["addition"])
    assert result.scores["addition"] == Score(ITEMS - 1, ITEMS)
    [failure] = result.failures
    assert failure.prompt == changed.messages[-2]["content"]
    assert failure.expected == changed.messages[-1]["content"]
    assert failure.got == "I think it is 7."
    assert failure.reasoning == changed.messages[-1]["reasoning_content"]
    assert failure.finish_reason == "stop"


def test_an_answer_that_is_cut_is_wrong_even_if_it_was_said(tokenizer):
    [example] = examples("addition", items=1)
    [ids] = transcripts(tokenizer, example)
    length = len(ids) - len(render_prompt(tokenizer, tasks.asked(example)).ids)
    for max_tokens, right in ((length - 1, 0), (length, 1)):
        options = {"items": 1, "max_tokens": max_tokens}
        result = exam(knows(tokenizer), tokenizer, ["addition"], **options)
        assert result.scores["addition"] == Score(right, 1)
        assert result.generated_tokens == max_tokens
        for failure in result.failures:
            assert failure.got == failure.expected and failure.finish_reason == "length"


def test_a_call_is_answered_by_its_tool_and_a_wrong_one_is_wrong(tokenizer):
    example = next(
        e
        for e in examples("tools", items=100)
        if "calculator(" in accuracy._as_text(e.messages) and len(e.messages) == 4
    )
    before, (call, result, answer) = tasks.asked(example), example.messages[1:]
    function = {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    other = call | {"tool_calls": [{"type": "function", "function": function}]}
    item = accuracy._Item(example, before)
    assert item.hear(Answer(other, [1, 2], "stop"))
    assert item.said[-1] == {"role": "tool", "content": "5"}
    assert not item.hear(Answer(answer, [3], "stop"))
    assert not item.right and item.generated_tokens == 3

    item = accuracy._Item(example, before)
    assert item.hear(Answer(call, [1], "stop"))
    assert item.said[-1] == result
    assert not item.hear(Answer(answer, [3], "stop"))
    assert item.right
    assert not accuracy._Item(example, before).hear(Answer(call, [1], "length"))
    assert accuracy._failure(item).got == accuracy._failure(item).expected


@pytest.mark.parametrize("arguments", ["{broken", {"expression": ["1"]}, {}])
def test_a_call_that_makes_no_sense_gets_an_error(tokenizer, arguments):
    function = {"name": "calculator", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    item = accuracy._Item(examples("tools")[0], [{"role": "user", "content": "?"}])
    assert item.hear(Answer(message, [1], "stop"))
    assert item.said[-1]["content"].startswith("error")
    assert not item.right


def test_whoever_calls_for_ever_is_stopped(tokenizer):
    example = examples("tools")[0]
    function = {"name": "calculator", "arguments": {"expression": "1 + 1"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    said, spoken = tasks.asked(example), []
    for _ in range(10):
        spoken.append(transcript(tokenizer, said, call, tools=example.tools))
        said = [*said, call, {"role": "tool", "content": "2"}]
    result = exam(oracle(tokenizer, spoken), tokenizer, ["tools"], items=1)
    assert result.scores["tools"] == Score(0, 1)
    assert result.failures[0].got.count("calculator") == accuracy.TOOL_ROUNDS == 4


def test_items_depend_on_seed_and_family_alone(tokenizer):
    def asked(families, seed):
        result = exam(oracle(tokenizer, []), tokenizer, families, seed=seed, max_tokens=2)
        return {f.family: f.prompt for f in reversed(result.failures)}

    both = asked(["talk", "addition"], 1)
    assert both["addition"] == asked(["addition"], 1)["addition"]
    assert both["addition"] != asked(["addition"], 2)["addition"]
    assert both["addition"] == examples("addition", seed=1)[0].messages[-2]["content"]


def test_as_many_at_once_as_fit(tokenizer):
    asked = []

    def at_once(tokens):
        asked.append(tokens)
        return 3

    families = ["addition", "recall"]
    exam(oracle(tokenizer, []), tokenizer, families, at_once=at_once, max_tokens=2)
    lengths = [
        len(render_prompt(tokenizer, tasks.asked(e)).ids) for f in families for e in examples(f)
    ]
    assert max(asked) == max(lengths) + 2
    assert min(asked) < max(lengths) / 2


def test_a_family_that_does_not_exist():
    with pytest.raises(K3Error, match=r"no task 'sums'; there are addition, .+talk"):
        known_families(["addition", "sums"])
    assert known_families(["talk", "addition", "talk"]) == ["talk", "addition"]
    assert known_families([]) == list(tasks.ALL_FAMILIES)


def test_another_chat_format_is_refused(tokenizer):
    class Other:
        speaks_xtml = False

    with pytest.raises(UnsupportedError, match="chat format"):
        exam(oracle(tokenizer, []), Other(), ["addition"])


@pytest.mark.parametrize(
    ("right", "items", "low", "high"),
    [  # From the closed form, computed apart.
        (99, 100, 0.94554, 0.99823),
        (0, 10, 0, 0.27753),
        (10, 10, 0.72247, 1),
        (50, 100, 0.40383, 0.59617),
    ],
)
def test_the_interval_is_wilsons(right, items, low, high):
    score = Score(right, items)
    assert score.share == right / items
    assert score.interval == pytest.approx((low, high), abs=1e-4)


# Perplexity


def nats_of(model, ids):
    """What each id but the first costs, all read at once, in float64."""
    logits = np.array(model(mx.array(ids)[None])[0, :-1].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return (np.log(np.exp(logits).sum(-1)) - logits[range(len(ids) - 1), ids[1:]]).sum()


@pytest.mark.parametrize("window_tokens", [1, 7, 40, 41, 1000])
def test_perplexity_is_that_of_each_window_read_at_once(loaded, monkeypatch, window_tokens):
    monkeypatch.setattr("mlx_k3.evaluation.perplexity.PASS_TOKENS", 16)
    model, tokenizer = loaded
    text = "The river was calm, and 47 boats lay in the harbour. Ünïcode too: 月. "
    ids = tokenizer.encode(text * 3)[:82]
    assert len(ids) == 82
    done = []
    score = score_text(
        model, tokenizer.table, ids, window_tokens=window_tokens, progress=done.append
    )
    starts = range(0, 81, window_tokens)
    want = sum(nats_of(model, ids[start : start + window_tokens + 1]) for start in starts)
    assert score.nats == pytest.approx(want, rel=1e-5)
    assert score.tokens == sum(done) == 81
    assert score.perplexity == pytest.approx(math.exp(want / 81), rel=1e-4)
    text = b"".join(tokenizer.table.pieces[i] for i in ids[1:])
    assert score.bits_per_byte == pytest.approx(want / math.log(2) / len(text), rel=1e-5)


class Blank:
    """Thinks every one of 500 tokens as likely."""

    def make_cache(self):
        return []

    def __call__(self, ids, cache):
        return mx.zeros((*ids.shape, 500))


def test_whoever_knows_nothing_is_as_perplexed_as_there_are_tokens(tokenizer):
    score = score_text(Blank(), tokenizer.table, list(range(60, 90)), window_tokens=8)
    assert score.perplexity == pytest.approx(500, rel=1e-5)
