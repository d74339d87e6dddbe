"""The vision tower and projector: golden values, a reference of our own, memory and gradients."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_k3.config import K3Config, VisionConfig
from mlx_k3.errors import CheckpointError, UnsupportedError
from mlx_k3.kernels.gelu import gelu_exact, gelu_tanh
from mlx_k3.models import vision, vision_attention
from mlx_k3.models.vision import NORM_EPS, PositionEmbedding, Vision
from mlx_k3.models.vision_attention import attention
from mlx_k3.models.vision_positions import rotate, rotations

from .support import vision_reference
from .support.pictures import MEDIA, golden_arrays, golden_media, relative_error, unpacked

SMALL = VisionConfig(
    patch_size=4,
    vt_num_hidden_layers=2,
    vt_hidden_size=24,
    qkv_hidden_size=32,
    vt_num_attention_heads=2,
    vt_intermediate_size=40,
    init_pos_emb_height=5,
    init_pos_emb_width=3,
    init_pos_emb_time=4,
    text_hidden_size=20,
    projector_ln_eps=1e-5,
    merge_kernel_size=(2, 2),
)


@pytest.fixture(params=["whole", "in blocks"])
def cut(request, monkeypatch):
    """Sequences as they are, and cut into blocks and tiles that divide nothing."""
    if request.param == "in blocks":
        monkeypatch.setattr(vision, "BLOCK_PATCHES", 5)
        monkeypatch.setattr(vision_attention, "QUERY_BLOCK", 3)
        monkeypatch.setattr(vision_attention, "LEAST_TILE", 7)
        for name in ("TILE_BYTES", "CPU_TILE_BYTES"):
            monkeypatch.setattr(vision_attention, name, 1)


@pytest.fixture(scope="module")
def tower(golden) -> Vision:
    folder = golden / "tiny-multimodal"
    tower = Vision(VisionConfig.from_dict(K3Config.from_file(folder).vision_config))
    weights = {}
    for file in folder.glob("model-*.safetensors"):
        weights |= mx.load(str(file))
    weights = tower.sanitize(weights)
    tower.load_weights([(name, array.astype(mx.float32)) for name, array in weights.items()])
    return tower


def random_tower(config: VisionConfig = SMALL, seed: int = 0) -> Vision:
    mx.random.seed(seed)
    tower = Vision(config)
    tower.update(
        tree_map(lambda x: x + 0.3 * mx.random.normal(x.shape) / x.ndim, tower.parameters())
    )
    return tower


def random_pixels(grid, config: VisionConfig = SMALL, batch: int = 1) -> mx.array:
    t, rows, columns = grid
    return mx.random.uniform(-1, 1, (batch, t * rows * columns, 3, *[config.patch_size] * 2))


@pytest.mark.parametrize("name", MEDIA)
def test_every_stage_matches_golden(golden, tower, cut, name):
    arrays, media = golden_arrays(golden), golden_media(golden)
    medium = media[name]
    pixels, grid = mx.array(medium.values())[None], medium.grid

    def expected(stage):
        return unpacked(arrays[f"vision.{stage}"], media)[name]

    x = tower.vision_tower.patch_embed(pixels, grid)
    assert relative_error(x[0], expected("patch_embed")) <= 1e-5
    turns = rotations(grid, tower.vision_tower.encoder.head_dim)
    for i, block in enumerate(tower.vision_tower.encoder.blocks):
        x = block(x, turns)
        assert relative_error(x[0], expected(f"block.{i}")) <= 1e-5
    x = tower.vision_tower.encoder.final_layernorm(x)
    assert relative_error(x[0], expected("final_layernorm")) <= 1e-5
    features = tower.vision_tower(pixels, grid)
    assert relative_error(features[0], arrays[f"vision.features.{name}"]) <= 1e-5
    vectors = tower(pixels, grid)[0]
    assert relative_error(vectors, arrays[f"vision.projected.{name}"]) <= 1e-5
    assert relative_error(vectors, arrays[f"vision_alt_eps.projected.{name}"]) > 1e-3


@pytest.mark.parametrize(
    "grid", [(1, 2, 2), (1, 2, 10), (1, 6, 4), (1, 10, 6), (2, 4, 2), (3, 2, 6), (4, 6, 4)]
)
def test_equals_a_reference_of_our_own(cut, grid):
    tower = random_tower(seed=sum(grid))
    pixels = random_pixels(grid)
    weights = {name: np.array(array) for name, array in tree_flatten(tower.parameters())}
    want = vision_reference.vectors(weights, np.array(pixels[0]), grid, heads=2)
    assert relative_error(tower(pixels, grid)[0], want) <= 1e-5


def test_the_epsilon_is_float32s_own():
    assert np.finfo(np.float32).eps == np.float32(NORM_EPS)
    norms = [module for name, module in Vision(SMALL).named_modules() if "norm" in name]
    assert sorted(norm.eps for norm in norms) == [NORM_EPS] * 5 + [1e-5]


def test_a_medium_sees_nothing_of_another(cut):
    tower, grid = random_tower(), (2, 4, 6)
    pixels = random_pixels(grid, batch=3)
    together = tower(pixels, grid)
    for row in range(3):
        alone = tower(pixels[row : row + 1], grid)[0]
        assert relative_error(together[row], alone) <= 1e-6


def test_every_patch_of_a_clip_sees_all_others():
    tower, grid = random_tower(), (3, 2, 4)
    pixels = random_pixels(grid)
    changed = mx.array(pixels)
    changed[0, -1] = -changed[0, -1]  # the last frame's last patch
    x, y = (
        tower.vision_tower.encoder(tower.vision_tower.patch_embed(p, grid), grid)
        for p in (pixels, changed)
    )
    assert (mx.abs(x - y).max(-1) > 1e-6).all()


def test_a_still_clip_is_not_a_picture():
    """Frames are told apart, so four equal ones give other vectors than one."""
    tower = random_tower()
    pixels = random_pixels((1, 4, 4))
    still = mx.concatenate([pixels] * 4, axis=1)
    assert relative_error(tower(still, (4, 4, 4)), tower(pixels, (1, 4, 4))) > 1e-2


def test_the_learned_grid_is_used_as_it_is_where_it_fits():
    positions = PositionEmbedding(SMALL)
    assert (positions((1, 5, 3)) == positions.weight.reshape(15, -1)).all()


def test_more_frames_than_the_tower_knows():
    with pytest.raises(ValueError, match="5 frames"):
        PositionEmbedding(SMALL)((5, 2, 2))


def test_rotations_keep_distances():
    """What two patches are to each other depends on how far apart they are, not on where."""
    turns = rotations((1, 6, 6), 8)
    q, k = mx.random.normal((8,)), mx.random.normal((8,))
    x, y = (rotate(mx.broadcast_to(v, (1, 1, 36, 8)), turns)[0, 0] for v in (q, k))
    scores = np.array(x @ y.T).reshape(6, 6, 6, 6)
    assert np.allclose(scores[0, 1, 2, 3], scores[3, 2, 5, 4], atol=1e-5)
    assert abs(scores[0, 0, 0, 2] - scores[0, 0, 2, 0]) > 1e-3


@pytest.mark.parametrize("width", [16, 64])  # a GPU has a kernel for the second
@pytest.mark.parametrize("keys", [1, 7, 8, 300])
def test_attention_in_tiles(cut, keys, width):
    q = mx.random.normal((2, 2, 10, width))
    k, v = 3 * mx.random.normal((2, 2, 2, keys, width))
    scores = np.array(q, np.float64) @ np.array(k, np.float64).swapaxes(-1, -2) / width**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ np.array(v, np.float64)
    assert relative_error(attention(q, k, v), want) <= 1e-5


@pytest.mark.parametrize("size", [1 << 10, 1 << 16])  # both ways on a CPU
def test_gelus(size):
    x = mx.concatenate([mx.linspace(-200, 200, size // 2), mx.linspace(-6, 6, size // 2)])
    wide = np.array(x, np.float64)
    tanh = wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) / 2
    assert relative_error(gelu_tanh(x), tanh) <= 1e-6
    assert np.abs(np.array(gelu_tanh(x[size // 2 :])) - tanh[size // 2 :]).max() <= 2e-6
    assert np.abs(np.array(gelu_exact(x)) - vision_reference._gelu(wide)).max() <= 2e-5
    # The two differ, by 4e-4 at most.
    assert 1e-4 < mx.abs(gelu_tanh(x) - gelu_exact(x)).max().item() < 1e-3


def test_half_precision_goes_through():
    tower, grid = random_tower(), (1, 4, 6)
    pixels = random_pixels(grid)
    want = tower(pixels, grid)
    tower.update(tree_map(lambda x: x.astype(mx.bfloat16), tower.parameters()))
    got = tower(pixels.astype(mx.bfloat16), grid)
    assert got.dtype == mx.bfloat16
    assert relative_error(got.astype(mx.float32), want) < 0.1


def test_gradients(cut):
    """Of every parameter, along a random direction, against a difference of two losses."""
    tower, grid = random_tower(), (2, 4, 4)
    pixels, goal = random_pixels(grid), mx.random.normal((1, 4, 20))

    def loss(parameters):
        tower.update(parameters)
        return ((tower(pixels, grid) - goal) ** 2).mean()

    start = tower.parameters()
    gradient = mx.grad(loss)(start)
    for name, array in tree_flatten(gradient):
        assert mx.abs(array).max().item() > 0, name
    way = tree_map(lambda x: mx.random.normal(x.shape), start)
    steps = (tree_map(lambda x, d, s=s: x + s * d, start, way) for s in (2e-3, -2e-3))
    ahead, behind = (loss(step).item() for step in steps)
    slope = sum(
        (g * d).sum() for (_, g), (_, d) in zip(*map(tree_flatten, (gradient, way)), strict=True)
    )
    assert slope.item() == pytest.approx((ahead - behind) / 4e-3, rel=0.02)


def test_large_pictures_take_memory_by_the_patch():
    config = replace(SMALL, vt_num_attention_heads=8)
    tower, grid = random_tower(config), (1, 48, 64)
    pixels = random_pixels(grid, config)
    mx.eval(tower.parameters(), pixels)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(tower(pixels, grid))
    scores_bytes = 8 * (48 * 64) ** 2 * 4
    assert mx.get_peak_memory() - before < scores_bytes / 8


def test_whoever_waits_is_asked_between_blocks():
    tower, grid = random_tower(), (1, 4, 4)

    def leave():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        tower(random_pixels(grid), grid, leave)


def test_colours_last_is_turned_round():
    tower = random_tower()
    weights = dict(tree_flatten(tower.parameters()))
    name = "vision_tower.patch_embed.proj.weight"
    turned = {**weights, name: weights[name].transpose(0, 2, 3, 1), "lm_head.weight": mx.zeros(1)}
    assert (tower.sanitize(turned)[name] == weights[name]).all()
    assert tower.sanitize(turned).keys() == weights.keys()


RELEASED = {
    "merge_kernel_size": [2, 2],
    "patch_size": 14,
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1024,
    "qkv_hidden_size": 1536,
    "vt_num_attention_heads": 12,
    "vt_intermediate_size": 4096,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "text_hidden_size": 7168,
    "projector_ln_eps": 1e-5,
}


def test_the_release_has_401_million_weights():
    config = VisionConfig.from_dict(RELEASED)
    sizes = [x.size for name, x in tree_flatten(Vision(config).parameters()) if "tower" in name]
    assert sum(sizes) == pytest.approx(401e6, rel=0.01)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"patch_size": None}, CheckpointError, "missing or wrong"),
        ({"merge_kernel_size": 2}, CheckpointError, "missing or wrong"),
        ({"vt_hidden_size": 0}, CheckpointError, "vt_hidden_size is 0"),
        ({"vt_num_attention_heads": 7}, CheckpointError, "multiple of 4"),
        ({"norm_type": "layernorm"}, UnsupportedError, "norm_type 'layernorm'"),
        ({"attn_bias": True}, UnsupportedError, "attn_bias True"),
        ({"pos_emb_interpolation_mode": "bicubic"}, UnsupportedError, "bicubic"),
    ],
)
def test_towers_that_there_are_not(change, error, message):
    with pytest.raises(error, match=message):
        VisionConfig.from_dict(RELEASED | change)


def test_a_missing_size_is_named():
    with pytest.raises(CheckpointError, match="qkv_hidden_size"):
        VisionConfig.from_dict({k: v for k, v in RELEASED.items() if k != "qkv_hidden_size"})
