"""Commands on a model that is larger than the memory it gets."""

import io
import json
import sys
from contextlib import contextmanager

import pytest

from mlx_k3 import nano
from mlx_k3.chat.generation import stream_generate
from mlx_k3.chat.session import Session
from mlx_k3.cli import main, terminal
from mlx_k3.cli.chat import Conversation
from mlx_k3.cli.figures import footer
from mlx_k3.cli.loading import Loading, open_model
from mlx_k3.convert.stream import convert
from mlx_k3.errors import CheckpointError, UnsupportedError
from mlx_k3.experts import machine
from mlx_k3.experts import offload as offload_module
from mlx_k3.experts.lossy import Levers
from mlx_k3.experts.reader import ExpertReader
from mlx_k3.loader import load, plan_load

from .support.disks import FaultyDisk

LAYERS, TOP_K, EXPERTS = 4, 4, 128
PROMPT = ",".join(str(i) for i in range(7, 47))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("larger than memory") / "nano"
    convert(nano.path(), out, trunk="bf16")
    return out


@pytest.fixture(scope="module")
def plan(folder):
    return plan_load(folder, None)


@pytest.fixture
def budget(plan):
    """The number of bytes that leaves room for so many slots."""

    def of(slots: int) -> int:
        return plan.minimum_bytes + (slots - TOP_K) * plan.slot_bytes

    return of


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(nano, "cache_folder", lambda: tmp_path / "cache" / "mlx-k3")
    return tmp_path / "cache" / "mlx-k3"


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs mlx-k3 in this process; gives its exit code, standard output and error."""

    def run(*arguments, stdin: str = ""):
        monkeypatch.setattr(sys, "argv", ["mlx-k3", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def generate(command, folder):
    """``generate --json`` with greedy ids; gives the report."""

    def run(*options, ids=PROMPT, tokens=12):
        arguments = ("--ids", ids, "--max-tokens", tokens, "--json", *options)
        code, out, err = command("generate", folder, *arguments)
        assert code == 0, err
        return json.loads(out)

    return run


# What comes out.


@pytest.mark.parametrize("slots", [TOP_K, 2 * TOP_K, 3 * TOP_K * LAYERS])
def test_generate_gives_the_same_ids_as_in_memory(generate, plan, budget, slots):
    resident = generate()
    assert resident["experts"] is None
    for options in ((), ("--no-prefetch", "--policy", "lfu")):
        report = generate("--memory", budget(slots), *options)
        assert report["ids"] == resident["ids"]
        experts = report["experts"]
        assert (experts["slots"], experts["working_sets"]) == (slots, slots / (TOP_K * LAYERS))
        # Every expert is read whole, and a hit is what was not read.
        assert experts["demand_bytes"] % plan.slot_bytes == 0 < experts["demand_bytes"]
        assert experts["read_bytes"] == experts["demand_bytes"] + experts["prefetch_bytes"]
        needed = sum(experts[f"{kind}_bytes"] for kind in ("hit", "demand", "used_prefetch"))
        assert experts["hit_rate"] == experts["hit_bytes"] / needed
        assert 0 < experts["stall_seconds"] < experts["seconds"]
        assert experts["decode"]["seconds"] < experts["seconds"]
        assert (experts["dropped_share"], experts["dropped_experts"]) == (0, 0)
        if options:
            assert experts["prefetch_bytes"] == 0


def test_a_prompt_longer_than_a_step_of_mlx_lms_goes_through_at_once(folder, budget):
    model, _ = load(folder, memory=budget(16), context_tokens=4096)
    seen, model.prompt_tokens = [], 3000
    model.offload.store.heat = _Calls(seen)
    list(stream_generate(model, None, [i % 1000 for i in range(2600)], max_tokens=1))
    model.offload.close()
    # The prompt, its last token, and mlx-lm's one token ahead.
    assert seen == [2599] * LAYERS + [1] * (2 * LAYERS)


class _Calls:
    """Stands in for heat: notes how many tokens each layer sees at once."""

    def __init__(self, seen: list[int]):
        self._seen = seen

    def add(self, layer, ids):
        self._seen.append(ids.size // TOP_K)


def test_usage_is_of_one_answer(folder, budget):
    with open_model(folder, Loading(memory=str(budget(8)))) as (model, tokenizer):
        before = model.offload.usage()
        session = Session(model, tokenizer)
        replies = [[*session.turn(q, max_tokens=5)][-1].reply for q in ("Hello", "Again")]
        after = model.offload.usage()
        parts = [reply.usage for reply in replies]
        assert sum(part.demand_bytes for part in parts) == after.demand_bytes - before.demand_bytes
        assert parts[1].demand_bytes < after.demand_bytes - before.demand_bytes
        for reply in replies:
            assert reply.decode_usage.demand_bytes < reply.usage.demand_bytes


def test_a_trace_is_recorded_and_read(command, generate, budget, tmp_path):
    file = tmp_path / "run.trace"
    report = generate("--memory", budget(16), "--trace", file)
    experts = report["experts"]
    code, out, _ = command("trace", file, "--json")
    facts = json.loads(out)
    assert (code, facts["complete"], facts["model"]["slots"]) == (0, True, 16)
    # mlx-lm reads the prompt but for its last token, then one at a time, and one ahead.
    steps = len(report["ids"]) + 1
    assert (facts["prefill"]["tokens"], facts["decode"]["tokens"]) == (39, steps)
    recorded = sum(facts[phase]["demand_bytes"] for phase in ("prefill", "decode"))
    assert recorded == experts["demand_bytes"]


def test_json_is_all_that_standard_output_gets(command, folder, budget, monkeypatch):
    def chatty(*arguments, **options):
        print("[WARNING] this model is large")
        yield from stream_generate(*arguments, **options)

    monkeypatch.setattr("mlx_k3.chat.generation.stream_generate", chatty)
    options = ("--ids", "1,2", "--max-tokens", 2, "--memory", budget(8), "--json")
    _, out, err = command("generate", folder, *options)
    assert len(json.loads(out)["ids"]) == 2
    assert "[WARNING]" in err


# What fits.


def test_without_memory_a_model_too_large_is_read_on_demand_and_this_is_said(
    command, folder, budget, monkeypatch, generate
):
    resident = generate()
    monkeypatch.setattr(machine, "usable_memory_bytes", lambda: budget(40))
    monkeypatch.setattr(machine, "auto_budget_bytes", lambda: budget(20))
    code, out, err = command("generate", folder, "--ids", PROMPT, "--max-tokens", 12, "--json")
    report = json.loads(out)
    assert (code, report["experts"]["slots"], report["ids"]) == (0, 20, resident["ids"])
    assert err.count("\n") == 1 and "reading experts on demand" in err
    monkeypatch.setattr(machine, "auto_budget_bytes", lambda: 1000)
    code, _, err = command("generate", folder, "--ids", PROMPT)
    assert (code, "a memory budget of 1 KB is too little" in err) == (2, True)


def test_a_shorter_context_leaves_more_for_experts(generate, budget):
    assert generate("--memory", budget(64), "--context", "4k")["experts"]["slots"] == 64
    # Its cache is smaller than all experts of this small model.
    assert generate("--memory", budget(100), "--context", "512")["experts"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "lots"), "'lots' is not a size"),
        (("--memory", "0"), "a memory budget of 0 B is too little"),
        (("--memory", "1MB"), "give at least"),
        (("--context", "32kb"), "'32kb' is not a number of tokens"),
        (("--policy", "fifo"), "--policy fifo: there are lru and lfu"),
        (("--active-experts", "0"), "a token needs at least one"),
        (("--active-experts", "4"), "a token of this model has 4 experts"),
        (("--drop-missed", "1"), "is not a share"),
        (("--drop-missed", "0"), "drops nothing"),
        (("--policy", "lfu"), "--policy acts on experts that are read on demand"),
        (("--no-prefetch",), "--no-prefetch acts"),
        (("--active-experts", "2"), "--active-experts acts"),
        (("--drop-missed", "0.5"), "--drop-missed acts"),
        (("--trace", "x.trace"), "--trace acts"),
    ],
)
@pytest.mark.parametrize("name", ["generate", "chat"])
def test_bad_and_idle_options_are_refused_before_loading(
    command, folder, monkeypatch, name, options, message
):
    monkeypatch.setattr("mlx_k3.loader.assemble", None)
    prompt = ("--prompt", "x") if name == "generate" else ()
    code, out, err = command(name, folder, *prompt, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mlx-k3: ") and message in err


def test_a_trace_that_cannot_be_written_is_refused(command, folder, budget, tmp_path):
    options = ("--memory", budget(8), "--trace", tmp_path / "no" / "x.trace")
    code, _, err = command("generate", folder, "--ids", "1", *options)
    assert (code, err.count("\n"), "cannot record a trace" in err) == (2, 1, True)


def test_load_refuses_what_cannot_act(folder, budget):
    for options in ({"trace": "x.trace"}, {"levers": Levers(2)}):
        with pytest.raises(UnsupportedError, match="fits in memory as a whole"):
            load(folder, **options)
    with pytest.raises(UnsupportedError, match="there are lru and lfu"):
        load(folder, memory=budget(8), policy="fifo")


def test_generate_without_a_model_takes_the_bundled_one(command):
    code, out, err = command("generate", "--ids", "1,2,3", "--max-tokens", 2, "--json")
    assert (code, len(json.loads(out)["ids"])) == (0, 2)
    assert "this is the bundled nano model" in err
    code, _, err = command("generate")
    assert (code, "give one prompt" in err) == (2, True)


# What is left out.


def test_levers_say_what_they_dropped(command, folder, generate, budget):
    memory = ("--memory", budget(8))
    report = generate(*memory, "--active-experts", 2)
    experts = report["experts"]
    assert 0 < experts["dropped_share"] < 0.5
    # Two of four experts, in each layer, for 40 tokens of prompt and those of the answer.
    assert experts["dropped_experts"] == 2 * LAYERS * (40 + len(report["ids"]))
    options = ("--ids", PROMPT, "--max-tokens", 2, *memory)
    _, _, err = command("generate", folder, *options, "--drop-missed", 0.3)
    assert "of the experts' weight" in err and err.count("\n") == 1
    _, _, err = command("generate", folder, *options)
    assert err == ""
    lines = "Hello\n/stats\n"
    options = ("--max-tokens", 2, *memory, "--drop-missed", 0.3)
    _, out, err = command("chat", folder, *options, stdin=lines)
    assert "of the experts' weight" in err and "of the experts' weight" in out


def test_stats_and_footer_tell_of_reads_and_pool(command, folder, budget):
    options = ("--max-tokens", 4, "--memory", budget(8))
    _, out, _ = command("chat", folder, *options, stdin="Hello\n/stats\n")
    for part in ("experts: ", "hit rate ", "read ", "waited ", "8 slots (0.5 tokens' worth)"):
        assert part in out
    with open_model(folder, Loading(memory=str(budget(8)))) as (model, tokenizer):
        (*_, last) = stream_generate(model, tokenizer, "Hello", max_tokens=4)
        line = footer(last.reply, model.offload)
    figures = last.reply.decode_usage
    assert line.startswith(f"{last.reply.generation_tps:.3g} tokens/s, hit rate ")
    assert f"hit rate {100 * figures.hit_rate:.0f} %" in line or figures.hit_rate < 0.1
    assert "slots (0.5 tokens' worth)" in line and "dropped" not in line
    assert footer(last.reply, None) == f"{last.reply.generation_tps:.3g} tokens/s"


# What goes wrong.


@pytest.fixture
def faulty(monkeypatch):
    """Every reader from now on gets this disk."""
    disk = FaultyDisk()
    monkeypatch.setattr(offload_module, "ExpertReader", lambda: ExpertReader(disk=disk))
    return disk


def test_a_read_error_ends_the_answer_and_the_conversation_goes_on(folder, budget, faulty, capsys):
    with open_model(folder, Loading(memory=str(budget(8)))) as (model, tokenizer):
        session = Session(model, tokenizer)
        sampling = {"max_tokens": 6, "temp": 0.0, "top_p": 1.0}
        talk = Conversation(session, sampling, True, model.offload)

        def lines():
            yield "Hello"
            assert len(session.messages) == 2
            # Many reads fail at once, as when a drive is gone.
            now = len(faulty.reads)
            faulty.fail_at = set(range(now + 20, now + 60))
            yield "And you?"
            faulty.fail_at = set()
            # Nothing came of the question, so it is taken back.
            assert session.messages[-1]["role"] == "assistant"
            yield "And you?"

        talk.run(lines())
        messages, err = session.messages, capsys.readouterr().err
        # One line about it; the others say what an answer of six tokens says.
        [line] = [line for line in err.splitlines() if "failed: Input/output error" in line]
        assert line.endswith("check the drive")
        assert [m["content"] for m in messages if m["role"] == "user"] == ["Hello", "And you?"]

        fresh = Session(model, tokenizer)
        for question in ("Hello", "And you?"):
            list(fresh.turn(question, **sampling))
        assert fresh.messages == messages


def test_a_read_error_ends_generate_with_exit_code_2(command, folder, budget, faulty, cache):
    faulty.fail_at = set(range(30, 1000))
    code, out, err = command("generate", folder, "--ids", PROMPT, "--memory", budget(8))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "check the drive" in err
    assert not (cache / "heat").exists()


def test_ctrl_c_between_layers_drops_the_cache_and_keeps_the_conversation(folder, budget):
    with open_model(folder, Loading(memory=str(budget(8)))) as (model, tokenizer):
        session = Session(model, tokenizer)
        list(session.turn("Hello", max_tokens=3))
        calls = []

        def stop(done, total):
            calls.append(done)
            if len(calls) == 4:  # the beginning, and before the third layer of experts
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(session.turn("And you?", max_tokens=3, prompt_progress_callback=stop))
        assert calls[2] < calls[3]
        assert session._cache is None and len(session.messages) == 2
        got = [*session.turn("And you?", max_tokens=3)][-1].reply
        fresh = Session(model, tokenizer)
        list(fresh.turn("Hello", max_tokens=3))
        assert got.ids == [*fresh.turn("And you?", max_tokens=3)][-1].reply.ids


def test_progress_moves_with_every_layer(folder, budget):
    model, _ = load(folder, memory=budget(8))
    seen = []
    list(
        stream_generate(
            model,
            None,
            list(range(101)),
            max_tokens=2,
            prompt_progress_callback=lambda done, total: seen.append((done, total)),
        )
    )
    model.offload.close()
    done = [done for done, _ in seen]
    assert done[:6] == [0, 0, 25, 50, 75, 100]
    assert done == sorted(done) and done[-1] == 101 and done.count(101) == 1
    assert {total for _, total in seen} == {101}
    assert model.offload.store.on_layer is None


# What is restored.


@pytest.fixture
def wired(monkeypatch):
    """Notes when memory begins and ends to be wired."""
    notes = []

    @contextmanager
    def wired(nbytes):
        notes.append(nbytes)
        try:
            yield
        finally:
            notes.append("restored")

    monkeypatch.setattr(machine, "wired", wired)
    return notes


def test_memory_is_wired_while_a_model_is_open_whatever_happens(folder, budget, wired, plan):
    how = Loading(memory=str(budget(8)))
    total = plan_load(folder, budget(8)).total_bytes
    for error in (None, KeyboardInterrupt, CheckpointError):
        try:
            with open_model(folder, how) as (model, _):
                threads = [*model.offload.store.reader._threads]
                if error:
                    raise error("in the middle of an answer")
        except (KeyboardInterrupt, CheckpointError):
            assert error
        assert not any(thread.is_alive() for thread in threads)
    assert wired == [total, "restored"] * 3


def test_memory_is_restored_when_loading_fails(folder, budget, wired, monkeypatch):
    def fail(*_, **__):
        raise CheckpointError("damaged")

    monkeypatch.setattr("mlx_k3.loader.assemble", fail)
    with pytest.raises(CheckpointError), open_model(folder, Loading(memory=str(budget(8)))):
        pass
    assert wired[1:] == ["restored"]


# What is remembered.


def test_hot_experts_are_read_ahead_the_next_time(generate, folder, budget, cache, plan):
    options = ("--memory", budget(40), "--no-prefetch")
    first = generate(*options)
    assert first["experts"]["prefetch_bytes"] == 0
    [file] = (cache / "heat").iterdir()
    assert file.stat().st_size < 1000
    with open_model(folder, Loading(memory=str(budget(40)))) as (model, tokenizer):
        store, hottest = model.offload.store, model.offload.store.heat.hottest(30)
        for load_ in [*store._loads.values()]:
            assert load_.ticket.wait(30)
        # Three quarters of the slots; more were used.
        assert len(hottest) == 30 and [*store._loads] == hottest[::-1]
        (*_, last) = stream_generate(model, tokenizer, [7, 8, 9], max_tokens=2)
        assert last.reply.usage.prefetch_bytes >= 30 * plan.slot_bytes
    again = generate(*options)
    assert again["ids"] == first["ids"]


def test_a_cache_that_cannot_be_written_is_no_error(command, folder, budget, cache):
    cache.mkdir(parents=True)
    (cache / "heat").write_text("in the way")
    options = ("--ids", "1,2", "--max-tokens", 1, "--memory", budget(8), "--json")
    code, out, err = command("generate", folder, *options)
    assert (code, len(json.loads(out)["ids"])) == (0, 1)
    assert "could not be saved" in err


# What a terminal shows.


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_prompt_has_a_bar_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "BAR_AFTER_SECONDS", 0.0)
    for screen, shown in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        with terminal.PromptBar() as bar:
            for done in (0, 100, 200, 400):
                bar.update(done, 400)
        assert ("reading the prompt" in screen.getvalue()) == shown
    monkeypatch.setattr(terminal, "BAR_AFTER_SECONDS", 60.0)
    quick = _Terminal()
    monkeypatch.setattr(sys, "stderr", quick)
    with terminal.PromptBar() as bar:
        for done in (0, 200, 400):
            bar.update(done, 400)
    assert quick.getvalue() == ""


def test_a_terminal_is_told_what_the_plan_gives_and_what_an_answer_cost(
    folder, budget, monkeypatch, command
):
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "200")
    options = ("--ids", PROMPT, "--max-tokens", 3)
    command("generate", folder, *options, "--memory", budget(8))
    for part in ("8 slots for 128 experts", "0.5 tokens' worth", " tokens/s, hit rate "):
        assert part in screen.getvalue()
    screen.truncate(0)
    command("generate", folder, *options)
    assert "all experts in memory" in screen.getvalue()
    assert "tokens/s" in screen.getvalue() and "hit rate" not in screen.getvalue()
