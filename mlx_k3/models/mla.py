"""Gated multi-head latent attention (MLA) without rotary embedding.

The cache holds what all heads share: the normalised latent and the 64 shared key dimensions. A
single new token attends in the latent itself ("absorbed": the key and value up-projections move
to the query and the output); a prompt expands keys and values per head, block by block of
queries, so that the scores of a long prompt never exist at once.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.mla import MultiLinear

from ..config import K3Config
from ..kernels import sigmoid, softmax
from .layers import Linear, dense_weight

INNER_NORM_EPS = 1e-6  # of both latent norms, whatever rms_norm_eps says
QUERY_BLOCK = 512


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
        self, x: mx.array, mask: mx.array | None = None, cache: KVCache | None = None
    ) -> mx.array:
        """``[B, L, hidden]`` -> ``[B, L, hidden]``; ``mask [.., L, S]`` is True where to look."""
        B, L, _ = x.shape
        q_nope, q_rope = self._queries(x)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.latent_dim], axis=-1)
        latent, k_rope = self.kv_a_layernorm(latent)[:, None], k_rope[:, None]
        if cache is not None:
            latent, k_rope = cache.update_and_fetch(latent, k_rope)

        if L == 1:
            output = self._attend(self.embed_q(q_nope), q_rope, latent, latent, k_rope, mask)
            output = self.unembed_out(output)
        else:
            output = self._prefill(q_nope, q_rope, latent, k_rope, mask)

        output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
        if "g_proj" in self:
            output = output * sigmoid(self.g_proj(x).astype(mx.float32)).astype(x.dtype)
        return self.o_proj(output)

    def _queries(self, x):
        """The two parts of the queries, ``[B, H, L, nope]`` and ``[B, H, L, rope]``."""
        B, L, _ = x.shape
        if "q_proj" in self:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(B, L, self.num_heads, -1).transpose(0, 2, 1, 3)
        return mx.split(q, [self.nope_dim], axis=-1)

    def _prefill(self, q_nope, q_rope, latent, k_rope, mask):
        L, S = q_nope.shape[2], latent.shape[2]
        k = latent @ dense_weight(self.embed_q, latent.dtype)
        v = latent @ dense_weight(self.unembed_out, latent.dtype).swapaxes(-1, -2)
        outputs = []
        for start in range(0, L, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, L))
            seen = S - L + rows.stop  # no query of this block looks further
            outputs.append(
                self._attend(
                    q_nope[:, :, rows],
                    q_rope[:, :, rows],
                    k[:, :, :seen],
                    v[:, :, :seen],
                    k_rope[:, :, :seen],
                    None if mask is None else mask[..., rows, :seen],
                )
            )
        return mx.concatenate(outputs, axis=2)

    def _attend(self, q, q_rope, k, v, k_rope, mask):
        """Softmax attention whose scores are ``(q k^T + q_rope k_rope^T) * scale``."""
        rope_scores = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2)
        if mask is not None:
            lowest = mx.array(mx.finfo(rope_scores.dtype).min, rope_scores.dtype)
            rope_scores = mx.where(mask, rope_scores, lowest)
        if self.training or mx.default_device() == mx.cpu:
            # On a CPU, what MLX does there too, but for its softmax, which is slow; in training,
            # because the mask's gradient is half of the keys'.
            scores = (q * self.scale) @ k.swapaxes(-1, -2) + rope_scores
            return softmax(scores.astype(mx.float32)).astype(v.dtype) @ v
        return scaled_dot_product_attention(q, k, v, cache=None, scale=self.scale, mask=rope_scores)
