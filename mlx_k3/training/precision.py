"""Which precision each weight is stored in, and the model's parameters rounded to it.

Training keeps float32 master weights and computes with what a checkpoint will hold, so that
exporting changes nothing.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "qkv_conv", "o_norm.weight")


def stored_dtype(name: str) -> mx.Dtype:
    """What the release stores the parameter ``name`` in; packed experts aside."""
    return mx.float32 if name.endswith(_FLOAT32) else mx.bfloat16


def as_stored(parameters: Any) -> Any:
    """The parameters as a checkpoint holds them; experts stay, their bank rounds them.

    The router's gate and the residual mixes compute in float32, from bfloat16 values. On a CPU all
    do: its products in bfloat16 take many times longer.
    """
    on_cpu = mx.default_device() == mx.cpu

    def cast(name: str, parameter: mx.array) -> mx.array:
        if ".switch_mlp." in name:
            return parameter
        stored = parameter.astype(stored_dtype(name))
        in_float32 = on_cpu or name.endswith((".mlp.gate.weight", "_res"))
        return stored.astype(mx.float32) if in_float32 else stored

    return tree_map_with_path(cast, parameters)
