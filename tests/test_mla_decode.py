"""The kernel of one token's attention to latents, on a machine that plays Hopper, and its merge."""

import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear

from mlx_k3.kernels import mla_decode
from mlx_k3.kernels.build import SOURCE
from mlx_k3.kernels.mla_decode import RANK, SHARED, mla_decode_reference
from mlx_k3.models import latent_cache
from mlx_k3.models.latent_attention import latent_attention
from mlx_k3.models.latent_cache import LatentCache

from .support import cuda, hopper
from .support.measure import relative_error
from .support.metal import available, with_kernels

needs_clang = pytest.mark.skipif(not available(), reason="no clang++ here")
needs_nvcc = pytest.mark.skipif(not cuda.available(), reason="no nvcc here")

WIDTH = 192
TOLERANCE = 1.2e-2  # weights, each group's sums and the result are rounded to bfloat16
LATE = {"late products": (True, False), "late copies": (False, True)}


def sixteen(*shape: int, scale: float = 1.0) -> mx.array:
    return (scale * mx.random.normal(shape)).astype(mx.bfloat16)


def some(heads: int, tokens: int, rows: int, scale: float = 0.1):
    """Queries, and blocks of so many rows; what stands behind the tokens is no number."""
    blocks = []
    for first in range(0, tokens, rows):
        real = mx.arange(first, first + rows)[:, None] < tokens
        parts = (sixteen(1, 1, rows, width) for width in (RANK, SHARED))
        blocks.append(tuple(mx.where(real, part, mx.array(mx.nan, part.dtype)) for part in parts))
    return sixteen(1, heads, 1, WIDTH, scale=scale), sixteen(1, heads, 1, RANK, scale=scale), blocks


@pytest.fixture
def small(monkeypatch):
    """Two groups, so that each has several tiles."""
    monkeypatch.setattr(mla_decode, "GROUPS", 2)
    monkeypatch.setattr(mla_decode, "BLOCK_ROWS", 64)


@needs_clang
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(
    ("heads", "tokens", "rows"),
    [(96, 700, 768), (96, 513, 256), (32, 1, 64), (32, 64, 64), (32, 65, 64), (32, 700, 192)],
)
def test_it_is_attention(small, heads, tokens, rows, late):
    mx.random.seed(tokens)
    inputs = some(heads, tokens, rows)
    want = mla_decode_reference(*inputs, tokens).astype(mx.float32)
    with hopper.playing(*LATE[late]):
        got = mla_decode.mla_decode(*inputs, tokens).astype(mx.float32)
    assert got.shape == (1, heads, 1, RANK)
    assert relative_error(got, want) < TOLERANCE


@needs_clang
def test_scores_that_rise_and_lie_far_apart(small):
    """Each tile has a higher score than all before it: what was summed up fades."""
    mx.random.seed(0)
    tokens = 640
    q, q_latent, blocks = some(32, tokens, 640, scale=0.5)
    rising = mx.linspace(0.2, 4, 640)[:, None].astype(mx.bfloat16)
    blocks = [(latents * rising, keys) for latents, keys in blocks]
    want = mla_decode_reference(q, q_latent, blocks, tokens).astype(mx.float32)
    with hopper.playing(True, False):
        got = mla_decode.mla_decode(q, q_latent, blocks, tokens).astype(mx.float32)
    assert relative_error(got, want) < TOLERANCE


# What is taken out of the kernel, and when it shows.
FAULTS = {
    "flag_wait(tiles.flag(n), n / RING % 2);": ("", "late copies"),
    "copies_wait();": ("", "late copies"),
    "products_wait<4>();": ("products_wait<8>();", "late products"),
    "queries);\n  products_wait<0>();": ("queries);", "late products"),
    "queries);\n    products_wait<0>();": ("queries);", "late products"),
}


@needs_clang
@pytest.mark.parametrize("fault", FAULTS)
def test_every_wait_is_needed(small, fault, tmp_path, monkeypatch):
    """The machine finds a kernel that waits for less; else it would prove nothing."""
    instead, late = FAULTS[fault]
    text = (SOURCE / "mla_decode.h").read_text()
    assert text.count(fault) == 1
    (tmp_path / "mla_decode.h").write_text(text.replace(fault, instead))
    whole = mla_decode._kernel
    monkeypatch.setattr(mla_decode, "_kernel", lambda *a: replace(whole(*a), folder=tmp_path))
    mx.random.seed(1)
    inputs = some(96, 700, 768)
    want = mla_decode_reference(*inputs, 700).astype(mx.float32)
    with hopper.playing(*LATE[late]):
        got = mla_decode.mla_decode(*inputs, 700).astype(mx.float32)
    error = relative_error(got, want)
    assert np.isnan(error) or error > 2 * TOLERANCE


@pytest.mark.parametrize("groups", [1, 3, 132])
@pytest.mark.parametrize("heads", [32, 96])
def test_merging(heads, groups):
    mx.random.seed(groups)
    parts, sums = sixteen(groups, RANK, heads), mx.random.uniform(1, 9, (groups, 1, heads))
    exponents = 30 * mx.random.normal((groups, 1, heads))
    with with_kernels():
        got = mla_decode.merge(parts, mx.concatenate([exponents, sums], 1), mx.float32)
    by = np.exp2(np.array(exponents, np.float64) - np.array(exponents.max(0)))
    want = (np.array(parts.astype(mx.float32)) * by).sum(0) / (np.array(sums) * by).sum(0)
    assert relative_error(got[0, :, 0], mx.array(want.T.astype(np.float32))) < 1e-5


@needs_clang
def test_latent_attention_takes_it_for_one_token(small, monkeypatch):
    """From a cache in blocks, as it grew and as it is taken up again; else the tiles."""
    monkeypatch.setattr(mla_decode, "_is_hopper", lambda: True)
    monkeypatch.setattr(mla_decode, "LEAST_ROWS", 64)
    monkeypatch.setattr(latent_cache, "BLOCK_ROWS", 128)
    mx.random.seed(2)
    embed_q, unembed_out = MultiLinear(128, RANK, 32), MultiLinear(RANK, 128, 32)
    for linear in (embed_q, unembed_out):
        linear.weight = linear.weight.astype(mx.bfloat16)
    cache, again, q = LatentCache(), LatentCache(), sixteen(1, 32, 1, WIDTH, scale=0.1)
    cache.append(sixteen(1, 1, 300, RANK), sixteen(1, 1, 300, SHARED))
    again.set_rows(*cache.rows(0, 300))
    row = sixteen(1, 1, 1, RANK), sixteen(1, 1, 1, SHARED)
    latents = cache.append(*row)
    want = latent_attention(q, latents, embed_q, unembed_out).astype(mx.float32)
    for held in (latents, again.append(*row)):
        with hopper.playing(True, False) as launches:
            got = latent_attention(q, held, embed_q, unembed_out).astype(mx.float32)
        assert [launch.kernel.name for launch in launches] == ["mla_decode", "mla_merge"]
        assert relative_error(got, want) < TOLERANCE


@needs_nvcc
@pytest.mark.parametrize("heads", [32, 96])
def test_cuda_text_compiles(heads):
    """Without a value of a thread in memory, and with products that nothing serialises."""
    with cuda.compiling() as told:
        mx.eval(mla_decode.mla_decode(*some(heads, 128, 64), 128))
    assert len(told) == 2
    for text in told:
        assert "0 bytes spill stores" in text and "erializ" not in text
        assert int(re.search(r"Used (\d+) registers", text)[1]) * 256 <= 65536
    assert mla_decode.shared_bytes(heads) <= 232448  # what a group may have
