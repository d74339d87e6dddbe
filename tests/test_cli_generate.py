"""``mlx-k3 generate`` from its arguments to its output and exit code."""

import io
import json
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_k3 import nano
from mlx_k3.cli import main
from mlx_k3.convert.stream import convert
from mlx_k3.loader import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("a model's folder") / "nano"
    convert(nano.path(), out, trunk="bf16")
    return out


@pytest.fixture
def generate(monkeypatch, capsys):
    """Runs the command in this process; gives its exit code, standard output and error."""

    def run(*arguments, stdin: str = ""):
        monkeypatch.setattr(sys, "argv", ["mlx-k3", "generate", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_ids_are_continued_greedily_with_and_without_a_tokenizer(generate, folder, tmp_path):
    model, tokenizer = load(folder)
    wanted = [t for t, _ in generate_step(mx.array([1, 2, 3]), model, max_tokens=6)]
    code, out, _ = generate(folder, "--ids", "1, 2,3", "--max-tokens", 6, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["ids"], report["text"]) == (wanted, tokenizer.decode(wanted))
    assert (report["finish_reason"], report["prompt_tokens"]) == ("length", 3)
    assert report["generated_tokens"] == 6
    assert min(report["prompt_tps"], report["decode_tps"], report["peak_memory_bytes"]) > 0

    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    code, out, _ = generate(bare, "--ids", "1,2,3", "--max-tokens", 6)
    assert (code, out) == (0, ",".join(map(str, wanted)) + "\n")
    code, out, _ = generate(bare, "--ids", "1,2,3", "--max-tokens", 6, "--json")
    assert (json.loads(out)["ids"], json.loads(out)["text"]) == (wanted, None)


def test_only_the_answer_goes_to_standard_output(generate, folder):
    # This model's noise never opens a response: all of it is thinking.
    arguments = (folder, "--prompt", "Hello", "--max-tokens", 5)
    code, out, _ = generate(*arguments, "--json")
    report = json.loads(out)
    assert (report["text"], report["finish_reason"]) == ("", "length")
    assert report["reasoning"]
    code, out, err = generate(*arguments)
    assert (code, out) == (0, "")
    assert "still thinking after 5 tokens; raise --max-tokens" in err

    _, out, _ = generate(*arguments, "--no-thinking", "--json")
    report = json.loads(out)
    assert (report["reasoning"], bool(report["text"])) == ("", True)
    _, out, err = generate(*arguments, "--no-thinking")
    assert (out, err) == (report["text"] + "\n", "")


def test_a_prompt_from_standard_input_equals_one_given(generate, folder):
    options = ("--max-tokens", 4, "--json", "--system", "Be brief.")
    given = json.loads(generate(folder, "--prompt", "Hello\nyou", *options)[1])
    read = json.loads(generate(folder, "--prompt", "-", *options, stdin="Hello\nyou")[1])
    assert read["ids"] == given["ids"]
    without = json.loads(generate(folder, "--prompt", "Hello\nyou", *options[:3])[1])
    assert without["prompt_tokens"] < given["prompt_tokens"]


def test_raw_continues_the_text_itself(generate, folder):
    _, tokenizer = load(folder)
    ids = ",".join(map(str, tokenizer.encode("Once <|open|>")))
    by_ids = json.loads(generate(folder, "--ids", ids, "--max-tokens", 4, "--json")[1])
    raw = generate(folder, "--raw", "--prompt", "Once <|open|>", "--max-tokens", 4, "--json")
    assert json.loads(raw[1])["ids"] == by_ids["ids"]


def test_sampling_depends_on_the_seed_alone(generate, folder):
    options = ("--ids", "5,6", "--max-tokens", 12, "--json", "--temp", 3, "--top-p", 0.99)
    first, again, other = (
        json.loads(generate(folder, *options, "--seed", seed)[1])["ids"] for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one prompt"),
        (("--prompt", "x", "--ids", "1"), "give one prompt"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", " \n"), "the prompt is empty"),
        (("--prompt", "-"), "the prompt is empty"),
        (("--ids", ""), "are not numbers"),
        (("--ids", "1,x"), "are not numbers"),
        (("--ids", "1,1792"), "1792 is outside the vocabulary, 0 to 1791"),
        (("--ids", "-1"), "-1 is outside the vocabulary"),
        (("--ids", "1", "--system", "s"), "--system belongs to the chat format"),
        (("--prompt", "x", "--raw", "--no-thinking"), "--no-thinking belongs"),
        (("--prompt", "x", "--max-tokens", "0"), "max_tokens is 0"),
        (("--prompt", "x", "--temp", "-1"), "temperature is -1.0"),
        (("--prompt", "x", "--top-p", "2"), "top_p is 2.0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(generate, folder, arguments, message):
    code, out, err = generate(folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mlx-k3: ") and err.count("\n") == 1
    assert message in err


def test_a_folder_that_is_no_model_is_one_line_and_exit_code_2(generate, folder, tmp_path):
    for path in (tmp_path, tmp_path / "missing", folder / "config.json" / "x"):
        code, _, err = generate(path, "--prompt", "x")
        assert (code, err.count("\n")) == (2, 1)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "tokenizer.json").write_text("{")
    code, _, err = generate(broken, "--prompt", "x")
    assert (code, err.count("\n")) == (2, 1)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, err = generate(bare, "--prompt", "x")
    assert (code, "no tokenizer" in err) == (2, True)


def test_the_installed_command_prints_one_json_object_and_nothing_else(folder):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mlx_k3", "generate", folder),
            *("--prompt", "Hi", "--json", "--max-tokens", "3"),
        ],
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(done.stdout)["generated_tokens"] == 3
    assert done.stdout.count("\n") == 1
