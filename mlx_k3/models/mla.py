"""Gated multi-head latent attention (MLA) without rotary embedding.

The cache holds what all heads share: the normalised latent and the 64 shared key dimensions. How
queries meet them in bounded memory is :mod:`.latent_attention`'s; only training, which wants
gradients, expands keys and values of the whole text.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear

from ..config import K3Config
from ..kernels import sigmoid, softmax
from .latent_attention import hide, latent_attention
from .latent_cache import BatchLatentCache, LatentCache, Latents
from .layers import Linear, dense_weight

INNER_NORM_EPS = 1e-6  # of both latent norms, whatever rms_norm_eps says
QUERY_BLOCK = 512  # in training


class KimiMLAAttention(nn.Module):
    """MLA with an optional low-rank query (q-LoRA) and an optional sigmoid output gate."""

    def __init__(self, config: K3Config):
        super().__init__()
        hidden, H = config.hidden_size, config.num_attention_heads
        self.num_heads = H
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent_dim, self.v_dim = config.kv_lora_rank, config.v_head_dim
        q_dim = self.nope_dim + self.rope_dim
        self.scale = q_dim**-0.5
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, H * q_dim)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=INNER_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, H * q_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent_dim + self.rope_dim)
        self.kv_a_layernorm = nn.RMSNorm(self.latent_dim, eps=INNER_NORM_EPS)
        self.embed_q = MultiLinear(self.nope_dim, self.latent_dim, H)
        self.unembed_out = MultiLinear(self.latent_dim, self.v_dim, H)
        if config.mla_use_output_gate:
            self.g_proj = Linear(hidden, H * self.v_dim)
        self.o_proj = Linear(H * self.v_dim, hidden)

    def __call__(
        self, x: mx.array, cache: LatentCache | BatchLatentCache | None = None
    ) -> mx.array:
        """``[B, L, hidden]`` -> ``[B, L, hidden]``; each token looks at itself and before."""
        B, L, _ = x.shape
        q = self._queries(x)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.latent_dim], axis=-1)
        latent, k_rope = self.kv_a_layernorm(latent)[:, None], k_rope[:, None]
        if cache is None and self.training:
            output = self._attend(q, latent, k_rope)
        else:
            rows = latent, k_rope
            latents = Latents.of(rows) if cache is None else cache.append(*rows)
            output = latent_attention(q, latents, self.embed_q, self.unembed_out)
        output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
        if "g_proj" in self:
            output = output * sigmoid(self.g_proj(x).astype(mx.float32)).astype(x.dtype)
        return self.o_proj(output)

    def _queries(self, x):
        """``[B, H, L, nope + rope]``, scaled."""
        B, L, _ = x.shape
        if "q_proj" in self:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return (q * self.scale).reshape(B, L, self.num_heads, -1).transpose(0, 2, 1, 3)

    def _attend(self, q, latent, k_rope):
        """Differentiable attention of a whole text, without a cache."""
        L = q.shape[2]
        q_nope, q_rope = mx.split(q, [self.nope_dim], axis=-1)
        k = latent @ dense_weight(self.embed_q, latent.dtype)
        v = latent @ dense_weight(self.unembed_out, latent.dtype).swapaxes(-1, -2)
        outputs = []
        for start in range(0, L, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, L)  # no query of this block looks further
            scores = q_nope[:, :, start:stop] @ k[:, :, :stop].swapaxes(-1, -2)
            scores = scores + q_rope[:, :, start:stop] @ k_rope[:, :, :stop].swapaxes(-1, -2)
            weights = softmax(hide(scores, start, 0, None)).astype(v.dtype)
            outputs.append(weights @ v[:, :, :stop])
        return mx.concatenate(outputs, axis=2)
