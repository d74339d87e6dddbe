"""Per-Head Muon against its rule written out head by head in numpy's float64."""

import functools
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_k3.config import K3Config
from mlx_k3.errors import UnsupportedError
from mlx_k3.models.kimi import Model
from mlx_k3.training.muon import PerHeadMuon, make_optimizer, orthogonalize, takes_muon

RATE, DECAY = 0.02, 0.1
KDA_HEADS, MLA_HEADS = 3, 2
ATTENTION = "model.layers.{}.self_attn.{}.weight"
# Parameter -> shape and the blocks it falls into. Layer 1 is KDA, layer 3 is MLA.
BLOCKS = {
    ATTENTION.format(1, "qkv_proj"): ((9 * 4, 24), "rows", 9),
    ATTENTION.format(1, "f_a_proj"): ((4, 24), "rows", 1),
    ATTENTION.format(1, "f_b_proj"): ((3 * 4, 4), "rows", 3),
    ATTENTION.format(1, "g_proj"): ((3 * 4, 24), "rows", 3),
    ATTENTION.format(1, "g_b_proj"): ((3 * 4, 4), "rows", 3),
    ATTENTION.format(1, "o_proj"): ((24, 3 * 4), "columns", 3),
    ATTENTION.format(3, "q_proj"): ((2 * 6, 24), "rows", 2),
    ATTENTION.format(3, "q_b_proj"): ((2 * 6, 8), "rows", 2),
    ATTENTION.format(3, "kv_a_proj_with_mqa"): ((10, 24), "rows", 1),
    ATTENTION.format(3, "g_proj"): ((2 * 4, 24), "rows", 2),
    ATTENTION.format(3, "o_proj"): ((24, 2 * 4), "columns", 2),
    ATTENTION.format(3, "embed_q"): ((2, 8, 4), "stack", 2),
    "model.layers.0.mlp.up_proj.weight": ((40, 24), "rows", 1),
    "model.layers.0.mlp.down_proj.weight": ((24, 40), "rows", 1),
    "model.layers.1.mlp.switch_mlp.down_proj.weight": ((5, 12, 8), "stack", 5),
    "model.layers.1.mlp.shared_experts.up_proj.weight": ((12, 24), "rows", 1),
    "model.layers.2.mlp.routed_expert_down_proj.weight": ((16, 24), "rows", 1),
}


@pytest.fixture
def config() -> K3Config:
    nano = K3Config.from_file(Path(__file__).parents[1] / "mlx_k3" / "nano" / "model")
    return replace(nano, kda_num_heads=KDA_HEADS, num_attention_heads=MLA_HEADS)


def draw(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def tree(seed: int, scale: float = 1.0) -> dict:
    named = [(p, scale * draw(s[0], seed + i)) for i, (p, s) in enumerate(BLOCKS.items())]
    return tree_unflatten(named)


def reference_orthogonal(block: np.ndarray) -> np.ndarray:
    x = block / np.linalg.norm(block)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def reference_blocks(matrix: np.ndarray, kind: str, count: int) -> list[np.ndarray]:
    """Views of ``matrix``, one a block."""
    if kind == "stack":
        return list(matrix)
    return np.split(matrix, count, axis=0 if kind == "rows" else 1)


def reference_run(path: str, parameter: mx.array, gradients: list[mx.array]) -> np.ndarray:
    w, momentum = np.array(parameter, np.float64), 0
    for gradient in gradients:
        g = np.array(gradient, np.float64)
        momentum = 0.95 * momentum + 0.05 * g
        direction = 0.95 * momentum + 0.05 * g
        w *= 1 - RATE * DECAY
        blocks = (reference_blocks(x, *BLOCKS[path][1:]) for x in (w, direction))
        for block, towards in zip(*blocks, strict=True):
            block -= RATE * 0.2 * max(block.shape) ** 0.5 * reference_orthogonal(towards)
    return w


def run(optimizer, parameters: dict, gradients: list[dict]) -> dict:
    for gradient in gradients:
        parameters = optimizer.apply_gradients(gradient, parameters)
    return parameters


def assert_equal(a: dict, b: dict) -> None:
    a, b = dict(tree_flatten(a)), dict(tree_flatten(b))
    assert a.keys() == b.keys()
    for path in a:
        assert mx.array_equal(a[path], b[path]), path


def test_equals_the_rule_head_by_head(config: K3Config) -> None:
    start, gradients = tree(0), [tree(100 * i, scale=1e-3) for i in (1, 2, 3)]
    result = run(PerHeadMuon(config, RATE, DECAY), start, gradients)
    given = [dict(tree_flatten(t)) for t in gradients]
    for path, parameter in tree_flatten(start):
        expected = reference_run(path, parameter, [g[path] for g in given])
        found = dict(tree_flatten(result))[path]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=path)


def test_a_block_does_not_see_the_other_blocks(config: K3Config) -> None:
    start, gradient = tree(0), tree(100)
    moved = run(PerHeadMuon(config, RATE, DECAY), start, [gradient])
    for path, (_, kind, count) in BLOCKS.items():
        if count == 1:
            continue
        changed = dict(tree_flatten(gradient))
        other = np.array(changed[path])
        reference_blocks(other, kind, count)[-1][0, 0] += 3
        changed[path] = mx.array(other)
        again = run(PerHeadMuon(config, RATE, DECAY), start, [tree_unflatten([*changed.items()])])
        before, after = (dict(tree_flatten(t))[path] for t in (moved, again))
        pairs = zip(
            *(reference_blocks(np.array(x), kind, count) for x in (before, after)), strict=True
        )
        assert [np.array_equal(a, b) for a, b in pairs] == [True] * (count - 1) + [False], path


def test_together_is_one_by_one(config: K3Config) -> None:
    start, gradients = tree(0), [tree(100), tree(200)]
    together = dict(tree_flatten(run(PerHeadMuon(config, RATE, DECAY), start, gradients)))
    for path, parameter in tree_flatten(start):
        alone = [tree_unflatten([(path, dict(tree_flatten(g))[path])]) for g in gradients]
        optimizer = PerHeadMuon(config, RATE, DECAY)
        result = run(optimizer, tree_unflatten([(path, parameter)]), alone)
        ((_, found),) = tree_flatten(result)
        np.testing.assert_allclose(found, together[path], rtol=0, atol=1e-6, err_msg=path)


def test_equal_blocks_of_all_layers_are_one_batch(
    config: K3Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def spy(blocks: mx.array) -> mx.array:
        shapes.append(blocks.shape)
        return orthogonalize(blocks)

    monkeypatch.setattr("mlx_k3.training.muon.orthogonalize", spy)
    names = [ATTENTION.format(i, n) for i in (0, 1, 2) for n in ("qkv_proj", "o_proj")]
    shape = {"qkv_proj": (36, 24), "o_proj": (24, 12)}
    tree = tree_unflatten([(n, draw(shape[n.split(".")[-2]], i)) for i, n in enumerate(names)])
    run(PerHeadMuon(config, RATE, DECAY), tree, [tree])
    # Nine heads of a joint projection and three of an output, which lie down, in three layers.
    assert shapes == [(3 * (9 + 3), 4, 24)]


def test_singular_values_come_near_one_and_a_step_is_as_large_as_adamws(config: K3Config) -> None:
    blocks = orthogonalize(1e-4 * draw((3, 48, 96), 0))
    values = np.linalg.svd(np.array(blocks), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25
    path = "model.layers.0.mlp.up_proj.weight"
    zero = tree_unflatten([(path, mx.zeros((96, 48)))])
    step = run(PerHeadMuon(config, 1.0, DECAY), zero, [tree_unflatten([(path, draw((96, 48), 1))])])
    ((_, step),) = tree_flatten(step)
    assert 0.16 < step.square().mean().sqrt().item() < 0.24


def test_a_block_without_gradient_only_decays(config: K3Config) -> None:
    path = "model.layers.1.mlp.switch_mlp.down_proj.weight"
    w, g = draw((5, 12, 8), 0), draw((5, 12, 8), 1)
    g[2] = 0
    optimizer = PerHeadMuon(config, RATE, DECAY)
    ((_, moved),) = tree_flatten(
        run(optimizer, tree_unflatten([(path, w)]), [tree_unflatten([(path, g)])])
    )
    assert mx.allclose(moved[2], (1 - RATE * DECAY) * w[2], rtol=1e-6).item()
    assert mx.abs(moved[3] - w[3]).max().item() > 0.005


@pytest.mark.parametrize("name", ["tiny-text", "tiny-kimi-linear"])
def test_which_parameters_take_muon(golden: Path, name: str) -> None:
    model = Model(K3Config.from_file(golden / name))
    adamw = {
        path.removesuffix(".weight").split(".")[-1]
        for path, parameter in tree_flatten(model.parameters())
        if not takes_muon(path, parameter)
    }
    muon = {
        path.removesuffix(".weight").split(".", 3)[-1]
        for path, parameter in tree_flatten(model.parameters())
        if takes_muon(path, parameter)
    }
    norms = {x for x in adamw if x.endswith("norm")}
    vectors = {"A_log", "dt_bias", "qkv_conv", "e_score_correction_bias"}
    residuals = {"self_attention_res", "mlp_res", "output_attn_res"}
    assert norms >= {"norm", "o_norm", "input_layernorm", "kv_a_layernorm"}
    expected = vectors | {"embed_tokens", "lm_head", "gate", "b_proj"}
    assert adamw - norms == expected | (residuals if name == "tiny-text" else set())
    projections = {f"{p}_proj" for p in ("gate", "up", "down")}
    attention = {"qkv_proj", "o_proj", "f_a_proj", "f_b_proj", "kv_a_proj_with_mqa"}
    attention |= {"embed_q", "unembed_out"}
    mlp = projections | {
        f"{part}.{p}" for p in projections for part in ("switch_mlp", "shared_experts")
    }
    if name == "tiny-text":
        attention |= {"g_proj", "q_a_proj", "q_b_proj"}
        mlp |= {"routed_expert_down_proj", "routed_expert_up_proj"}
    else:
        attention |= {"g_a_proj", "g_b_proj", "q_proj"}
    assert muon == {f"self_attn.{x}" for x in attention} | {f"mlp.{x}" for x in mlp}


REST = {"lm_head.weight": (6, 4), "model.norm.weight": (4,), ATTENTION.format(1, "b_proj"): (3, 4)}
REST |= {"model.layers.1.self_attn.qkv_conv": (8, 4), "model.layers.1.mlp_res": (4,)}


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_rest_is_mlxs_adamw_and_only_its_matrices_decay(config: K3Config, kind: str) -> None:
    matrices = {"lm_head.weight", ATTENTION.format(1, "b_proj")}
    shapes = dict(REST)
    if kind == "adamw":
        shapes |= {path: shape for path, (shape, _, _) in BLOCKS.items()}
        matrices |= BLOCKS.keys()
    start = {path: draw(shape, i) for i, (path, shape) in enumerate(shapes.items())}
    grads = [{path: draw(w.shape, 50 * j + w.size) for path, w in start.items()} for j in (1, 2)]
    trees = [tree_unflatten([*g.items()]) for g in grads]
    optimizer = make_optimizer(config, RATE, DECAY, kind)
    result = dict(tree_flatten(run(optimizer, tree_unflatten([*start.items()]), trees)))
    for path, parameter in start.items():
        decay = DECAY if path in matrices else 0
        adamw = AdamW(RATE, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True)
        expected = run(adamw, {"w": parameter}, [{"w": g[path]} for g in grads])["w"]
        assert mx.array_equal(result[path], expected), path


def whole(seed: int) -> dict:
    """Parameters (or gradients) of every kind."""
    rest = [(path, draw(shape, seed + 50 + i)) for i, (path, shape) in enumerate(REST.items())]
    return tree_unflatten([*tree_flatten(tree(seed)), *rest])


def schedule(step: mx.array) -> mx.array:
    return RATE / (1 + step)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_restored_state_continues_as_if_never_interrupted(
    config: K3Config, tmp_path: Path, kind: str
) -> None:
    gradients = [whole(100 * i) for i in range(1, 5)]
    uninterrupted = make_optimizer(config, schedule, DECAY, kind)
    expected = run(uninterrupted, whole(0), gradients)

    first = make_optimizer(config, schedule, DECAY, kind)
    halfway = run(first, whole(0), gradients[:2])
    mx.save_safetensors(str(tmp_path / "state.safetensors"), dict(tree_flatten(first.state)))
    second = make_optimizer(config, schedule, DECAY, kind)
    second.state = tree_unflatten(mx.load(str(tmp_path / "state.safetensors")))
    assert_equal(run(second, halfway, gradients[2:]), expected)
    assert_equal(second.state, uninterrupted.state)
    assert uninterrupted.learning_rate.item() == pytest.approx(RATE / 4)


def test_compiled_it_is_the_same(config: K3Config) -> None:
    paths = [ATTENTION.format(1, "o_proj"), "lm_head.weight", "model.norm.weight"]

    def few(seed: int) -> dict:
        return tree_unflatten([(p, w) for p, w in tree_flatten(whole(seed)) if p in paths])

    gradients = [few(100 * i) for i in (1, 2, 3)]
    expected = run(make_optimizer(config, schedule, DECAY), few(0), gradients)
    optimizer = make_optimizer(config, schedule, DECAY)
    optimizer.init(few(0))
    state = optimizer.state

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def step(gradient: dict, parameters: dict) -> dict:
        return optimizer.apply_gradients(gradient, parameters)

    parameters = few(0)
    for gradient in gradients:
        parameters = step(gradient, parameters)
    close = tree_map(lambda a, b: mx.allclose(a, b, atol=1e-6).item(), parameters, expected)
    assert [p for p, ok in tree_flatten(close) if not ok] == []
    assert len(tree_flatten(close)) == 3


def test_it_updates_a_model_and_leaves_frozen_parameters(config: K3Config, golden: Path) -> None:
    model = Model(K3Config.from_file(golden / "tiny-text"))
    model.freeze(keys=["e_score_correction_bias"])
    before = dict(tree_flatten(model.parameters()))
    gradients = tree_map(mx.ones_like, model.trainable_parameters())
    make_optimizer(model.config, RATE, DECAY).update(model, gradients)
    for path, after in tree_flatten(model.parameters()):
        same = mx.array_equal(after, before[path]).item()
        assert same == path.endswith("e_score_correction_bias"), path
        assert mx.all(mx.isfinite(after)).item()


def test_parameters_keep_their_dtype(config: K3Config) -> None:
    start, gradient = (tree_map(lambda x: x.astype(mx.bfloat16), whole(i)) for i in (0, 100))
    result = run(make_optimizer(config, RATE, DECAY), start, [gradient])
    assert {x.dtype for _, x in tree_flatten(result)} == {mx.bfloat16}


def test_an_unknown_kind_is_refused(config: K3Config) -> None:
    with pytest.raises(UnsupportedError, match="'sgd' is none of muon and adamw"):
        make_optimizer(config, RATE, DECAY, "sgd")
