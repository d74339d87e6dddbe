"""Training with pictures: batches, what gradients reach, exact resumption, export, and a start from
a trained model."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_map

from mlx_k3 import load
from mlx_k3.chat.generation import generate
from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.chat.xtml import encode, render
from mlx_k3.checkpoint.mxfp4 import decode
from mlx_k3.config import K3Config
from mlx_k3.convert.stream import convert
from mlx_k3.errors import K3Error
from mlx_k3.media.placing import plain_ids
from mlx_k3.media.processor import Processor
from mlx_k3.models.embeddings import PromptEmbeddings
from mlx_k3.tasks import asked, drawn, scenes, training_examples
from mlx_k3.training import bank
from mlx_k3.training.config import TrainConfig
from mlx_k3.training.data import BatchStream, Tokens, batches, tokenize
from mlx_k3.training.export import export
from mlx_k3.training.initialize import new_model
from mlx_k3.training.muon import make_optimizer
from mlx_k3.training.pictures import opened
from mlx_k3.training.precision import as_stored
from mlx_k3.training.sight import logits
from mlx_k3.training.step import State, initial_state, make_step
from mlx_k3.training.trainer import Trainer, _optimizer

from .support.measure import relative_error
from .support.releases import all_tensors, contents, edit_json
from .support.training import RANKS, threads_for_processes, without_speed, write_run

pytest.importorskip("PIL")

PAD = RANKS + 21
LENGTHS = (128, 256, 512)


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Path) -> Any:
    return load_tokenizer(vocabulary)


@pytest.fixture(scope="module")
def processor(seeing_start: Path) -> Processor:
    return Processor.from_folder(seeing_start)


@pytest.fixture(scope="module")
def conversations(tokenizer: Any, processor: Processor) -> list[Tokens]:
    items = islice(training_examples(3, pictures=0.6), 150)
    return [tokenize(opened(item, processor), tokenizer) for item in items]


# Batches


def test_a_picture_takes_the_places_that_it_has_in_use(
    tokenizer: Any, processor: Processor
) -> None:
    seen = Counter()
    for item in islice(training_examples(5, pictures=1.0), 60):
        item = opened(item, processor)
        tokens = tokenize(item, tokenizer)
        settings = {"thinking": item.thinking, "thinking_effort": item.thinking_effort}
        rendered = render(item.messages, add_generation_prompt=False, **settings)
        ids = encode(rendered.segments, tokenizer)
        assert tokens.ids.tolist() == plain_ids(ids, PAD)
        places = [i for i, token in enumerate(ids) if token < 0]
        assert tokens.places.tolist() == places
        vectors = [vector for medium in tokens.media for vector in medium.ids]
        assert [ids[i] for i in places] == vectors
        assert not tokens.predicted[tokens.places].any()
        seen[len(tokens.media)] += 1
    assert set(seen) >= {1, 2}


def test_a_batch_has_pictures_of_one_grid_each_in_its_places(conversations: list[Tokens]) -> None:
    made = batches(conversations, LENGTHS, 2048, seed=0)
    found = Counter()
    for batch in made:
        size, length = batch.weights.shape
        if batch.pictures is None:
            continue
        pixels, _, grid, places = batch.pictures
        each = grid[1] * grid[2] // 4
        assert pixels.dtype == np.uint8 and places.dtype == np.int32
        assert pixels.shape[1:] == (grid[1] * grid[2], 3, 14, 14)
        assert len(pixels) % max(size // 4, 1) == 0 and len(places) == len(pixels) * each
        inside = places[places < size * length]
        assert len(set(inside.tolist())) == len(inside) and (places <= size * length).all()
        assert (batch.ids[:, :-1].reshape(-1)[inside] == PAD).all()
        for picture, own in zip(pixels, places.reshape(len(pixels), each), strict=True):
            if own[0] < size * length:
                assert len({place // length for place in own.tolist()}) == 1
                found[picture.tobytes()] += 1
            else:
                assert not picture.any() and (own == size * length).all()
    fitting = [c for c in conversations if len(c.ids) <= LENGTHS[-1] + 1]
    assert found == Counter(m.pixels.tobytes() for c in fitting for m in c.media)
    # Text takes the places that are left: most rows count.
    rows = sum(len(batch.ids) for batch in made)
    assert sum(batch.weights.any(1).sum() for batch in made) == len(fitting) > rows / 2


def test_rows_of_a_batch_keep_their_pictures(conversations: list[Tokens]) -> None:
    """By ids and places: the n-th picture of a row stands at its n-th run of pads."""
    by_ids = {c.ids.tobytes(): c for c in conversations}
    checked = 0
    for batch in batches(conversations, LENGTHS, 2048, seed=1):
        if batch.pictures is None:
            continue
        length = batch.weights.shape[1]
        each = len(batch.pictures.places) // len(batch.pictures.pixels)
        for picture, own in zip(
            batch.pictures.pixels, batch.pictures.places.reshape(-1, each), strict=True
        ):
            row, first = divmod(int(own[0]), length)
            if row == len(batch.ids):
                continue
            end = int(np.flatnonzero(batch.weights[row])[-1]) + 2
            conversation = by_ids[batch.ids[row, :end].tobytes()]
            which = conversation.places.tolist().index(first) // each
            assert np.array_equal(conversation.media[which].pixels, picture)
            checked += 1
    assert checked > 50


def test_the_stream_is_the_same_from_anywhere_whoever_makes_it(
    vocabulary: Path, seeing_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(vocabulary, folder)
    shutil.copy(seeing_start / "preprocessor_config.json", folder)
    options = {"lengths": LENGTHS, "tokens_per_batch": 4096, "seed": 3, "pictures": 0.5}
    options["conversations_per_chunk"] = 256

    def told(count: int, **more: Any) -> list[Any]:
        with BatchStream(folder, **options, **more) as stream:
            return [
                (at, b.ids.tobytes(), b.pictures and [np.asarray(x).tobytes() for x in b.pictures])
                for at, b in islice(stream, count)
            ]

    by_processes = told(20, workers=2)
    assert any(pictures for *_, pictures in by_processes)
    threads_for_processes(monkeypatch)
    assert told(20) == by_processes
    assert told(5, start=by_processes[10][0]) == by_processes[11:16]


# Steps


@pytest.fixture
def settings(seeing_start: Path, tmp_path: Path) -> TrainConfig:
    path = write_run(tmp_path / "run.toml", seeing_start, pictures=0.6)
    return TrainConfig.from_file(path)


def batch_of(conversations: list[Tokens], pictures: bool) -> Any:
    chosen = [c for c in conversations if bool(c.media) == pictures and len(c.ids) <= 257]
    return batches(chosen, (256,), 1024, seed=0)[0]


def stepped(settings: TrainConfig, state: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    take = make_step(model, optimizer, settings, quantized=False)
    after, metrics = take(state, mx.array(batch.ids), mx.array(batch.weights), batch.pictures)
    mx.eval(after, metrics)
    return after, metrics


def test_a_step_moves_all_of_the_tower_if_there_are_pictures_and_none_if_not(
    settings: TrainConfig, seeing_start: Path, conversations: list[Tokens]
) -> None:
    config = K3Config.from_file(seeing_start)
    model, optimizer = new_model(config, 0), _optimizer(config, settings)
    state = initial_state(model, optimizer)
    before = dict(tree_flatten(state.parameters))
    tower = {name for name in before if name.startswith("vision.")}
    assert len(tower) > 15
    for pictures in (True, False):
        after, _ = stepped(settings, state, model, optimizer, batch_of(conversations, pictures))
        changed = {
            name
            for name, array in tree_flatten(after.parameters)
            if not mx.array_equal(array, before[name])
        }
        assert (changed & tower == tower) if pictures else not (changed & tower)
        assert len(changed - tower) > 0.9 * len(before.keys() - tower)
        state, before = after, dict(tree_flatten(after.parameters))
    states = [state.optimizer[part]["states"] for part in ("text", "tower")]
    assert {part["step"].item() for several in states for part in several} == {2}


def test_text_learns_as_it_would_without_a_tower(
    settings: TrainConfig, start: Path, seeing_start: Path, conversations: list[Tokens]
) -> None:
    """The same numbers, to the bit, in a step without pictures."""
    batch, results = batch_of(conversations, False), []
    for folder in (start, seeing_start):
        config = K3Config.from_file(folder)
        model, optimizer = new_model(config, 0), _optimizer(config, settings)
        after, metrics = stepped(settings, initial_state(model, optimizer), model, optimizer, batch)
        named = dict(tree_flatten(after.parameters))
        results.append({n: np.array(a) for n, a in named.items() if not n.startswith("vision")})
        results[-1]["loss"] = np.array(metrics.loss)
    assert results[0].keys() == results[1].keys()
    for name, array in results[0].items():
        assert np.array_equal(array, results[1][name]), name


def test_pictures_for_the_shape_alone_change_nothing(
    settings: TrainConfig, seeing_start: Path, conversations: list[Tokens]
) -> None:
    batch = batch_of(conversations, True)
    pictures = batch.pictures
    nowhere = batch.weights.size
    own = int((pictures.places.reshape(len(pictures.pixels), -1)[:, 0] < nowhere).sum())
    each = len(pictures.places) // len(pictures.pixels)
    more = pictures._replace(
        pixels=np.concatenate([pictures.pixels[:own], pictures.pixels[:2]]),
        places=np.concatenate(
            [pictures.places[: own * each], np.full(2 * each, nowhere, np.int32)]
        ),
    )
    fewer = pictures._replace(pixels=pictures.pixels[:own], places=pictures.places[: own * each])
    model = new_model(K3Config.from_file(seeing_start), 0)
    ids = mx.array(batch.ids[:, :-1])
    few, many = (logits(model, ids, shown) for shown in (fewer, more))
    assert relative_error(many, few) < 1e-5
    assert relative_error(logits(model, ids), few) > 1e-2


def test_the_towers_heads_are_orthogonalised_alone(seeing_start: Path) -> None:
    config = K3Config.from_file(seeing_start)
    model = new_model(config, 0)
    optimizer = make_optimizer(config, 1.0, 0.0).optimizers[0]
    qkv = mx.random.normal((192, 48), key=mx.random.key(0))
    out = mx.random.normal((48, 64), key=mx.random.key(1))
    tree = {"encoder": {"blocks": [{"wqkv": {"weight": qkv}, "wo": {"weight": out}}]}}
    optimizer.init(tree)
    zeros = tree_map(mx.zeros_like, tree)
    block = optimizer.apply_gradients(tree, zeros)["encoder"]["blocks"][0]
    heads = [block["wqkv"]["weight"][i : i + 32] for i in range(0, 192, 32)]
    heads += [block["wo"]["weight"][:, i : i + 32].T for i in range(0, 64, 32)]
    for head in heads:
        sizes = np.linalg.svd(np.array(head), compute_uv=False) / (0.2 * 48**0.5)
        assert sizes.min() > 0.5 and sizes.max() < 1.3
    assert model.vision.vision_tower.encoder.blocks[0].wqkv.weight.shape == qkv.shape


# Runs

QUICK = {
    "steps": 4,
    "tokens_per_batch": 512,
    "lengths": [128, 256],
    "conversations_per_chunk": 32,
    "checkpoint_every": 2,
    "pictures": 0.7,
}


@pytest.fixture
def run(seeing_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Train in this process; returns the result."""
    threads_for_processes(monkeypatch)
    monkeypatch.setattr("mlx_k3.training.data._PART", 32)
    monkeypatch.setattr("mlx_k3.training.trainer.HELD_OUT_BATCHES", 2)
    monkeypatch.setattr("mlx_k3.training.trainer.SETTLING_BATCHES", 2)

    def train(out: str = "out", start: Path = seeing_start, **changes: Any) -> Path:
        path = write_run(tmp_path / "run.toml", start, out=out, **QUICK | changes)
        return Trainer(TrainConfig.from_file(path)).run()

    return train


def test_stopped_between_steps_it_ends_the_same(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run(out="straight", steps=3)
    apply, calls = AdamW.apply_single, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return apply(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "apply_single", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(out="stopped", steps=3)
    assert not (model.parent.parent / "stopped" / "model").exists()
    stopped = run(out="stopped", steps=3)
    assert contents(stopped) == contents(model)
    assert without_speed(stopped.parent) == without_speed(model.parent)


def array_of(tensor: tuple[str, list[int], bytes]) -> np.ndarray:
    _, shape, raw = tensor
    return np.frombuffer(raw, np.uint8).reshape(shape)


def test_a_run_begins_with_the_weights_of_a_trained_model(
    run: Callable, start: Path, seeing_start: Path, tmp_path: Path
) -> None:
    text = run(out="text", start=start, pictures=0.0)
    begun = run(out="begun", initialize_from=str(text), learning_rate=0.0, balance="none")
    before, after = all_tensors(text), all_tensors(begun)
    assert before.keys() < after.keys()
    assert {n.split(".")[0] for n in after.keys() - before.keys()} == {
        "vision_tower",
        "mm_projector",
    }
    # From one that sees, the tower comes too.
    again = run(out="again", initialize_from=str(begun), learning_rate=0.0, seed=5, balance="none")
    for one, other in ((before, after), (after, all_tensors(again))):
        for name in one:
            # A zero may change its sign, and a mix's two vectors are one in training.
            if name.endswith("_packed"):
                scale = name.replace("_packed", "_scale")
                mine, theirs = (
                    decode(*(array_of(tensors[n]) for n in (name, scale)))
                    for tensors in (one, other)
                )
                assert np.array_equal(mine, theirs)
            elif "_res_" not in name:
                assert other[name] == one[name], name


def test_a_trained_model_that_does_not_fit_is_told(
    run: Callable, start: Path, seeing_start: Path, tmp_path: Path
) -> None:
    text = run(out="text", start=start, pictures=0.0, steps=1)
    narrow = tmp_path / "narrow"
    shutil.copytree(seeing_start, narrow)
    changes = {"moe_intermediate_size": 64}
    edit_json(narrow / "config.json", lambda c: c["text_config"].update(changes))
    with pytest.raises(K3Error, match=r"is another model than .*narrow describes: they differ in"):
        run(out="a", start=narrow, initialize_from=str(text))
    (text / "tiktoken.model").write_bytes(b"")
    with pytest.raises(K3Error, match=r"has another tiktoken.model than"):
        run(out="b", initialize_from=str(text))
    with pytest.raises(K3Error, match=r"nowhere does not exist; is this a model folder"):
        run(out="c", initialize_from=str(tmp_path / "nowhere"))


def test_pictures_need_a_tower(run: Callable, start: Path) -> None:
    with pytest.raises(K3Error, match="has no vision_config; then `pictures` must be 0"):
        run(start=start)


# Export


def as_used(model: Any) -> Any:
    """The model with the numbers its last phase of training computes with, in float32."""
    model.update(tree_map(lambda p: p.astype(mx.float32), as_stored(model.parameters())))
    for layer in model.config.moe_layers:
        model.layers[layer].mlp.switch_mlp.quantized = True
    return model


def packaged(model: Any, source: Path, out: Path) -> Path:
    export(model, json.loads((source / "config.json").read_text()), out / "release")
    for name in ("preprocessor_config.json", "tiktoken.model", "tokenizer_config.json"):
        shutil.copy(source / name, out / "release")
    convert(out / "release", out / "package", trunk="bf16")
    return out / "package"


def test_logits_about_pictures_survive_export_and_conversion(
    seeing_start: Path,
    tmp_path: Path,
    conversations: list[Tokens],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bank, "CAPACITY", 1e6)
    model = new_model(K3Config.from_file(seeing_start), 1)
    loaded, _ = load(packaged(model, seeing_start, tmp_path))
    batch = batch_of(conversations, True)
    ids = mx.array(batch.ids[:, :-1])
    expected = logits(as_used(model), ids, batch.pictures)
    by_text = {tuple(c.ids.tolist()): c for c in conversations}
    compared = 0
    for i, row in enumerate(batch.ids.tolist()):
        if not batch.weights[i].any():
            continue
        end = int(np.flatnonzero(batch.weights[i])[-1]) + 2
        own = by_text[tuple(row[:end])]
        prompt = own.ids.tolist()
        vectors = [vector for medium in own.media for vector in medium.ids]
        for place, vector in zip(own.places.tolist(), vectors, strict=True):
            prompt[place] = vector
        embedded = PromptEmbeddings(
            loaded.model.embed_tokens, loaded.vision.encode, prompt, own.media
        )[None]
        got = loaded(mx.array(own.ids)[None], input_embeddings=embedded)
        assert relative_error(got[0, : end - 1], expected[i, : end - 1]) < 2e-5
        compared += 1
    assert compared >= 3
    names = all_tensors(tmp_path / "release")
    assert {d for n, (d, _, _) in names.items() if n.startswith("vision_tower")} == {"BF16"}


@pytest.mark.slow
def test_it_learns_a_handful_of_pictures_and_answers_through_the_package(
    seeing_start: Path, settings: TrainConfig, tokenizer: Any, processor: Processor, tmp_path: Path
) -> None:
    """The same question about pictures that differ: what it answers it must have seen."""
    items = []
    for item in training_examples(8, pictures=1.0):
        shown = scenes(item)
        if (
            item.family == "picture_colour"
            and len(item.messages) == 2
            and "background" not in (item.messages[-1]["content"])
        ):
            text = {"type": "text", "text": "What do you see?"}
            content = [{"type": "image", "image": shown[0]}, text]
            messages = [{"role": "user", "content": content}, item.messages[-1]]
            items.append(replace(item, messages=messages, thinking=False))
        if len(items) == 8:
            break
    assert len({item.messages[-1]["content"] for item in items}) > 5
    tokens = [tokenize(opened(item, processor), tokenizer) for item in items]
    config = K3Config.from_file(seeing_start)
    settings = replace(settings, learning_rate=1e-2, steps=120, balance="none", quantize_from=0)
    model, optimizer = new_model(config, 0), _optimizer(config, settings)
    state: State = initial_state(model, optimizer)
    take = make_step(model, optimizer, settings, quantized=True)
    made = batches(tokens, (96, 128), 1024, seed=0)
    losses = []
    for step in range(settings.steps):
        batch = made[step % len(made)]
        state, metrics = take(state, mx.array(batch.ids), mx.array(batch.weights), batch.pictures)
        losses.append(metrics.loss.item())
        if max(losses[-2 * len(made) :]) < 0.02:
            break
    assert losses[0] > 5 and max(losses[-len(made) :]) < 0.02
    model.update(state.parameters)
    loaded, loaded_tokenizer = load(packaged(model, seeing_start, tmp_path))
    right = 0
    for item in items:
        [question] = asked(drawn(item))
        picture = question["content"][0]["image"]
        reply = generate(
            loaded,
            loaded_tokenizer,
            "What do you see?",
            images=[picture],
            thinking=False,
            max_tokens=24,
        )
        right += reply.strip() == item.messages[-1]["content"]
    assert right == len(items)
