"""What a model takes in memory, part by part: the prices that :mod:`.budget` adds up.

Weights, state and cache are exact: each tensor as it is loaded, each cache as it grows. Scratch,
what a forward pass makes on the way, is the largest of its phases by the formulas below; they
follow the model's code and were fitted to measured peaks (docs/memory.md).
"""

import math
from collections.abc import Mapping

from ..checkpoint.index import Checkpoint
from ..checkpoint.names import layer_tensors, stem_tensors
from ..checkpoint.reader import NUMPY_DTYPES
from ..checkpoint.writer import tensor_bytes
from ..config import VISION_PARTS, K3Config
from .machine import Device
from .vision_sizes import StoredVision, vision_bytes

# Of the model's code; a test compares them.
BLOCK_TOKENS = 512  # of a prompt that attention and MLPs take at once
CACHE_STEP = 256  # tokens by which MLA's cache grows
CACHE_BLOCK = 8192  # tokens of it that growing copies, at most
KV_BITS = (8, 4)  # that a number of it can be packed in
CACHE_GROUP = 32  # of a packed cache's numbers, with a scale and an offset together
QUERY_BLOCK = 256
SCORE_BYTES = 12
LEAST_TILE = 64
TILE_BYTES = {"cpu": 16 << 20, "metal": 192 << 20, "cuda": 192 << 20}  # a GPU's lie in a queue
PAIRS_AT_ONCE = 1 << 14  # token-expert pairs that the experts take at once
KDA_CHUNK = 64
KDA_SCRATCH_BYTES = 256 << 20

# Python with all it imports and the reader's threads; and a tokenizer, by token.
PROCESS_BYTES = 150_000_000
PROCESS_BYTES_PER_TOKEN = 1000

# Expanding a packed weight on a CPU: how many float32 copies exist at the peak, by bits.
# Widths that are no power of two take another way through MLX.
_COPIES = {2: 2, 4: 2, 8: 2}
_COPIES_ODD, _COPIES_MX8 = 7, 1

_FLOATS = ("F32", "BF16", "F16")
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_RESIDUALS = ("self_attention_res", "mlp_res", "output_attn_res")
_RESIDUAL_NORMS = tuple(f"{r}{s}" for r in _RESIDUALS for s in ("_norm.weight", ".norm_weight"))
_RESIDUAL_PROJECTIONS = tuple(
    f"{r}{s}" for r in _RESIDUALS for s in ("_proj.weight", ".proj_weight")
)

Trunk = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name in the MLX folder -> dtype as safetensors spells it, and shape."""


def stored_trunk(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The trunk as a converted folder's headers have it: no experts, no vision."""
    infos = {name: checkpoint.info(name) for name in checkpoint.files}
    return {
        name: (info.dtype, info.shape)
        for name, info in infos.items()
        if ".mlp.switch_mlp." not in name and not name.startswith(VISION_PARTS)
    }


def loaded_bytes(
    config: K3Config, name: str, dtype: str, shape: tuple[int, ...], recast: str | None
) -> int:
    """What a trunk tensor takes once it is part of the model.

    ``recast`` is the dtype that floats are cast to, None for as they are.
    """
    if dtype not in _FLOATS:
        return tensor_bytes(dtype, shape)
    if name.endswith(_RESIDUAL_PROJECTIONS):
        return 0  # folded into its norm's vector
    if name.endswith("lm_head.weight") and config.tie_word_embeddings:
        return 0
    numbers = math.prod(shape)
    if name.endswith(".mlp.gate.weight"):
        return numbers * 4
    if recast:
        return numbers * _WIDTHS[recast]
    if name.endswith(_RESIDUAL_NORMS):
        return numbers * 4
    return numbers * NUMPY_DTYPES[dtype].itemsize


class Sizes:
    """The parts of a plan that do not depend on the budget, in bytes."""

    def __init__(
        self,
        config: K3Config,
        trunk: Trunk,
        context_tokens: int,
        device: Device,
        dtype: str | None,
        kv_bits: int | None = None,
        vision: StoredVision | None = None,
    ):
        self._config, self._device, self._cpu = config, device, device == "cpu"
        self._kv_bits, self._vision = kv_bits, vision
        self.context_tokens = min(context_tokens, config.max_position_embeddings)
        self.block_tokens = min(self.context_tokens, BLOCK_TOKENS)
        if dtype is None and self._cpu:
            dtype = "float32"  # a CPU has no bfloat16 arithmetic
        self._recast = dtype
        self._width = _WIDTHS[dtype] if dtype else _activation_width(trunk)
        loaded = {name: loaded_bytes(config, name, *trunk[name], dtype) for name in trunk}
        self.trunk_bytes = sum(loaded.values())
        self._load_bytes = _load_bytes(trunk, loaded)
        self._expanded = _expanded(config, trunk) if self._cpu else {}
        self._packs_heads = any(name.endswith(".embed_q.scales") for name in trunk)
        # A CUDA device's memory holds arrays only.
        self.process_bytes = PROCESS_BYTES + config.vocab_size * PROCESS_BYTES_PER_TOKEN
        if device == "cuda":
            self.process_bytes = 0

    @property
    def vision_bytes(self) -> int:
        """The tower, and room for the largest picture beside the scratch; 0 without pictures."""
        if self._vision is None:
            return 0
        return vision_bytes(self._vision, self._device, self._recast, self.scratch_bytes)

    @property
    def state_bytes(self) -> int:
        """Conv inputs in the activations' dtype and a float32 state, in every KDA layer."""
        c = self._config
        H, D, taps = c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size
        return len(c.kda_layers) * ((taps - 1) * 3 * H * D * self._width + H * D * D * 4)

    @property
    def cache_bytes_per_token(self) -> int:
        """Latent and shared key, in every MLA layer."""
        return self._mla_layers * self._latent_bytes

    @property
    def cache_bytes(self) -> int:
        """The whole context's cache, which grows in steps."""
        return self._mla_layers * self._layer_cache_bytes

    @property
    def _mla_layers(self) -> int:
        return self._config.num_hidden_layers - len(self._config.kda_layers)

    @property
    def _latent_bytes(self) -> int:
        widths = self._config.kv_lora_rank, self._config.qk_rope_head_dim
        if self._kv_bits is None:
            return sum(widths) * self._width
        return sum(-(-width // CACHE_GROUP) for width in widths) * (self._kv_bits + 1) * 4

    @property
    def _layer_cache_bytes(self) -> int:
        return -(-self.context_tokens // CACHE_STEP) * CACHE_STEP * self._latent_bytes

    def prompt_bytes(self, tokens: int) -> int:
        """What ``tokens`` of a prompt take that go through the layers together.

        The residual stream's blocks, twice where the running sum joins them; six vectors of the
        hidden width between a layer's steps; the router's scores; the experts' inputs, sums, and
        outputs that are not added up yet.
        """
        c = self._config
        hidden = (2 * self._candidates + 6) * c.hidden_size * self._width
        if not c.moe_layers:
            return tokens * hidden
        experts = (c.num_experts_per_token + 1) * self._width + 4
        router = max(c.expert_counts) * 16
        return tokens * (hidden + experts * c.expert_dim + router)

    @property
    def _candidates(self) -> int:
        """Of the last layers' residual mix: all finished blocks, and the running sum."""
        size = self._config.attn_res_block_size
        return 0 if size is None else -(-self._config.num_hidden_layers // size) + 1

    @property
    def scratch_bytes(self) -> int:
        """The most that one step of a forward pass, or of loading, needs for the moment."""
        most = max(self._load_bytes, self._mla(), self._kda(), self._mlp(), self._moe())
        # On a CPU the C library's heap keeps about half of what KDA's many small arrays took.
        return most + self._kda_arrays() // 2 if self._cpu else most

    def _mla(self) -> int:
        """For a block: some copies of queries and outputs, a tile of keys, and the cache's growth.

        None of it depends on the context but where that is shorter than a tile or a block.
        """
        c, T = self._config, self.block_tokens
        if not self._mla_layers:
            return 0
        H, rank, v = c.num_attention_heads, c.kv_lora_rank, c.v_head_dim
        q_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        vectors = H * T * (3 * (q_dim + v) * self._width + 3 * v * 4)
        heads = H * rank * (c.qk_nope_head_dim + v) * self._width if self._packs_heads else 0
        key = H * (min(T, QUERY_BLOCK) * SCORE_BYTES + (2 * q_dim + v) * self._width)
        tile = min(max(TILE_BYTES[self._device], LEAST_TILE * key), self.context_tokens * key)
        growth = min(self._layer_cache_bytes, CACHE_BLOCK * self._latent_bytes)
        expansion = self._expand("g_proj", "q_b_proj", "o_proj")
        return vectors + heads + tile + growth + expansion

    def _kda(self) -> int:
        c, T = self._config, self.block_tokens
        inputs = 3 * T * c.kda_num_heads * c.kda_head_dim * self._width
        working = self._kda_arrays() + self._expand("g_proj", "o_proj")
        return max(working, inputs + self._expand("qkv_proj")) if c.kda_layers else 0

    def _kda_arrays(self) -> int:
        """Queries, keys, values and gates of a block, and the chunks' temporaries; in float32."""
        c, T = self._config, self.block_tokens
        if not c.kda_layers:
            return 0
        width = c.kda_num_heads * c.kda_head_dim
        return 6 * 3 * T * width * 4 + min(T * KDA_CHUNK * width, KDA_SCRATCH_BYTES) * 6 // 5

    def _mlp(self) -> int:
        c, T = self._config, self.block_tokens
        inner = max(c.intermediate_size, c.moe_intermediate_size * c.num_shared_experts)
        mix = 2 * self._candidates * T * c.hidden_size * 4
        return max(mix, 3 * T * inner * self._width + self._expand("gate_proj", "down_proj"))

    def _moe(self) -> int:
        c = self._config
        if not c.moe_layers:
            return 0
        pairs = min(self.block_tokens * c.num_experts_per_token, PAIRS_AT_ONCE)
        matrix = 2 * c.expert_dim * c.moe_intermediate_size * 4 if self._cpu else 0
        widest = max(c.expert_dim, c.moe_intermediate_size)
        return 4 * pairs * widest * self._width + matrix

    def _expand(self, *kinds: str) -> int:
        """At the peak of expanding the largest of these weights; only a CPU does that."""
        return max(self._expanded.get(kind, 0) for kind in kinds)

    def resident_expert_bytes(self, stored_bytes: int) -> int:
        """An unpacked expert as part of the model: recast as other floats are."""
        if self._recast is None:
            return stored_bytes
        c = self._config
        return 3 * c.expert_dim * c.moe_intermediate_size * _WIDTHS[self._recast]

    def least_bytes(self, pool_bytes: int) -> int:
        """What a pool of ``pool_bytes`` needs in all."""
        return self.fixed_bytes(self.block_tokens) + pool_bytes

    def fixed_bytes(self, prompt_tokens: int) -> int:
        """Everything but slots."""
        return (
            self.process_bytes
            + self.trunk_bytes
            + self.state_bytes
            + self.cache_bytes
            + self.prompt_bytes(prompt_tokens)
            + self.scratch_bytes
            + self.vision_bytes
        )

    def more_tokens(self, nbytes: int) -> int:
        """How many more tokens ``nbytes`` let through in one pass, in whole blocks."""
        blocks = nbytes // self.prompt_bytes(self.block_tokens)
        return min(blocks * self.block_tokens, self.context_tokens - self.block_tokens)


def _activation_width(trunk: Trunk) -> int:
    """Bytes of a number in the residual stream: as the embedding's floats are stored."""
    dtypes = {n.rpartition(".")[2]: d for n, (d, _) in trunk.items() if "embed_tokens." in n}
    stored = dtypes.get("scales", dtypes.get("weight"))
    return NUMPY_DTYPES[stored].itemsize if stored in _FLOATS else 2


def _load_bytes(trunk: Trunk, loaded: Mapping[str, int]) -> int:
    """Stored bytes of tensors that are recast or joined, alive beside the result: a layer's."""
    groups: dict[str, int] = {}
    for name, (dtype, shape) in trunk.items():
        stored = tensor_bytes(dtype, shape)
        joined = name.rpartition(".")[0].endswith((".q_proj", ".k_proj", ".v_proj"))
        if stored != loaded[name] or joined:
            group = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else ""
            groups[group] = groups.get(group, 0) + stored
    return max(groups.values(), default=0)


def _expanded(config: K3Config, trunk: Trunk) -> dict[str, int]:
    """Kind of weight -> memory at the peak of expanding the largest packed one of it."""
    result: dict[str, int] = {}
    tensors = [t for i in range(config.num_hidden_layers) for t in layer_tensors(config, i)]
    for tensor in (*tensors, *stem_tensors(config)):
        scales = trunk.get(f"{tensor.module}.scales")
        if tensor.role != "linear" or scales is None or tensor.name not in trunk:
            continue
        bits = trunk[tensor.name][1][-1] * 32 // tensor.shape[-1]
        copies = _COPIES.get(bits, _COPIES_ODD)
        if bits == 8 and scales[0] == "U8":
            copies = _COPIES_MX8
        nbytes = copies * math.prod(tensor.shape) * 4
        kind = tensor.kind
        if kind == "q_proj" and f"{tensor.module.removesuffix('q_proj')}k_proj.scales" in trunk:
            kind, nbytes = "qkv_proj", 3 * nbytes  # joined when loaded
        result[kind] = max(result.get(kind, 0), nbytes)
    return result
