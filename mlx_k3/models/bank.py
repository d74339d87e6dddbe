"""The routed experts: their arithmetic, and the bank that holds all of them in memory.

A **bank** answers one call, ``bank(z, indices, weights)``. Another bank may keep its experts
elsewhere; it then runs them with the same :class:`Experts`, and its numbers are the same.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU
from mlx_lm.utils import infer_quant_config

from ..config import K3Config
from ..errors import UnsupportedError
from ..kernels import quantized_matmul
from ..kernels.experts import Packed, mxfp4_experts, mxfp4_experts_pay
from ..kernels.mxfp8 import mxfp8_round
from ..kernels.quantized import Workbench, expand, expanding_pays
from .layers import gated_activation

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
GROUP_FROM = 64  # token-expert pairs from which a CPU works expert by expert
PAIRS_AT_ONCE = 1 << 14  # pairs whose outputs exist at the same time when it does


class Pairs(NamedTuple):
    """Token-expert pairs in the order of the experts."""

    order: np.ndarray  # [P], positions in the flattened indices
    experts: list[int]  # ascending, each once
    starts: list[int]  # where each expert's pairs begin, and P at the end


class _Activation:
    """What stands between an expert's products."""

    def __init__(self, config: K3Config):
        self.config = config
        self.mxfp8 = False

    def __call__(self, up: mx.array, gate: mx.array, use_host: bool | None = None) -> mx.array:
        return self.rounded(gated_activation(self.config, gate, up, use_host=use_host))

    def rounded(self, x: mx.array) -> mx.array:
        """What a product reads for ``x``."""
        return mxfp8_round(x) if self.mxfp8 else x


class Experts(SwitchGLU):
    """The arithmetic of stacked experts ``{gate,up,down}_proj.weight [E, out, in]``, packed or not.

    What an expert gives for its rows does not depend on which other experts run with it.
    """

    def __init__(self, config: K3Config, num_experts: int):
        super().__init__(
            config.expert_dim,
            config.moe_intermediate_size,
            num_experts,
            activation=_Activation(config),
        )
        self._config = config
        self._expanded: dict[str, mx.array] = {}

    @classmethod
    def over(cls, config: K3Config, arrays: Mapping[str, mx.array]) -> "Experts":
        """Experts whose tensors (``gate_proj.weight [E, ...]``, ...) are given, packed or not."""
        experts = cls(config, len(arrays["gate_proj.weight"]))

        def packing(path: str, module: nn.Module) -> dict | bool:
            return f"{path}.scales" in arrays and infer_quant_config(path, module, arrays)

        nn.quantize(experts, class_predicate=packing)
        experts.bind(arrays)
        return experts.eval()

    def bind(self, arrays: Mapping[str, mx.array]) -> None:
        """Take other arrays of the same kind."""
        for name, array in arrays.items():
            projection, part = name.split(".")
            self[projection][part] = array

    def keep_expanded(self) -> None:
        """Keep the experts in float32 beside the packed ones, for prefill on a CPU."""
        for name in PROJECTIONS:
            if isinstance(self[name], QuantizedSwitchLinear):
                self._expanded[name] = expand(*_packed(self[name]), mx.float32, **_how(self[name]))

    def round_inputs(self) -> None:
        """From now on, round what the products read to MXFP8, as in K3's training.

        Raises:
            UnsupportedError: the experts are not in MXFP4.
        """
        if not self._in_mxfp4:
            raise UnsupportedError(
                "activations in mxfp8 go with experts in MXFP4, and this model's are not; "
                "leave them out"
            )
        self.activation.mxfp8 = True

    def works_by_expert(self, pairs: int) -> bool:
        """Whether so many pairs run expert by expert.

        The way for CPUs, where a packed product costs the same for every row: an expert with many
        rows is expanded once and multiplied with BLAS.
        """
        return mx.default_device() == mx.cpu and pairs >= GROUP_FROM and not self.training

    def summed(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``sum_j weights_j expert_j(z)`` for ``z [..., D]`` and ``[..., k]``; in ``z``'s dtype.

        For pairs that do not run expert by expert. A few tokens take kernels on a GPU.
        """
        if self._has_kernels and mxfp4_experts_pay(z.size // z.shape[-1]):
            return mxfp4_experts(
                *(z, indices, weights),
                *(Packed(self[name].weight, self[name].scales) for name in PROJECTIONS),
                beta=self._config.activation_situ_beta,
                linear_beta=self._config.activation_situ_linear_beta,
                mxfp8=self.activation.mxfp8,
            )
        return weighted_sum(self.together(z, indices), weights).astype(z.dtype)

    def together(self, z: mx.array, indices: mx.array) -> mx.array:
        """Every pair of ``z [..., D]`` and ``indices [..., k]`` in one product; ``[..., k, D]``."""
        return SwitchGLU.__call__(self, self.activation.rounded(z), indices)

    def select(self, x: mx.array, ids: mx.array) -> mx.array:
        """Rows ``x [P, D]``, each through the expert in ``ids [P]``; ``[P, D]``."""
        return self.together(x, ids[:, None]).squeeze(-2)

    def run(self, x: mx.array, ids: Sequence[int], starts: Sequence[int]) -> mx.array:
        """Rows ``x [P, D]`` in runs, run ``i`` from ``starts[i]`` through expert ``ids[i]``."""
        x, bench = self.activation.rounded(x), self._workbench(x.dtype)

        def project(name: str, x: mx.array) -> mx.array:
            runs = zip(ids, starts, starts[1:], strict=False)
            y = [self._project(name, x[i:j], expert, bench) for expert, i, j in runs]
            return mx.concatenate(y)

        gate, up = project("gate_proj", x), project("up_proj", x)
        # By numpy however few the rows are: what runs with an expert must not show in its numbers.
        y = project("down_proj", self.activation(up, gate, use_host=True))
        if bench is not None:
            bench.finish()
        return y

    @property
    def _in_mxfp4(self) -> bool:
        return all(
            isinstance(self[name], QuantizedSwitchLinear) and self[name].mode == "mxfp4"
            for name in PROJECTIONS
        )

    @property
    def _has_kernels(self) -> bool:
        # They have no gradient.
        return self._config.hidden_act == "situ" and self._in_mxfp4 and not self.training

    def _workbench(self, dtype: mx.Dtype) -> Workbench | None:
        linear = self.gate_proj
        packed = isinstance(linear, QuantizedSwitchLinear) and linear.mode == "mxfp4"
        if not packed or self._expanded or dtype != mx.float32:
            return None
        return Workbench(linear.scales[0].size * linear.group_size)

    def _project(self, name: str, x: mx.array, expert: int, bench: Workbench | None) -> mx.array:
        linear = self[name]
        if not isinstance(linear, QuantizedSwitchLinear):
            return x @ linear.weight[expert].T
        if expanding_pays(len(x), linear.mode):
            # The same product each way: expanded once at load, on the workbench, or by MLX.
            if name in self._expanded:
                return x @ self._expanded[name][expert].T
            if bench is not None:
                weight, scales = (np.asarray(memoryview(a)) for a in (linear.weight, linear.scales))
                return bench.multiply(x, weight[expert].view(np.uint8), scales[expert])
        packed = (None if part is None else part[expert] for part in _packed(linear))
        return quantized_matmul(x, *packed, **_how(linear))


def sort_pairs(indices: np.ndarray) -> Pairs:
    """The pairs of ``indices [..., k]``, by expert and then by token."""
    order = np.argsort(indices.ravel(), kind="stable")
    experts, starts = np.unique(indices.ravel()[order], return_index=True)
    return Pairs(order, experts.tolist(), [*starts.tolist(), len(order)])


def weighted_sum(y: mx.array, weights: mx.array) -> mx.array:
    """``sum_j weights_j y_j`` for ``y [..., k, D]`` and ``weights [..., k]``, in float32."""
    return (weights[..., None, :] @ y.astype(mx.float32)).squeeze(-2)


def add_weighted(total: mx.array, y: mx.array, weights: mx.array, tokens: mx.array) -> mx.array:
    """Add pairs' outputs ``y [P, D]`` to their tokens' rows of ``total [N, D]``, in order."""
    return total.at[tokens].add(y.astype(mx.float32) * weights[:, None])


class ResidentBank(Experts):
    """All experts of a layer in memory."""

    def __call__(
        self,
        z: mx.array,
        indices: mx.array,
        weights: mx.array,
        alongside: mx.array | None = None,
        ahead: mx.array | None = None,
    ) -> mx.array:
        """The experts' weighted sum.

        Args:
            z: ``[..., D]``, what the experts read.
            indices: ``[..., k]``, the chosen experts.
            weights: ``[..., k]`` float32.
            alongside, ahead: of use to a bank that has to fetch its experts.

        Returns:
            ``[..., D]`` in ``z``'s dtype.
        """
        if not self.works_by_expert(indices.size):
            return self.summed(z, indices, weights)
        pairs = sort_pairs(np.array(indices))
        rows, flat = z.reshape(-1, z.shape[-1]), weights.reshape(-1)
        total = mx.zeros(rows.shape, mx.float32)
        for part in split_pairs(pairs, PAIRS_AT_ONCE, len(pairs.experts)):
            order = mx.array(part.order)
            tokens = order // indices.shape[-1]
            y = self.run(rows[tokens], part.experts, part.starts)
            total = add_weighted(total, y, flat[order], tokens)
        return total.reshape(z.shape).astype(z.dtype)


def split_pairs(pairs: Pairs, most_pairs: int, most_experts: int) -> list[Pairs]:
    """``pairs`` in parts of whole experts, as many as fit both bounds, at least one."""
    parts, first = [], 0
    for i in range(1, len(pairs.experts) + 1):
        full = i - first == most_experts
        if (
            i == len(pairs.experts)
            or full
            or pairs.starts[i + 1] - pairs.starts[first] > most_pairs
        ):
            begin = pairs.starts[first]
            parts.append(
                Pairs(
                    pairs.order[begin : pairs.starts[i]],
                    pairs.experts[first:i],
                    [start - begin for start in pairs.starts[first : i + 1]],
                )
            )
            first = i
    return parts


def _packed(linear: QuantizedSwitchLinear) -> tuple[mx.array, mx.array, mx.array | None]:
    return linear.weight, linear.scales, linear.get("biases")


def _how(linear: QuantizedSwitchLinear) -> dict[str, int | str]:
    return {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
