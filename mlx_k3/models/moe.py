"""Stable LatentMoE: router, routed experts in a latent, shared experts beside them."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..config import K3Config
from ..kernels import route
from .bank import ResidentBank
from .layers import MLP, Linear

LOOK_AHEAD = 6  # of a guess of 16, the best 6 come true most often


class KimiSparseMoE(nn.Module):
    """Router, bank, latent projections and shared experts of one layer."""

    def __init__(self, config: K3Config, num_experts: int):
        super().__init__()
        self.config = config
        # Set by who keeps experts elsewhere: a guess of the next MoE layer's experts from x.
        self.look_ahead: Callable[[mx.array], mx.array] | None = None
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
        shared = self.shared_experts(x) if "shared_experts" in self else None
        z = self.routed_expert_down_proj(x) if self.config.has_latent_moe else x
        ahead = None if self.look_ahead is None else self.look_ahead(x)
        y = self.switch_mlp(z, indices, weights, shared, ahead)
        if "routed_expert_norm" in self:
            y = self.routed_expert_norm(y)
        if self.config.has_latent_moe:
            y = self.routed_expert_up_proj(y)
        return y if shared is None else y + shared

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The chosen experts ``[B, T, k]`` and their weights, scored in float32."""
        return self._route(x, self.config.num_experts_per_token)

    def guess(self, x: mx.array) -> mx.array:
        """Ids ``[B, T, n]`` this layer will probably choose, from an earlier layer's ``x``."""
        return self._route(x, min(LOOK_AHEAD, self.config.num_experts_per_token))[0]

    def _route(self, x, top_k):
        config = self.config
        return route(
            self.gate(x.astype(mx.float32)),
            self.e_score_correction_bias,
            top_k,
            activation=config.moe_router_activation_func,
            renormalize=config.moe_renormalize,
            scale=config.routed_scaling_factor,
            n_group=config.num_expert_group,
            topk_group=config.topk_group,
        )
