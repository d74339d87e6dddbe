"""The KDA layer: short convolutions, gate, delta rule, gated output (Kimi Linear report)."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..config import K3Config
from ..kernels import kda, kda_log_decay, l2norm, short_conv, sigmoid
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
        heads = (B, T, self.num_heads, self.head_dim)
        conv_state, state = (None, None) if cache is None else (cache[0], cache[1])
        lengths = None if cache is None else cache.lengths

        qkv, conv_state = short_conv(self.qkv_proj(x), self.qkv_conv, conv_state, mask, lengths)
        qkv = qkv.reshape(B, T, 3, self.num_heads, self.head_dim)
        qk = l2norm(qkv[:, :, :2])
        output, state = self.recurrence(
            qk[:, :, 0] * self.head_dim**-0.5,
            qk[:, :, 1],
            qkv[:, :, 2],
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

        gate = self.g_proj(x) if "g_proj" in self else self.g_b_proj(self.g_a_proj(x))
        output = self.o_norm(output) * sigmoid(gate.reshape(heads).astype(mx.float32))
        return self.o_proj(output.reshape(B, T, -1).astype(x.dtype))
