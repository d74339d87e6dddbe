"""The text model of Kimi K3 and Kimi Linear, in mlx-lm's model protocol.

``model(ids, cache=cache)``, ``model.layers``, ``model.make_cache()`` and ``model.sanitize()`` are
what mlx-lm's generation, samplers, caches and batching ask for. Parameter names are mlx-lm's too,
less the ``language_model.`` that K3's files put in front.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_ssm_mask
from mlx_lm.models.cache import ArraysCache

from ..config import K3Config
from ..kernels import without_gradients
from .blocks import BLOCK_TOKENS, token_blocks
from .kda import KimiDeltaAttention
from .latent_cache import LatentCache
from .layers import MLP, Linear
from .mla import KimiMLAAttention
from .moe import KimiSparseMoE
from .residual import ResidualStream
from .state import RecordedState
from .weights import sanitize


class DecoderLayer(nn.Module):
    """Attention (KDA or MLA), then an MLP (dense or mixture of experts), on a residual stream."""

    def __init__(self, config: K3Config, layer: int):
        super().__init__()
        self.is_kda = layer in config.kda_layers
        self.self_attn = KimiDeltaAttention(config) if self.is_kda else KimiMLAAttention(config)
        experts = config.expert_counts[layer]
        self.mlp = (
            KimiSparseMoE(config, experts) if experts else MLP(config, config.intermediate_size)
        )
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.starts_block = False
        if config.attn_res_block_size is not None:
            self.starts_block = layer % config.attn_res_block_size == 0
            self.self_attention_res = mx.zeros((config.hidden_size,))
            self.mlp_res = mx.zeros((config.hidden_size,))

    def __call__(
        self, stream: ResidualStream, mask: mx.array | None = None, cache: Any = None
    ) -> None:
        """Run the layer; the residual stream takes up what it adds.

        ``mask [B, T]`` is False at padding, for KDA; MLA's cache knows where a text begins.
        """
        x = stream.read(self.get("self_attention_res"), self.input_layernorm)
        if self.starts_block:
            stream.start_block()
        stream.add(self._attend(x, mask, cache))
        stream.add(self.mlp(stream.read(self.get("mlp_res"), self.post_attention_layernorm)))

    def _attend(self, x, mask, cache):
        """Attention; a long prompt continues its own cache block by block."""
        T = x.shape[1]
        cuts = cache.cuts(T) if isinstance(cache, RecordedState) else []
        if cache is None or (T <= BLOCK_TOKENS and not cuts):
            return self._attend_block(x, mask, cache)
        outputs = []
        for block in token_blocks(T, cuts):
            part = None if mask is None else mask[:, block]
            outputs.append(self._attend_block(x[:, block], part, cache))
        return mx.concatenate(outputs, axis=1)

    def _attend_block(self, x, mask, cache):
        return self.self_attn(x, mask, cache) if self.is_kda else self.self_attn(x, cache)


class KimiModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: K3Config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res = mx.zeros((config.hidden_size,))

    def __call__(
        self,
        ids: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Token ids ``[B, T]`` (or embeddings ``[B, T, hidden]``) -> normed states."""
        x = self.embed_tokens(ids) if input_embeddings is None else input_embeddings
        caches = cache or [None] * len(self.layers)
        states = (c for layer, c in zip(self.layers, caches, strict=True) if layer.is_kda)
        padding = create_ssm_mask(x, next(states, None))
        stream = ResidualStream(x, self.eps)
        with without_gradients(not self.training):
            for layer, layer_cache in zip(self.layers, caches, strict=True):
                layer(stream, padding, layer_cache)
            return stream.read(self.get("output_attn_res"), self.norm)


class Model(nn.Module):
    """The language model: token ids in, logits out."""

    def __init__(self, config: K3Config):
        super().__init__()
        self.config = config
        self.model_type = config.model_type
        self.kv_bits: int | None = None  # of the caches made from now on: as computed, 8 or 4
        self.vision: Any = None  # what makes vectors of pictures, once loaded with it
        self.model = KimiModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        ids: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits ``[B, T, vocab]`` for ids ``[B, T]``, continuing ``cache`` if there is one."""
        x = self.model(ids, cache, input_embeddings)
        return self.lm_head(x) if "lm_head" in self else self.model.embed_tokens.as_linear(x)

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """An empty cache: conv inputs and state for a KDA layer, latents for an MLA layer."""
        return [
            ArraysCache(size=2) if layer.is_kda else LatentCache(self.kv_bits)
            for layer in self.layers
        ]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """A converted folder's tensors under this model's parameter names."""
        return sanitize(self.config, weights)
