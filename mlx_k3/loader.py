"""``load()``: a converted folder becomes a model and a tokenizer.

Owns the order of things: check every file, build the modules, name, pack and place the weights.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from .chat.tokenizer import load_tokenizer
from .checkpoint.extents import ExpertExtents, merge, open_experts
from .checkpoint.index import LocalFolder, open_checkpoint, read_json
from .checkpoint.reader import TensorFile
from .config import K3Config
from .errors import CheckpointError, UnsupportedError
from .experts.budget import DEFAULT_CONTEXT, MemoryPlan, plan_folder
from .experts.lossy import Levers
from .experts.offload import Offload
from .experts.trace import TraceWriter
from .eyes import Eyes, has_tower
from .kernels import backend
from .kernels.verdicts import refusal
from .models.kimi import Model
from .models.latent_cache import KV_BITS
from .models.weights import check_parameters

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_PREFIX = "language_model."

# How a piece's bytes lie in an array; memoryview knows no bfloat16.
_STORAGE = {
    "U8": mx.uint8,
    "U32": mx.uint32,
    "BF16": mx.uint16,
    "F16": mx.float16,
    "F32": mx.float32,
}


def load(
    path: str | Path,
    dtype: str | None = None,
    *,
    memory: str | int | None = None,
    context_tokens: int = DEFAULT_CONTEXT,
    kv_bits: int | None = None,
    trace: str | Path | None = None,
    policy: str = "lru",
    prefetch: bool = True,
    levers: Levers | None = None,
    activations: str | None = None,
    vision: bool = True,
) -> "tuple[Model, TokenizerWrapper | None]":
    """Open a folder that ``mlx-k3 convert`` wrote, or a build in mlx-lm's form.

    Args:
        path: the folder.
        memory: what the process may occupy: ``"24GB"``, a number of bytes, ``"auto"`` (measured
            now), or None for all the model takes. Where the experts do not fit, they are fetched
            from the disk on demand; ``model.offload`` then is the :class:`~.experts.Offload`.
        context_tokens: prompt and answers the memory is planned for.
        kv_bits: 8 or 4 packs what MLA layers keep of every token, in 56 or 31 % of bfloat16's
            bytes; answers change a little. By default it is kept as computed.
        trace: record routing and reads in this file, for ``mlx-k3 trace``.
        policy: which expert leaves a full pool: ``"lru"`` or ``"lfu"``.
        prefetch: read what the next layer will probably choose ahead of time.
        levers: what may be left out to read less; by default nothing, and results are exact.
        activations: ``"mxfp8"`` rounds what the experts' products read to MXFP8, as in K3's
            training; by default nothing is rounded.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` recasts every floating-point weight;
            packed weights stay packed. By default weights stay as stored, except that a CPU
            computes in float32: it has no bfloat16 arithmetic, and emulating it is many times
            slower.
        vision: plan memory for the vision tower, if there is one, and load it when the first
            picture comes.

    Returns:
        The model and its tokenizer, None where the folder has no tokenizer files. ``model.plan``
        is the :class:`~.experts.budget.MemoryPlan`, ``model.vision`` the :class:`~.eyes.Eyes`, or
        None.

    Raises:
        CheckpointError: a file is missing, damaged, of another length than its header says, or
            the tensors are not this model's.
        UnsupportedError: the model is of another family, a trace or levers were asked for and no
            expert is read on demand, ``activations`` and the experts are not in MXFP4, or
            ``kv_bits`` that there are not, or for a model without MLA layers.
        BudgetError: the memory does not suffice; the message holds the arithmetic.
    """
    folder = Path(path)
    plan = plan_load(
        folder, memory, context_tokens=context_tokens, dtype=dtype, kv_bits=kv_bits, vision=vision
    )
    if plan.resident and (trace is not None or levers is not None):
        raise UnsupportedError(
            f"{path} fits in memory as a whole, so there are no reads to trace or to avoid; "
            "leave out trace and levers, or give less memory"
        )
    if backend() != "reference" and (line := refusal()) is not None:
        print(line, file=sys.stderr)
    model = assemble(
        folder,
        dtype,
        slots=None if plan.resident else plan.slots,
        trace=trace,
        policy=policy,
        prefetch=prefetch,
        levers=levers,
        activations=activations,
    )
    model.plan, model.prompt_tokens, model.kv_bits = plan, plan.prompt_tokens, kv_bits
    if vision and has_tower(folder, model.config):
        model.vision = Eyes(folder, model.config, dtype)
    if plan.expanded_bytes:
        for layer in model.config.moe_layers:
            bank = model.layers[layer].mlp.switch_mlp
            bank.keep_expanded()
            mx.eval(bank._expanded)
    return model, load_tokenizer(folder)


def plan_load(
    path: str | Path,
    memory: str | int | None,
    *,
    context_tokens: int = DEFAULT_CONTEXT,
    dtype: str | None = None,
    kv_bits: int | None = None,
    vision: bool = True,
) -> MemoryPlan:
    """What :func:`load` would do with these arguments; raises as it does, in a moment."""
    # Before the plan, which prices tensors: is this a folder that can be loaded at all?
    checkpoint = open_checkpoint(LocalFolder(Path(path)))
    if any(".block_sparse_moe." in name for name in checkpoint.files):
        raise CheckpointError(
            f"{path} is in the release's own format; convert it once: mlx-k3 convert {path} OUT"
        )
    if kv_bits is not None and kv_bits not in KV_BITS:
        raise UnsupportedError(f"a cache of {kv_bits} bits: there are 8 and 4, or leave it out")
    plan = plan_folder(
        path, memory, context_tokens=context_tokens, dtype=dtype, kv_bits=kv_bits, vision=vision
    )
    if kv_bits is not None and not plan.cache_bytes:
        raise UnsupportedError(
            f"{path} has no MLA layer whose cache could be packed in {kv_bits} bits; leave it out"
        )
    return plan


def require_vision(model: Model) -> Eyes:
    """What ``model`` sees with.

    Raises:
        UnsupportedError: it sees nothing; the message says why.
    """
    if model.vision is not None:
        return model.vision
    if model.config.vision_config is None:
        raise UnsupportedError("this model reads text only; pictures need one with a vision tower")
    raise UnsupportedError(
        "the model was loaded without its vision tower; leave out --no-vision (vision=False), or "
        "convert it again if its folder has no model-vision file"
    )


def assemble(
    folder: Path,
    dtype: str | None = None,
    *,
    slots: int | None = None,
    trace: str | Path | None = None,
    policy: str = "lru",
    prefetch: bool = True,
    levers: Levers | None = None,
    activations: str | None = None,
) -> Model:
    """The model in ``folder``, with its experts in ``slots`` places, or in memory if None.

    ``model.offload`` is the :class:`~.experts.offload.Offload`, or None. Raises as :func:`load`.
    """
    config, local = K3Config.from_file(folder), LocalFolder(folder)
    experts = open_experts(folder)
    model = Model(config)
    model.offload = None
    weights: dict[str, mx.array] = {}
    for file in open_checkpoint(local).headers:
        weights |= mx.load(str(folder / file))  # mapped, not read yet
    if slots is not None:
        model.offload = _offload(model, experts, slots, trace, policy, prefetch, levers)
        weights = {k: v for k, v in weights.items() if ".mlp.switch_mlp." not in k}
    elif experts.form == "reference":
        weights |= dict(_read_experts(experts))

    weights = model.sanitize(weights)
    _quantize(model, weights, read_json(local, "config.json"))
    model.activations = activations
    if activations is not None:
        _round_inputs(model, activations)
    check_parameters(model, weights, str(folder))
    _recast(weights, dtype)
    model.load_weights(list(weights.items()), strict=False)
    model.eval()
    # Layer by layer: what a layer's joins and casts leave behind is freed before the next.
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def _offload(
    model: Model,
    experts: ExpertExtents,
    slots: int,
    trace: str | Path | None,
    policy: str,
    prefetch: bool,
    levers: Levers | None,
) -> Offload:
    """Put the model's experts on demand."""
    config = model.config
    writer = None
    if trace is not None:
        header = {
            "layers": list(config.moe_layers),
            "experts": [config.expert_counts[layer] for layer in config.moe_layers],
            "top_k": config.num_experts_per_token,
            "expert_bytes": experts.expert_bytes(experts.layers[0]),
            "slots": slots,
            "policy": policy,
        }
        writer = TraceWriter(trace, header)
    offload = Offload(config, experts, slots, policy=policy, levers=levers, trace=writer)
    layers = [(layer, model.layers[layer].mlp) for layer in config.moe_layers]
    offload.place(layers, prefetch=prefetch)
    return offload


def _round_inputs(model: Model, activations: str) -> None:
    """Have the experts round what they read."""
    if activations != "mxfp8":
        raise UnsupportedError(f"activations {activations!r}; there is mxfp8")
    if model.offload is not None:
        model.offload.round_inputs()
        return
    for layer in model.config.moe_layers:
        model.layers[layer].mlp.switch_mlp.round_inputs()


def _read_experts(experts: ExpertExtents) -> Iterator[tuple[str, mx.array]]:
    """The experts of a release's shards, stacked as an MLX package has them, layer by layer."""
    with ExitStack() as files:
        opened: dict[str, TensorFile] = {}
        for layer in experts.layers:
            count, pieces = experts.count(layer), experts.pieces(layer)
            stacks = [mx.zeros((count, *p.shape), _STORAGE[p.dtype]) for p in pieces]
            mx.eval(stacks)
            # The arrays' own memory: bytes go from the file to their place, with no copy between.
            views = [memoryview(stack).cast("B") for stack in stacks]
            for expert in range(count):
                for run in merge(experts.extents(layer, expert)):
                    if run.path not in opened:
                        opened[run.path] = files.enter_context(TensorFile(run.path))
                    offset = run.offset
                    for i in run.pieces:
                        nbytes = pieces[i].nbytes
                        place = views[i][expert * nbytes : (expert + 1) * nbytes]
                        opened[run.path].read_into(place, offset)
                        offset += nbytes
            for piece, stack in zip(pieces, stacks, strict=True):
                array = stack.view(mx.bfloat16) if piece.dtype == "BF16" else stack
                yield f"model.layers.{layer}.mlp.switch_mlp.{piece.name}", array


def _quantize(model: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Give every module that comes packed its packed form."""
    stated = {k.removeprefix(_PREFIX): v for k, v in config.get("quantization", {}).items()}

    def packing(path: str, module: nn.Module) -> dict[str, Any] | bool:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        how = stated.get(path)
        return how if isinstance(how, dict) else infer_quant_config(path, module, weights)

    nn.quantize(model, class_predicate=packing)


def _recast(weights: dict[str, mx.array], dtype: str | None) -> None:
    """Floating-point weights in ``dtype``; the router's gate stays in float32."""
    if dtype is None and mx.default_device() != mx.cpu:
        return
    target = getattr(mx, dtype or "float32")
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith(".mlp.gate.weight"):
            weights[name] = array.astype(target)
