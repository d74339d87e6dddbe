"""Time and memory of a picture on its way through K3's full-size tower, with random weights.

    python scripts/bench_vision.py --size 4000x3000 --blocks 2
    python scripts/bench_vision.py --compare

The floor is what the products alone take: each shape that the tower multiplies is timed by itself
in the same run, and weighted with how often it comes. ``--blocks`` runs so many of the tower's 27
blocks, which are alike in time and memory, and says what all would take. ``--compare`` holds tower
and preparation against mlx-vlm's, with its norms' epsilon set to ours; mlx-vlm has to be installed.
"""

import argparse
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx_k3  # noqa: F401  # Loads OpenBLAS before MLX.

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from PIL import Image

from mlx_k3.config import VisionConfig
from mlx_k3.eyes import encode
from mlx_k3.media.processor import Processor
from mlx_k3.models.vision import NORM_EPS, Vision
from mlx_k3.units import format_bytes

K3 = VisionConfig(
    patch_size=14,
    vt_num_hidden_layers=27,
    vt_hidden_size=1024,
    qkv_hidden_size=1536,
    vt_num_attention_heads=12,
    vt_intermediate_size=4096,
    init_pos_emb_height=64,
    init_pos_emb_width=64,
    init_pos_emb_time=4,
    text_hidden_size=7168,
    projector_ln_eps=1e-5,
    merge_kernel_size=(2, 2),
)
SIZES = ((28, 28), (56, 84), (70, 106), (224, 224), (640, 480), (1024, 768), (1792, 1024))
TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1024x768", help="of the picture, WIDTHxHEIGHT")
    parser.add_argument("--blocks", type=int, default=27, help="of the tower, that are run")
    parser.add_argument("--dtype", default="float32" if _on_cpu() else "bfloat16")
    parser.add_argument("--compare", action="store_true", help="hold it against mlx-vlm")
    parser.add_argument("--sizes", help="for --compare, as 28x28,640x480")
    args = parser.parse_args()
    if args.compare:
        sizes = SIZES if args.sizes is None else [_size(text) for text in args.sizes.split(",")]
        compare(sizes)
        return
    bench(_size(args.size), args.blocks, getattr(mx, args.dtype))


def bench(size: tuple[int, int], blocks: int, dtype: mx.Dtype) -> None:
    """One picture: what it takes, and what its products alone take."""
    tower = random_tower(replace(K3, vt_num_hidden_layers=blocks), dtype)
    model_bytes = sum(x.nbytes for _, x in tree_flatten(tower.parameters()))
    encode(tower, Processor().image(picture(56, 56)))  # warms up
    sized = Processor().size(*size)
    N = sized.rows * sized.columns
    # Before and after: others may use the machine.
    floor = products_floor(N, dtype)
    mx.clear_cache()
    before = resident_bytes()
    mx.reset_peak_memory()
    begin = time.perf_counter()
    with watched_memory() as peak:
        medium = Processor().image(picture(*size))
        prepared = time.perf_counter()
        marks = [prepared]
        encode(tower, medium, lambda: marks.append(time.perf_counter()))
        done = time.perf_counter()
    all_blocks = (done - prepared) + (K3.vt_num_hidden_layers - blocks) * (
        statistics.mean(b - a for a, b in pairwise(marks))
    )
    floor = (floor + products_floor(N, dtype)) / 2
    print(f"{size[0]}x{size[1]}: {N:,} patches, {medium.tokens:,} vectors, {dtype}")
    print(f"prepared in {prepared - begin:.2f} s")
    print(
        f"tower, {blocks} of {K3.vt_num_hidden_layers} blocks: {done - prepared:.1f} s; "
        f"all blocks: {all_blocks:.1f} s"
    )
    print(f"products alone, all blocks: {floor:.1f} s; share {floor / all_blocks:.0%}")
    print(
        f"memory above the model ({format_bytes(model_bytes)}): "
        f"{format_bytes(max(peak) - before)} of the process, "
        f"{format_bytes(mx.get_peak_memory() - model_bytes)} of arrays"
    )


def products_floor(N: int, dtype: mx.Dtype) -> float:
    """Seconds that the products of all blocks take by themselves, at rates measured now.

    Each is timed for a block of rows (attention's for 256 queries of all heads and 1024 keys),
    in the shapes that a well-cut tower would multiply.
    """
    c, rows = K3, 1024
    H, D = c.vt_num_attention_heads, c.qkv_hidden_size // c.vt_num_attention_heads
    hidden, inner = c.vt_hidden_size, c.vt_intermediate_size
    seconds = 0.0
    for wide, out in ((hidden, 3 * H * D), (H * D, hidden), (hidden, inner), (inner, hidden)):
        x, w = _random((rows, wide), dtype), _random((out, wide), dtype)
        seconds += _seconds(lambda x=x, w=w: x @ w.T) * N / rows
    queries, keys = min(256, N), min(1024, N)
    q, k = _random((H, queries, D), dtype), _random((H, keys, D), dtype)
    scores = _random((H, queries, keys), dtype)
    pairs = _seconds(lambda: q @ k.swapaxes(-1, -2)) + _seconds(lambda: scores @ k)
    seconds += pairs * (N / queries) * (N / keys)
    return seconds * c.vt_num_hidden_layers


def compare(sizes: list[tuple[int, int]]) -> None:
    """Largest differences from mlx-vlm's, relative to the largest number; exits 1 beyond 1e-4."""
    from mlx_vlm.models.kimi_k3 import config as theirs
    from mlx_vlm.models.kimi_k3.kimi_k3 import KimiK3MultiModalProjector
    from mlx_vlm.models.kimi_k3.processing_kimi_k3 import KimiK3ImageProcessor
    from mlx_vlm.models.kimi_k3.vision import VisionModel

    tower = random_tower(K3, mx.float32)
    weights = dict(tree_flatten(tower.parameters()))
    vision = VisionModel(theirs.VisionConfig())
    part = "vision_tower."
    mine = {k: v for k, v in weights.items() if k.startswith(part)}
    cut = {k.removeprefix(part): v for k, v in vision.sanitize(mine).items()}
    vision.load_weights(list(cut.items()))
    projector = KimiK3MultiModalProjector(
        theirs.ModelConfig(
            text_config=theirs.TextConfig(hidden_act="situ"), vision_config=theirs.VisionConfig()
        )
    )
    part = "mm_projector."
    projector.load_weights([(k.removeprefix(part), v) for k, v in weights.items() if part in k])
    ours = Processor()
    prepare = KimiK3ImageProcessor(
        transparent_bg_config=ours.transparent_bg_config,
        transparent_bg_fill_stage=ours.transparent_bg_fill_stage,
    )
    worst = 0.0
    for width, height in sizes:
        for image in (picture(width, height), picture(width, height, "RGBA")):
            medium, batch = ours.image(image), prepare(image)
            pixels, grid = mx.array(medium.values())[None], medium.grid
            given = np.array(batch["pixel_values"])
            assert tuple(batch["grid_thws"].tolist()[0]) == grid
            apart = np.abs(given - medium.values()).max()
            worst = max(worst, apart)
            print(f"{width}x{height} {image.mode}: prepared {apart:.1e}", end="")
            if image.mode == "RGBA":
                print()
                continue
            mine = tower(pixels, grid)[0]
            # mlx-vlm's own epsilon costs as much time again: small pictures show it, too.
            for eps in (NORM_EPS, 2**-7) if medium.tokens < 100 else (NORM_EPS,):
                _set_eps(vision, eps)
                yours = projector(vision(pixels[0].transpose(0, 2, 3, 1), grid_thws=[list(grid)]))
                error = (mx.abs(mine - yours).max() / mx.abs(yours).max()).item()
                print(f"; tower {error:.1e} with its norms' eps {eps:.2g}", end="", flush=True)
                worst = max(worst, error) if eps == NORM_EPS else worst
                mx.clear_cache()
            print()
    print(f"worst {worst:.1e}, allowed {TOLERANCE:.0e}")
    raise SystemExit(worst > TOLERANCE)


def _set_eps(vision, eps: float) -> None:
    for name, module in vision.named_modules():
        if "norm" in name.rpartition(".")[2]:
            module.eps = eps


def random_tower(config: VisionConfig, dtype: mx.Dtype) -> Vision:
    """A tower with random weights whose attention looks at some patches more than at others."""
    mx.random.seed(7)
    tower = Vision(config)
    weights = tree_map(
        lambda x: (1 + 0.1 * mx.random.normal(x.shape)) if x.ndim == 1 else x, tower.parameters()
    )
    for block in weights["vision_tower"]["encoder"]["blocks"]:
        block["wqkv"]["weight"] = block["wqkv"]["weight"] * 2
    tower.update(tree_map(lambda x: x.astype(dtype), weights))
    mx.eval(tower.parameters())
    return tower


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth colours and some noise; with an alpha channel, a ramp in it."""
    noise = np.random.default_rng(width * height)
    down, across = np.linspace(0, 9, height)[:, None], np.linspace(0, 7, width)
    layers = [np.sin(down * (i + 1) + across) * 90 + 128 for i in range(len(mode))]
    pixels = np.stack(layers, axis=-1) + noise.normal(0, 12, (height, width, len(mode)))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), mode)


def resident_bytes() -> int:
    """Of this process, now."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return mx.get_active_memory() + mx.get_cache_memory()


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Resident bytes, looked at 20 times a second meanwhile."""
    seen, over = [resident_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _seconds(f: Callable[[], mx.array], repeats: int = 5) -> float:
    mx.eval(f())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        mx.eval(f())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def _on_cpu() -> bool:
    return mx.default_device() == mx.cpu


if __name__ == "__main__":
    main()
