"""How many tokens each turn of a conversation reads, and that it makes no difference to answers."""

import json
import shutil
import time

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache

from mlx_k3 import nano
from mlx_k3.chat import xtml
from mlx_k3.chat.cache_identity import model_identity
from mlx_k3.chat.cache_parts import state_arrays
from mlx_k3.chat.generation import generate
from mlx_k3.chat.plain import IdsOnly
from mlx_k3.chat.prompt_cache import PromptCache, open_prompt_cache, wanted_bytes
from mlx_k3.chat.reading import stops, user_turns
from mlx_k3.chat.session import Session
from mlx_k3.cli.loading import Loading, open_model
from mlx_k3.cli.plan import trunk_as
from mlx_k3.cli.prompts import leave_room, open_prompts
from mlx_k3.config import K3Config
from mlx_k3.errors import K3Error
from mlx_k3.experts import machine
from mlx_k3.experts.budget import plan_memory
from mlx_k3.experts.lossy import Levers
from mlx_k3.loader import assemble, load, plan_load
from mlx_k3.models.blocks import token_blocks
from mlx_k3.models.state import RecordedState

from .conftest import REPOSITORY
from .support.models import convert_golden
from .support.offload import WatchedDisk, offloaded, prompt
from .support.prompts import Counting, answer

END = 7  # a stop token, for texts that are only ids


@pytest.fixture(scope="module")
def loaded():
    return load(nano.converted(), dtype="float32")


@pytest.fixture
def model(loaded):
    return Counting(loaded[0])


@pytest.fixture
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def tiny_folder(golden, tmp_path_factory):
    return convert_golden(golden, "tiny-text", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return assemble(tiny_folder, "float32")


@pytest.fixture
def prompts(loaded, tmp_path):
    return kept_in(tmp_path, loaded[0])


def kept_in(folder, model, **options) -> PromptCache:
    return PromptCache(model, model_identity(nano.converted(), model), folder=folder, **options)


def ask(session: Session, text, tokens: int = 30):
    """An answer by the model itself; its reply."""
    return list(session.turn(text, max_tokens=tokens))[-1].reply


def fresh(session: Session, tokens: int = 30) -> list[int]:
    """What a model that has read nothing before would answer to the session's last prompt."""
    session = without_answer(session)
    return generate(session._model, None, session._prompt(), max_tokens=tokens)


def without_answer(session: Session) -> Session:
    copy = Session(session._model, session._tokenizer, system=session.system)
    copy._settings = session._settings
    copy._messages = session.messages[:-1]
    copy._generated = {i: ids for i, ids in session._generated.items() if i < len(copy._messages)}
    return copy


def assert_answers_as_if_fresh(session: Session, reply) -> None:
    ids = fresh(session, len(reply.ids))[: len(reply.ids)]
    assert reply.ids == ids


# Turns.


def test_the_second_turn_of_a_long_conversation_reads_only_what_is_new(model, tokenizer, prompts):
    session = Session(model, tokenizer, prompts=prompts)
    text = "The blue box is in the cellar. " * 250
    first = ask(session, text + "Where is the blue box?")
    assert first.prompt_tokens > 2000
    assert model.read(len(first.ids)) == first.prompt_tokens
    second = ask(session, "And what is 3 + 4?")
    assert second.cached_tokens == first.prompt_tokens + len(first.ids)
    assert model.read(len(second.ids)) == second.prompt_tokens - second.cached_tokens < 60
    assert_answers_as_if_fresh(session, second)


def test_a_restarted_process_reads_only_what_is_new(model, tokenizer, prompts, tmp_path):
    session = Session(model, tokenizer, system="Be brief.", prompts=prompts)
    reply = ask(session, "The red key is in box 7. " * 60)
    session.save(tmp_path / "talk.json")
    for again in range(2):
        other = Session(model, tokenizer, prompts=kept_in(tmp_path, model))
        other.load(tmp_path / "talk.json")
        model.calls = []
        second = ask(other, "Where is it?")
        # The second time all but the last token of the whole prompt is known.
        known = second.prompt_tokens - 1 if again else reply.prompt_tokens + len(reply.ids)
        assert second.cached_tokens == known
        assert model.read(len(second.ids)) == second.prompt_tokens - known
        assert_answers_as_if_fresh(other, second)


def test_an_answer_is_given_again_from_the_end_of_its_prompt(model, tokenizer, prompts):
    session = Session(model, tokenizer, prompts=prompts)
    ask(session, "What is 12 + 30?")
    reply = ask(session, "And 5 + 5?")
    model.calls = []
    again = ask(session, session.take_back())
    assert again.ids == reply.ids
    assert again.cached_tokens == again.prompt_tokens - 1
    assert model.read(len(again.ids)) == 1


def test_an_edited_message_is_read_from_where_it_begins(model, tokenizer, prompts):
    session = Session(model, tokenizer, system="Be brief.", prompts=prompts)
    ask(session, "What is 12 + 30?")
    ask(session, "And 5 + 5?")
    session.take_back()
    model.calls = []
    reply = ask(session, "And 6 + 7?")
    (*_, begins) = user_turns(session._prompt(), tokenizer)
    assert reply.cached_tokens == begins
    assert model.read(len(reply.ids)) == reply.prompt_tokens - begins
    assert_answers_as_if_fresh(session, reply)


def test_a_conversation_that_was_never_seen_is_kept_at_its_messages(model, tokenizer, prompts):
    """A client sends all messages at once, then edits the last, then begins anew."""
    session = Session(model, tokenizer, system="Be brief.")
    history = [
        {"role": "user", "content": "Where is the cat? " * 20},
        {"role": "assistant", "content": "In the garden."},
    ]

    def ids_of(*messages):
        session._messages = list(messages)
        return session._prompt()

    ids = ids_of(*history, {"role": "user", "content": "Sure?"})
    answer(model, ids, prompts, tokenizer=tokenizer)
    first, last = user_turns(ids, tokenizer)
    edited = ids_of(*history, {"role": "user", "content": "Really?"})
    assert len(edited) - len(prompts.fetch(edited)[1]) == last > 200
    anew = ids_of({"role": "user", "content": "What is 3 + 4?"})
    assert len(anew) - len(prompts.fetch(anew)[1]) == first > 20


def test_two_conversations_share_their_instructions(model, tokenizer, prompts):
    system = "You answer in one word. " * 40
    ask(Session(model, tokenizer, system=system, prompts=prompts), "What is 1 + 1?")
    other = Session(model, tokenizer, system=system, prompts=prompts)
    model.calls = []
    reply = ask(other, "Where is Oslo?")
    assert reply.cached_tokens == user_turns(other._prompt(), tokenizer)[0] > 200
    assert model.read(len(reply.ids)) == reply.prompt_tokens - reply.cached_tokens
    assert_answers_as_if_fresh(other, reply)


@pytest.mark.parametrize("after", [1, 2, 9])
def test_a_stopped_answer_is_gone_on_from(model, tokenizer, prompts, after):
    session = Session(model, tokenizer, prompts=prompts)
    turn = session.turn("Count to five.", max_tokens=40)
    for _ in range(after):
        next(turn)
    turn.close()
    kept = kept_in(prompts._tiers[1].folder, model)
    other = Session(model, tokenizer, prompts=kept)
    other._messages, other._generated = session.messages, dict(session._generated)
    reply = ask(other, "Go on.")
    opening = len(xtml.encode(xtml.reply_opening(True), tokenizer))
    start = len(session._prompt()) - opening
    assert 0 < reply.prompt_tokens - reply.cached_tokens <= start
    assert reply.cached_tokens > 60
    assert_answers_as_if_fresh(other, reply)


def test_an_interrupted_prompt_keeps_the_steps_that_are_done(tiny, tmp_path):
    ids = prompt(300)[0].tolist()
    prompts = PromptCache(tiny, "a" * 64, folder=tmp_path)

    def stop(done, total):
        if done >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(tiny, ids, prompts, prefill_step_size=50, prompt_progress_callback=stop)
    model = Counting(tiny)
    _, generated = answer(model, ids, PromptCache(tiny, "a" * 64, folder=tmp_path))
    assert model.calls == [199, 1, 1, 1, 1, 1]
    assert generated == answer(tiny, ids, None)[1]


def test_a_prompt_that_takes_long_is_kept_now_and_then(tiny, tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    prompts = PromptCache(tiny, "a" * 64, folder=tmp_path)
    ids, seen = prompt(300)[0].tolist(), []

    def note(done, total):
        later = PromptCache(tiny, "a" * 64, folder=tmp_path)  # as after a crash
        seen.append((later.usage().disk_states, done - 300 + len(later.fetch(ids)[1])))

    answer(tiny, ids, prompts, prefill_step_size=25, prompt_progress_callback=note)
    # Every other step takes it past a minute. A later state takes the place of one before.
    assert max(states for states, _ in seen) == 1
    assert max(behind for _, behind in seen[1:-2]) <= 50
    assert len(prompts.states_of([*ids, 0])) == 1  # the prompt's end


def test_tokens_of_one_piece_are_read_in_one_piece(tiny, tmp_path):
    model = Counting(tiny)
    ids = [i if i != END else 8 for i in prompt(60)[0].tolist()]
    ids[10] = ids[30] = END
    answer(model, ids, PromptCache(model, "a" * 64), tokens=3, stop_ids=[END])
    assert model.calls == [59, 1, 1, 1, 1]


def test_experts_on_demand_are_read_once_for_a_prompt_with_stops(tiny_folder, tmp_path):
    ids = [i if i != END else 8 for i in prompt(200)[0].tolist()]
    with_stops = [END if i in (20, 90) else t for i, t in enumerate(ids)]
    reads = []
    for text in (ids, with_stops):
        disk = WatchedDisk()
        with offloaded(tiny_folder, 16, disk) as model:
            prompts = PromptCache(model, "a" * 64)
            answer(model, text, prompts, tokens=1, stop_ids=[END], prefill_step_size=1000)
            assert len(prompts.states_of([*text, 0])) == (1 if text is ids else 3)
            reads.append(len(disk.reads))
    assert reads[1] < 1.2 * reads[0]


# What is kept of a prompt.


def test_states_are_kept_where_people_come_back_to(tokenizer):
    session = Session(None, tokenizer, system="s")
    session._messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": 'role="user" <|open|>message role="user"'},
        {"role": "assistant", "content": "2"},
        {"role": "user", "name": "Ada", "content": "three"},
    ]
    ids = session._prompt()
    turns = user_turns(ids, tokenizer)
    assert len(turns) == 3
    assert all(tokenizer.decode(ids[turn:]).startswith("<|open|>message role=") for turn in turns)
    assert stops(ids, 0, tokenizer) == [len(ids) - 1, turns[2], turns[0]]
    assert stops(ids, turns[1], tokenizer) == [len(ids) - 1, turns[2]]
    assert stops(ids, len(ids) - 2, tokenizer) == [len(ids) - 1]
    assert stops(ids, len(ids) - 1, tokenizer) == []


def test_long_prompts_are_kept_at_growing_distances_from_the_end():
    places = stops([5] * 100_001, 0, IdsOnly())
    assert places == [100_000, 99_328, 95_744, 67_072]
    assert places == [100_000, *((100_000 - d) // 512 * 512 for d in (512, 4096, 32768))]
    assert stops([5] * 100_001, 99_000, IdsOnly()) == [100_000, 99_328]
    assert stops([5] * 400, 0, IdsOnly()) == [399]
    # Not close to another place that is kept anyway.
    ids = [5] * 2000
    ids[1299] = END
    assert stops(ids, 0, IdsOnly([END])) == [1999, 1300]


def test_blocks_end_at_cuts():
    assert [(b.start, b.stop) for b in token_blocks(1100, [3, 600])] == [
        (0, 3), (3, 515), (515, 600), (600, 1100)
    ]  # fmt: skip


@pytest.mark.parametrize("places", [[1], [7, 64], [100, 128, 299], [5, 512, 513, 700]])
def test_a_recorded_state_is_that_of_a_text_that_ends_there(tiny, places):
    ids = prompt(800)
    cache = [
        RecordedState(c, 0, places) if isinstance(c, ArraysCache) else c for c in tiny.make_cache()
    ]
    logits = tiny(ids, cache=cache)
    assert mx.allclose(logits, tiny(ids), atol=1e-3)
    for place in places:
        at = state_arrays([c.at(place) if isinstance(c, RecordedState) else c for c in cache])
        alone = tiny.make_cache()
        mx.eval(tiny(ids[:, :place], cache=alone))
        wanted = state_arrays(alone)
        assert at.keys() == wanted.keys()
        for name, x in wanted.items():
            assert mx.allclose(at[name], x, atol=1e-4), name


def test_going_on_from_a_kept_state_gives_the_same_bits(tiny, tmp_path):
    """In memory and from the disk, with the text read in the same pieces."""
    ids = prompt(1400)
    live = tiny.make_cache()
    mx.eval(tiny(ids[:, :1100], cache=live))
    for options in ({}, {"folder": tmp_path, "memory_bytes": 0}):
        prompts = PromptCache(tiny, "a" * 64, **options)
        prompts.store(ids[0, :1100].tolist(), live)
        fetched, rest = prompts.fetch(ids[0].tolist())
        assert len(rest) == 300
        copy, _ = prompts.fetch(ids[0].tolist())
        assert mx.array_equal(tiny(ids[:, 1100:], cache=fetched), tiny(ids[:, 1100:], cache=copy))
        fetched, _ = prompts.fetch(ids[0].tolist())
        one = [tiny(ids[:, i : i + 1], cache=fetched) for i in range(1100, 1110)]
        before = prompts.fetch(ids[0].tolist())[0]
        two = [tiny(ids[:, i : i + 1], cache=before) for i in range(1100, 1110)]
        assert mx.array_equal(mx.concatenate(one), mx.concatenate(two))
    wanted = tiny(ids[:, 1100:], cache=live)
    fetched, _ = prompts.fetch(ids[0].tolist())
    assert mx.array_equal(tiny(ids[:, 1100:], cache=fetched), wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_latents_are_kept_as_they_are(tiny_folder, tmp_path, bits):
    model, ids = assemble(tiny_folder, "float32"), prompt(700)
    plain = model_identity(tiny_folder, model)
    model.kv_bits = bits
    assert model_identity(tiny_folder, model) != plain
    live = model.make_cache()
    mx.eval(model(ids[:, :650], cache=live))
    PromptCache(model, "a" * 64, folder=tmp_path).store(ids[0, :650].tolist(), live)
    fetched, rest = PromptCache(model, "a" * 64, folder=tmp_path).fetch(ids[0].tolist())
    assert len(rest) == 50
    wanted = model(ids[:, 650:], cache=live)
    assert mx.array_equal(model(ids[:, 650:], cache=fetched), wanted)


def test_caches_of_batches_are_kept_and_gone_on_from(tiny):
    """What mlx-lm's batched generation hands over, and takes."""
    texts = [prompt(n)[0].tolist() for n in (30, 700)]

    def batched(new, caches=None, known=None):
        generator = BatchGenerator(tiny, max_tokens=5)
        uids = generator.insert(new, caches=caches, all_tokens=known)
        tokens, ended = {uid: [] for uid in uids}, []
        while len(ended) < len(uids):
            for response in generator.next_generated():
                tokens[response.uid].append(response.token)
                ended += [response] if response.finish_reason else []
        return [*tokens.values()], ended

    prompts = PromptCache(tiny, "a" * 64)
    _, ended = batched(texts)
    for response in ended:
        prompts.store(response.all_tokens, response.prompt_cache)
    longer = sorted([*response.all_tokens, 11, 12] for response in ended)
    fetched = [prompts.fetch(ids) for ids in longer]
    assert [rest for _, rest in fetched] == [[11, 12]] * 2
    known = [ids[:-2] for ids in longer]
    answers, _ = batched([[11, 12]] * 2, [cache for cache, _ in fetched], known)
    assert answers == [generate(tiny, None, ids, max_tokens=5) for ids in longer]


# Whose states they are.


def test_the_identity_is_of_weights_precision_and_levers(tiny_folder, tmp_path):
    def identity(folder=tiny_folder, dtype=None, **options):
        model = assemble(folder, dtype, **options)
        try:
            return model_identity(folder, model)
        finally:
            if model.offload:
                model.offload.close()

    same = identity()
    assert same == identity() and len(same) == 64
    others = {identity(dtype="float16"), identity(slots=8, levers=Levers(2))}
    # An offloaded model computes what one in memory does.
    assert identity(slots=8) == same
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    assert identity(copy) == same
    manifest = json.loads((copy / "mlx_k3.json").read_text())
    name = next(name for name in manifest["files"] if "trunk" in name)
    manifest["files"][name]["sha256"] = "0" * 64
    (copy / "mlx_k3.json").write_text(json.dumps(manifest))
    others.add(identity(copy))
    (copy / "mlx_k3.json").unlink()
    others.add(identity(copy))
    assert len(others | {same}) == 5


def test_default_sizes_follow_the_memory_plan(loaded, tmp_path):
    model = loaded[0]
    prompts = open_prompt_cache(nano.converted(), model, kept_in=tmp_path / "prompts")
    memory, disk = (tier.tree.limit_bytes for tier in prompts._tiers)
    assert memory == 4 * model.plan.state_bytes + model.plan.cache_bytes
    assert 0 < disk <= 10**9
    answer(model, [5] * 20, prompts)
    assert prompts.usage().disk_states == prompts.usage().memory_states == 2
    only = open_prompt_cache(nano.converted(), model, memory_bytes=1)
    assert [tier.tree.limit_bytes for tier in only._tiers] == [1]


def test_memory_for_prompts_is_part_of_a_command_s_budget(tiny_folder):
    whole = plan_load(tiny_folder, None)
    state, wanted, resident = whole.state_bytes, wanted_bytes(whole), whole.resident_bytes
    assert wanted == 4 * state + whole.cache_bytes

    def room(memory_bytes):
        left, kept = leave_room(plan_load(tiny_folder, memory_bytes), memory_bytes)
        assert left + kept == memory_bytes
        return kept

    # All experts fit: what is left beside them, if that is a state at least.
    assert room(resident + 2 * wanted) == wanted
    assert room(resident + state) == state
    assert room(resident + state - 1) == room(resident) == 0


def test_the_real_model_leaves_a_sixteenth_for_prompts(monkeypatch):
    config = K3Config.from_file(REPOSITORY / "mlx_k3/experts/kimi-k3-config.json")
    monkeypatch.setattr(machine, "usable_memory_bytes", lambda: 96 * 10**9)

    def room(memory_bytes):
        plan = plan_memory(
            config, trunk_as(config, "q4"), slot_bytes=17_547_264, context_tokens=4096,
            budget_bytes=memory_bytes, device="metal",
        )  # fmt: skip
        return plan, *leave_room(plan, memory_bytes)

    plan, left, kept = room(64 * 10**9)
    assert kept == (64 * 10**9 - plan.minimum_bytes) // 16 == 64 * 10**9 - left
    assert 3 * plan.state_bytes < kept < wanted_bytes(plan)
    plan, left, kept = room(plan.minimum_bytes + 16 * plan.state_bytes - 16)
    assert kept == 0
    # More than the machine can spare is not counted on.
    plan, left, kept = room(10**12)
    assert left + kept == 96 * 10**9 and kept == wanted_bytes(plan)


def test_a_model_opened_to_keep_prompts_stays_within_the_budget(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(nano, "cache_folder", lambda: tmp_path)
    budget = plan_load(tiny_folder, None).resident_bytes + 10**7
    how = Loading(memory=str(budget))
    with open_model(tiny_folder, how, keeps_prompts=True) as (model, _):
        assert model.plan.total_bytes + model.kept_bytes <= budget
        prompts = open_prompts(tiny_folder, model)
        answer(model, [5] * 20, prompts)
        assert prompts.usage().disk_states == prompts.usage().memory_states == 2
        assert {file.parent for file in tmp_path.rglob("*.safetensors")} == {tmp_path / "prompts"}
    with open_model(tiny_folder, how) as (model, _):
        assert model.kept_bytes == 0


# Taking back.


def test_what_was_asked_last_is_taken_back(model, tokenizer, prompts):
    session = Session(model, tokenizer, prompts=prompts)
    with pytest.raises(K3Error, match="nothing has been asked"):
        session.take_back()
    ask(session, "One?", 3)
    ask(session, "Two?", 3)
    assert session.take_back() == [{"role": "user", "content": "Two?"}]
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
    results = [{"role": "tool", "name": "f", "content": c} for c in "ab"]
    ask(session, results, 3)
    assert session.take_back() == results
    assert session.take_back() == [{"role": "user", "content": "One?"}]
    assert session.messages == []
    reply = ask(session, "Two?", 3)
    assert reply.cached_tokens == user_turns(session._prompt(), tokenizer)[0] > 0
