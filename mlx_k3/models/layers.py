"""Leaf modules every part of the stack shares: packed linear layers and the gated MLP."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from ..config import K3Config
from ..kernels import quantized_matmul, silu, situ
from .blocks import in_blocks


class Linear(nn.Linear):
    """``nn.Linear`` without bias whose quantized form also multiplies fast on a CPU."""

    def __init__(self, input_dims: int, output_dims: int):
        super().__init__(input_dims, output_dims, bias=False)

    def to_quantized(self, **how) -> "QuantizedLinear":
        return QuantizedLinear.from_linear(self, **how)


class QuantizedLinear(nn.QuantizedLinear):
    """``nn.QuantizedLinear`` through :func:`mlx_k3.kernels.quantized_matmul`."""

    def __call__(self, x: mx.array) -> mx.array:
        return quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


def dense_weight(linear: MultiLinear | QuantizedMultiLinear, dtype: mx.Dtype) -> mx.array:
    """The per-head weight ``[H, out, in]`` of mlx-lm's ``MultiLinear``, expanded if packed."""
    if not isinstance(linear, QuantizedMultiLinear):
        return linear.weight
    return mx.dequantize(
        linear.weight,
        linear.scales,
        linear.get("biases"),
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
        dtype=dtype,
    )


def gated_activation(
    config: K3Config, gate: mx.array, up: mx.array, *, use_host: bool | None = None
) -> mx.array:
    """SiTU-GLU (K3) or SwiGLU (Kimi Linear), as the configuration says."""
    if config.hidden_act == "situ":
        betas = config.activation_situ_beta, config.activation_situ_linear_beta
        return situ(gate, up, *betas, use_host=use_host)
    return silu(gate.astype(mx.float32), use_host=use_host).astype(up.dtype) * up


class MLP(nn.Module):
    """``down(act(gate(x), up(x)))``: the dense MLP and the shared experts."""

    def __init__(self, config: K3Config, intermediate_size: int):
        super().__init__()
        self.config = config
        self.gate_proj = Linear(config.hidden_size, intermediate_size)
        self.up_proj = Linear(config.hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """``[B, T, hidden]`` -> ``[B, T, hidden]``."""
        return in_blocks(self._block, x)

    def _block(self, x):
        return self.down_proj(gated_activation(self.config, self.gate_proj(x), self.up_proj(x)))
