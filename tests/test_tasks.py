"""Generated conversations: a split that holds, one target for a prompt, facts that are true."""

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import typer.main

from mlx_k3 import cli
from mlx_k3.chat.xtml import render
from mlx_k3.tasks import (
    FAMILIES,
    about,
    asked,
    example,
    is_held_out,
)

from .conftest import REPOSITORY
from .support.tasks import Said, answer_of, drawn, numbers, training


def test_training_has_no_held_out_item() -> None:
    seen = Counter()
    for item in training(20_000):
        lines = item.key.split("\n")
        assert all(lines) and not any(map(is_held_out, lines)), item.key
        seen[item.family] += 1
        if item.family == "conversation":
            turns = sum(message["role"] == "user" for message in item.messages)
            assert turns >= 2 and len(lines) >= 2
    assert set(seen) == {*FAMILIES, "conversation"}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_side_of_the_split_is_its_own(family: str) -> None:
    rng = random.Random(1)
    held = {line for _ in range(150) for line in [example(family, rng, "held-out").key]}
    train = {example(family, rng, "train").key for _ in range(300)}
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))


def test_the_split_is_a_tenth_and_the_same_everywhere() -> None:
    keys = [f"addition {a} {b}" for a in range(10, 100) for b in range(a, 100)]
    assert 0.08 < sum(map(is_held_out, keys)) / len(keys) < 0.12
    digest = hashlib.sha256(b"addition 47 85").hexdigest()[:16]
    assert is_held_out("addition 47 85") == (int(digest, 16) % 10 == 0)


def test_operands_are_held_out_in_every_family_and_order() -> None:
    """Wherever a sum of two-digit numbers is said, even as a step, it is none of the held-out."""
    found = set()
    for item in training(30_000, seed=5):
        for message in item.messages:
            spoken = f"{message.get('reasoning_content', '')} {message['content']}"
            for x, y in re.findall(r"\b(\d\d) \+ (\d\d) = ", spoken):
                found.add(item.family)
                a, b = sorted((int(x), int(y)))
                assert not is_held_out(f"addition {a} {b}"), item
    assert {"addition", "dates", "times", "tools", "conversation"} <= found


def test_a_seed_gives_the_same_in_another_process() -> None:
    code = (
        "import hashlib, itertools; from mlx_k3.tasks import training_examples as t;"
        "print(hashlib.sha256(repr(list(itertools.islice(t(9), 2000))).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = hashlib.sha256(repr(training(2000, seed=9)).encode()).hexdigest()
    assert digests == {here + "\n"}
    assert training(20, seed=1) != training(20, seed=2)


def test_every_example_renders_and_a_third_has_no_thinking() -> None:
    items = training(4000, seed=2)
    for item in items:
        rendered = render(
            item.messages,
            tools=item.tools,
            thinking=item.thinking,
            thinking_effort=item.thinking_effort,
            response_format=item.response_format,
            add_generation_prompt=False,
        )
        assert len(rendered.messages) == len(item.messages)
        assert item.messages[-1]["role"] == "assistant" and answer_of(item)
    assert 0.3 < sum(not item.thinking for item in items) / len(items) < 0.37


def test_a_prompt_has_one_target() -> None:
    targets: dict[str, Any] = {}
    for item in training(40_000, seed=3):
        messages = asked(item)
        prompt = json.dumps([messages, item.tools, item.response_format])
        target = [
            {k: message.get(k) for k in ("content", "reasoning_content", "tool_calls")}
            for message in item.messages[len(messages) :]
            if message["role"] == "assistant"
        ]
        # What a clock or another tool tells is not the model's; what it calls is.
        assert targets.setdefault(prompt, target[0]) == target[0], prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_answer_is_right_and_another_is_not(family: str) -> None:
    check = FAMILIES[family].check
    for item in drawn(family, 40):
        calls = [
            call["function"]
            for message in item.messages[len(asked(item)) :]
            for call in message.get("tool_calls", ())
        ]
        answer = answer_of(item)
        assert check(item, Said(f" {answer}\n", calls))
        assert not check(item, Said(answer + " 1", calls))
        assert not check(item, Said("", calls))
        stray = {"name": "calculator", "arguments": {"expression": "1 + 1"}}
        assert not check(item, Said(answer, [*calls, stray]))
        if calls:
            assert not check(item, Said(answer, calls[1:]))
            changed = [{**calls[0], "arguments": {"x": "1"}}, *calls[1:]]
            assert not check(item, Said(answer, changed))


def test_every_wording_about_the_program_means_one_fact() -> None:
    answers: dict[str, str] = {}
    assert len(about.FACTS) >= 60
    for fact in about.FACTS:
        wordings = {about.identity(wording) for wording in about.wordings(fact)}
        assert len([w for w in wordings if not is_held_out(w)]) >= 12, fact
        for wording in wordings:
            assert answers.setdefault(wording, fact.answer) == fact.answer, wording
    assert len(set(answers.values())) == len(about.FACTS)


def _stated() -> str:
    return "\n".join(text for f in about.FACTS for text in (*f.topics, f.answer, *f.whole))


def test_facts_name_commands_and_options_that_exist() -> None:
    commands = typer.main.get_command(cli.app).commands
    options = {
        option for command in commands.values() for p in command.params for option in p.opts
    } | {"--help"}
    # Only a command follows the name; "mlx-k3 runs", "mlx-k3 needs" are sentences.
    named = set(re.findall(r"(?:Run mlx-k3|the command|command:) ([a-z]+)", _stated()))
    assert named <= set(commands) and len(named) >= 9
    assert set(re.findall(r"--[a-z][\w-]*", _stated())) <= options
    chat = (REPOSITORY / "mlx_k3" / "cli" / "conversation.py").read_text()
    for typed in re.findall(r"Type (/\w+)", _stated()):
        assert f"\n{typed} " in chat or f'"""\\\n{typed} ' in chat


def test_facts_about_sizes_are_those_of_the_configuration() -> None:
    text = json.loads((REPOSITORY / "tests" / "data" / "kimi-k3-config.json").read_text())
    text = text.get("text_config", text)
    layers = text["linear_attn_config"]
    said = {fact.topics[0]: fact.answer for fact in about.FACTS}
    kda, mla = len(layers["kda_layers"]), len(layers["full_attn_layers"])
    for topic, values in {
        "number of layers of K3": (text["num_hidden_layers"], kda, mla),
        "hidden size of K3": (text["hidden_size"],),
        "number of attention heads of K3": (text["num_attention_heads"],),
        "number of experts of K3": (text["num_experts"],),
        "number of active experts of K3": (text["num_experts_per_token"], text["num_experts"]),
        "number of shared experts of K3": (text["num_shared_experts"],),
        "vocabulary size of K3": (text["vocab_size"],),
        "context length of K3": (text["model_max_length"],)
        if "model_max_length" in text
        else (1_048_576,),
    }.items():
        answer = said[topic].replace(",", "").replace("K3", "").replace("MoE", "")
        assert numbers(answer) == list(values), topic
    width, latent = text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    expert_bytes = 3 * width * latent * 17 // 32
    assert f"{expert_bytes / 1e6:.1f} MB" in said["size of an expert"]
    token_bytes = expert_bytes * text["num_experts_per_token"] * (text["num_hidden_layers"] - 1)
    assert f"{token_bytes / 1e9:.1f} GB" in said["a working set"]
