"""Golden checkpoints, converted and loaded, and what a forward pass does inside."""

from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_k3.convert.stream import convert


def convert_golden(golden: Path, name: str, out: Path, **options) -> Path:
    """``golden/name`` as an MLX package below ``out``, with an exact trunk."""
    folder = out / "-".join([name, *options.values()])
    convert(golden / name, folder, **{"trunk": "bf16", **options})
    return folder


class _Tap(nn.Module):
    """Calls ``inner`` and shows its arguments and its result."""

    def __init__(self, inner, show):
        super().__init__()
        self["inner"], self["show"] = inner, show

    def __call__(self, *args):
        result = self["inner"](*args)
        self["show"](args, result)
        return result

    def __getattr__(self, name):
        return getattr(self["inner"], name)


def record(model) -> dict[str, mx.array]:
    """Make ``model`` note its inner states, under the golden data's names.

    The dictionary that is returned fills during a forward pass.
    """
    states: dict[str, mx.array] = defaultdict(mx.array)

    def tap(module, attribute, show):
        module[attribute] = _Tap(module[attribute], show)

    def note(name, value):
        states[name] = value

    for i, layer in enumerate(model.layers):
        tap(layer, "input_layernorm", lambda args, _, i=i: note(f"attn_in.{i}", args[0]))
        tap(layer, "post_attention_layernorm", lambda args, _, i=i: note(f"mlp_in.{i}", args[0]))
        if "switch_mlp" in layer.mlp:

            def routed(args, _, i=i):
                order = mx.argsort(args[1], axis=-1)
                note(f"router.{i}.topk_idx", mx.take_along_axis(args[1], order, axis=-1))
                note(f"router.{i}.topk_weight", mx.take_along_axis(args[2], order, axis=-1))

            tap(layer.mlp, "switch_mlp", routed)
            tap(
                layer.mlp,
                "gate",
                lambda _, logits, i=i: note(f"router.{i}.scores", mx.sigmoid(logits)),
            )
        model.layers[i] = _Tap(layer, lambda args, _, i=i: note(f"hidden.{i}", args[0].current))
    tap(model.model, "norm", lambda args, y: (note("final_mix", args[0]), note("final_norm", y)))
    return states
