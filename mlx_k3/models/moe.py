"""Stable LatentMoE: router, routed experts in a latent, shared experts beside them.

The routed experts are behind one call, the **bank**: ``bank(z, indices, weights)``. This file has
the resident bank, all experts stacked in memory; another bank may take its place and the layer
does not know.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from ..config import K3Config
from ..kernels import quantized_matmul, route
from ..kernels.quantized import expand, expanding_pays
from .layers import MLP, Linear, gated_activation

GROUP_FROM = 64  # token-expert pairs from which a CPU works expert by expert


class ResidentBank(SwitchGLU):
    """All experts of a layer: ``{gate,up,down}_proj.weight [E, out, in]``, packed or not."""

    def __init__(self, config: K3Config, num_experts: int):
        super().__init__(
            config.expert_dim,
            config.moe_intermediate_size,
            num_experts,
            activation=lambda up, gate: gated_activation(config, gate, up),
        )
        self._expanded: dict[str, mx.array] = {}

    def keep_expanded(self) -> None:
        """Keep the experts in float32 beside the packed ones, for prefill on a CPU."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            if isinstance(self[name], QuantizedSwitchLinear):
                self._expanded[name] = expand(*_packed(self[name]), mx.float32, **_how(self[name]))

    def __call__(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """The experts' weighted sum.

        Args:
            z: ``[..., D]``, what the experts read.
            indices: ``[..., k]``, the chosen experts.
            weights: ``[..., k]`` float32.

        Returns:
            ``[..., D]`` in ``z``'s dtype.
        """
        by_expert = mx.default_device() == mx.cpu and indices.size >= GROUP_FROM
        if by_expert and not self.training:
            y = run_by_expert(self, z, np.array(indices))
        else:
            y = super().__call__(z, indices)
        return (weights[..., None, :] @ y.astype(mx.float32)).squeeze(-2).astype(z.dtype)


def run_by_expert(bank: SwitchGLU, z: mx.array, indices: np.ndarray) -> mx.array:
    """The chosen experts' outputs ``[..., k, D]``, one expert's rows at a time.

    The way for CPUs, where a packed product costs the same for every row: an expert with many
    rows is expanded once and multiplied with BLAS.
    """
    order = np.argsort(indices.ravel(), kind="stable")
    experts, starts = np.unique(indices.ravel()[order], return_index=True)
    rows = z.reshape(-1, z.shape[-1])[mx.array(order // indices.shape[-1])]
    outputs = []
    for expert, start, stop in zip(
        experts.tolist(), starts, [*starts[1:], len(order)], strict=True
    ):
        outputs.append(run_expert(bank, rows[int(start) : int(stop)], expert))
    unsort = np.empty_like(order)
    unsort[order] = np.arange(len(order))
    y = mx.concatenate(outputs)[mx.array(unsort)]
    return y.reshape(*indices.shape, -1)


def run_expert(bank: SwitchGLU, x: mx.array, expert: int) -> mx.array:
    """One expert's MLP on ``x [rows, D]``."""
    gate, up = _project(bank, "gate_proj", x, expert), _project(bank, "up_proj", x, expert)
    return _project(bank, "down_proj", bank.activation(up, gate), expert)


def _project(bank: SwitchGLU, name: str, x: mx.array, expert: int) -> mx.array:
    linear = bank[name]
    if not isinstance(linear, QuantizedSwitchLinear):
        return x @ linear.weight[expert].T
    # The same product either way: expanded now, or once at load.
    if name in bank._expanded and expanding_pays(len(x), linear.mode):
        return x @ bank._expanded[name][expert].T
    packed = (None if part is None else part[expert] for part in _packed(linear))
    return quantized_matmul(x, *packed, **_how(linear))


def _packed(linear: QuantizedSwitchLinear) -> tuple[mx.array, mx.array, mx.array | None]:
    return linear.weight, linear.scales, linear.get("biases")


def _how(linear: QuantizedSwitchLinear) -> dict[str, int | str]:
    return {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}


class KimiSparseMoE(nn.Module):
    """Router, bank, latent projections and shared experts of one layer."""

    def __init__(self, config: K3Config, num_experts: int):
        super().__init__()
        self.config = config
        hidden, latent = config.hidden_size, config.expert_dim
        self.gate = Linear(hidden, num_experts)
        self.e_score_correction_bias = mx.zeros((num_experts,))
        self.switch_mlp = ResidentBank(config, num_experts)
        if config.has_latent_moe:
            self.routed_expert_down_proj = Linear(hidden, latent)
            self.routed_expert_up_proj = Linear(latent, hidden)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = nn.RMSNorm(latent, eps=config.rms_norm_eps)
        if config.num_shared_experts:
            self.shared_experts = MLP(
                config, config.moe_intermediate_size * config.num_shared_experts
            )

    def __call__(self, x: mx.array) -> mx.array:
        """``[B, T, hidden]`` -> ``[B, T, hidden]``."""
        indices, weights = self.route(x)
        z = self.routed_expert_down_proj(x) if self.config.has_latent_moe else x
        y = self.switch_mlp(z, indices, weights)
        if "routed_expert_norm" in self:
            y = self.routed_expert_norm(y)
        if self.config.has_latent_moe:
            y = self.routed_expert_up_proj(y)
        return y + self.shared_experts(x) if "shared_experts" in self else y

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The chosen experts ``[B, T, k]`` and their weights, scored in float32."""
        config = self.config
        return route(
            self.gate(x.astype(mx.float32)),
            self.e_score_correction_bias,
            config.num_experts_per_token,
            activation=config.moe_router_activation_func,
            renormalize=config.moe_renormalize,
            scale=config.routed_scaling_factor,
            n_group=config.num_expert_group,
            topk_group=config.topk_group,
        )
