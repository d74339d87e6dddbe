"""Stable LatentMoE: router, routed experts in a latent, shared experts beside them."""

import mlx.core as mx
import mlx.nn as nn

from ..config import K3Config
from ..kernels import route
from .bank import ResidentBank
from .layers import MLP, Linear


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
