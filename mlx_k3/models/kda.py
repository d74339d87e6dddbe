"""The KDA layer: short convolutions, gate, delta rule, gated output (Kimi Linear report)."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..config import K3Config
from ..kernels import gated_rms_norm, kda, kda_log_decay
from ..kernels.kda_conv import kda_conv
from ..kernels.kda_decode import MOST_TOKENS, has_kernel, kda_decode
from .layers import Linear


class KimiDeltaAttention(nn.Module):
    """Linear attention with a state of ``[heads, V, K]`` float32 and three conv inputs.

    Its cache holds two arrays: the conv inputs ``[B, 3, 3 H D]`` of queries, keys and values side
    by side, and the state ``[B, H, D, D]``.
    """

    recurrence = staticmethod(kda)

    def __init__(self, config: K3Config):
        super().__init__()
        hidden, H, D = config.hidden_size, config.kda_num_heads, config.kda_head_dim
        self.num_heads, self.head_dim = H, D
        self.lower_bound = config.gate_lower_bound
        self.qkv_proj = Linear(hidden, 3 * H * D)
        self.qkv_conv = mx.zeros((3 * H * D, config.short_conv_kernel_size))
        self.f_a_proj = Linear(hidden, D)
        self.f_b_proj = Linear(D, H * D)
        self.b_proj = Linear(hidden, H)
        if config.use_full_rank_gate:
            self.g_proj = Linear(hidden, H * D)
        else:
            self.g_a_proj = Linear(hidden, D)
            self.g_b_proj = Linear(D, H * D)
        self.A_log = mx.zeros((H,))
        self.dt_bias = mx.zeros((H * D,))
        self.o_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.o_proj = Linear(H * D, hidden)

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: ArraysCache | None = None
    ) -> mx.array:
        """``[B, T, hidden]`` -> ``[B, T, hidden]``; ``mask [B, T]`` is False at padding."""
        B, T, _ = x.shape
        lengths = None if cache is None else cache.lengths
        few = cache is not None and lengths is None and T <= MOST_TOKENS
        if few and has_kernel(self.head_dim):
            return self._few_tokens(x, mask, cache)
        heads = (B, T, self.num_heads, self.head_dim)
        conv_state, state = (None, None) if cache is None else (cache[0], cache[1])

        q, k, v, conv_state = kda_conv(
            self.qkv_proj(x), self.qkv_conv, conv_state, self.num_heads, mask, lengths
        )
        output, state = self.recurrence(
            *(q, k, v),
            kda_log_decay(
                self.f_b_proj(self.f_a_proj(x)).reshape(heads),
                self.A_log,
                self.dt_bias.reshape(self.num_heads, self.head_dim),
                self.lower_bound,
            ),
            mx.sigmoid(self.b_proj(x).astype(mx.float32)),
            state,
            mask,
        )
        if cache is not None:
            cache[0], cache[1] = conv_state, state
            cache.advance(T)

        gate = self._output_gate(x).reshape(heads)
        output = gated_rms_norm(output, gate, self.o_norm.weight, self.o_norm.eps)
        return self.o_proj(output.reshape(B, T, -1))

    def _few_tokens(self, x: mx.array, mask: mx.array | None, cache: ArraysCache) -> mx.array:
        """:meth:`__call__` with all between the projections in one kernel."""
        B, T, _ = x.shape
        H, D, W = self.num_heads, self.head_dim, self.qkv_conv.shape[-1]
        conv_state, state = cache[0], cache[1]
        y, cache[0], cache[1] = kda_decode(
            self.qkv_proj(x),
            mx.zeros((B, W - 1, 3 * H * D), x.dtype) if conv_state is None else conv_state,
            self.qkv_conv,
            self.f_b_proj(self.f_a_proj(x)),
            self.A_log,
            self.dt_bias,
            self.b_proj(x),
            self._output_gate(x),
            self.o_norm.weight,
            mx.zeros((B, H, D, D)) if state is None else state,
            lower_bound=self.lower_bound,
            eps=self.o_norm.eps,
            mask=mask,
        )
        cache.advance(T)
        return self.o_proj(y)

    def _output_gate(self, x):
        return self.g_proj(x) if "g_proj" in self else self.g_b_proj(self.g_a_proj(x))
