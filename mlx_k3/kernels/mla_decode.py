"""One token's attention to latents, all heads at once, by Hopper's matrix products.

Owns the case that a long conversation spends its time in on an NVIDIA GPU of that kind. What MLX's
own products do there takes several times as long: scores and weights of all heads go through
memory, and the latents are read twice. Knows nothing of projections and of how latents are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .build import Kernel, backend

HEADS = (32, 96)
RANK, SHARED = 512, 64
TILE_KEYS = 64
GROUPS = 132  # as many as such a GPU has multiprocessors; fewer of these are slower, and right
LEAST_ROWS = 1024  # below, there is little to gain, and a group's queries cost as much as its keys
MOST_BLOCKS = 128  # of the cache
BLOCK_ROWS = 8192  # of a cache's blocks; a kernel is compiled for each other length
THREADS = 256
MERGE_THREADS = 256

Blocks = Sequence[tuple[mx.array, mx.array]]


@dataclass(frozen=True, eq=False)
class _DecodeKernel(Kernel):
    """The kernel for so many blocks of latents, each of which is an input."""

    blocks: int = 1

    def parts(self) -> tuple[str, str]:
        helpers, body = super().parts()
        lists = (", ".join(f"{name}_{i}" for i in range(self.blocks)) for name in _BLOCK_NAMES)
        latents, keys = lists
        defined = f"#define LATENT_BLOCKS {latents}\n#define KEY_BLOCKS {keys}\n"
        return defined + helpers, body


_BLOCK_NAMES = ("latents", "keys")
_MERGE = Kernel("mla_merge", inputs=("parts", "about"), outputs=("y",))


def shared_bytes(heads: int) -> int:
    """Memory of a group: queries, parts of tiles, weights, a few numbers a head, flags."""
    return 9 * heads * 128 + 13 * 8192 + heads * 128 + 6 * heads * 4 + 13 * 8


@cache
def _kernel(heads: int, blocks: int) -> Kernel:
    names = (f"{name}_{i}" for name in _BLOCK_NAMES for i in range(blocks))
    return _DecodeKernel(
        "mla_decode",
        inputs=("q_latent", "q", "place", *names),
        outputs=("y", "about"),
        needs=("hopper",),
        shared_bytes=shared_bytes(heads),
        blocks=blocks,
    )


def mla_decode_pays(q: mx.array, blocks: Blocks, rank: int) -> bool:
    """Whether :func:`mla_decode` takes these, on this device; else MLX's products are the way."""
    rows = [latents.shape[2] for latents, _ in blocks]
    B, H, T, _ = q.shape
    return (
        backend() == "cuda"
        and _is_hopper()
        and (B, T) == (1, 1)
        and H in HEADS
        and (rank, blocks[0][1].shape[-1]) == (RANK, SHARED)
        and {q.dtype, *(x.dtype for x in blocks[0])} == {mx.bfloat16}
        and sum(rows) >= LEAST_ROWS
        and len(rows) <= MOST_BLOCKS
        and all(n == rows[0] for n in rows[:-1])
        and (len(rows) == 1 or rows[0] % TILE_KEYS == 0)
        and _kernel(H, 1).runs
    )


@cache
def _is_hopper() -> bool:
    return mx.device_info().get("compute_capability_major") == 9


def mla_decode(q: mx.array, q_latent: mx.array, blocks: Blocks, tokens: int) -> mx.array:
    """``softmax([q_latent, q's last 64] [latents, keys]^T) latents``, in float32 but for products.

    Args:
        q: ``[1, H, 1, width]``, of which the last 64 numbers meet the shared keys; scaled.
        q_latent: ``[1, H, 1, 512]``, what meets the latents; scaled.
        blocks: latents ``[1, 1, rows, 512]`` and shared keys ``[1, 1, rows, 64]``; all but the last
            of one length.
        tokens: how many of all rows there are; what stands behind them does not matter.

    Returns:
        ``[1, H, 1, 512]`` in ``q``'s dtype.
    """
    H, width = q.shape[1], q.shape[-1]
    # Whole numbers of blocks are compiled for: powers of two, and the last one more than once.
    count = 1 << (len(blocks) - 1).bit_length()
    padded = [*blocks, *[blocks[-1]] * (count - len(blocks))]
    groups = min(GROUPS, -(-tokens // TILE_KEYS))
    # What Python makes, such as an array of a number, costs the device more than a view.
    place = blocks[0][0].reshape(-1)[:tokens]
    parts, about = _kernel(H, count)(
        *(q_latent, q, place),
        *(latents for latents, _ in padded),
        *(keys for _, keys in padded),
        outputs=[((groups, RANK, H), mx.bfloat16), ((groups, 2, H), mx.float32)],
        groups=(groups, 1, 1),
        threads=THREADS,
        template={
            "HEADS": H,
            "Q_WIDTH": width,
            "BLOCK_ROWS": _block_rows(blocks),
        },
    )
    return merge(parts, about, q.dtype)


def _block_rows(blocks: Blocks) -> int:
    """A length that tells in which block a row is; the same for a single one that still grows."""
    rows = blocks[0][0].shape[2]
    if len(blocks) > 1:
        return rows
    return BLOCK_ROWS if rows <= BLOCK_ROWS else 1 << 30


def merge(parts: mx.array, about: mx.array, dtype: mx.Dtype) -> mx.array:
    """``[1, H, 1, 512]`` from sums ``[G, 512, H]`` and their exponents and totals ``[G, 2, H]``."""
    H = parts.shape[-1]
    (y,) = _MERGE(
        *(parts, about),
        outputs=[((1, H, 1, RANK), dtype)],
        groups=(2 * H, 1, 1),
        threads=MERGE_THREADS,
        template={"T": dtype, "HEADS": H},
    )
    return y


def mla_decode_reference(q: mx.array, q_latent: mx.array, blocks: Blocks, tokens: int) -> mx.array:
    """:func:`mla_decode` in plain MLX ops."""
    latents, keys = (
        mx.concatenate(list(part), axis=2)[:, :, :tokens].astype(mx.float32)
        for part in zip(*blocks, strict=True)
    )
    q_key = q[..., -SHARED:].astype(mx.float32)
    scores = q_latent.astype(mx.float32) @ latents.swapaxes(-1, -2) + q_key @ keys.swapaxes(-1, -2)
    return (mx.softmax(scores, axis=-1) @ latents).astype(q.dtype)
