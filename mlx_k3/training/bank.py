"""The routed experts while they learn: a bank whose arithmetic has gradients and fixed shapes.

Every expert gets the same number of places. Token-expert pairs are sorted into them, so that the
experts of a layer are three batched products and neither direction needs atomics. With a balanced
router nothing is left over; what finds no place adds nothing, and is counted.
"""

import mlx.core as mx

from ..config import K3Config
from ..models.bank import Experts, weighted_sum
from ..models.layers import gated_activation
from .qat import mxfp4_fake_quantize

CAPACITY = 2.0  # places of an expert, in units of its even share
ROUNDING = 16


class TrainingBank(Experts):
    """``bank(z, indices, weights)`` over dense experts, as :class:`~..models.bank.ResidentBank`.

    With ``quantized``, the experts compute with their weights rounded to MXFP4.
    """

    def __init__(self, config: K3Config, num_experts: int):
        super().__init__(config, num_experts)
        self.quantized = False
        self._dropped: mx.array | None = None  # share of the last call's pairs

    def __call__(
        self,
        z: mx.array,
        indices: mx.array,
        weights: mx.array,
        alongside: mx.array | None = None,
        ahead: mx.array | None = None,
    ) -> mx.array:
        """z ``[..., D]``, indices and weights ``[..., k]``; ``[..., D]`` in z's dtype."""
        E, k = self.gate_proj.num_experts, indices.shape[-1]
        pairs = indices.size
        share = max(int(CAPACITY * pairs / E), 1)
        capacity = min(pairs, -(-share // ROUNDING) * ROUNDING)
        place, source = places(indices.reshape(-1), E, capacity)
        x = _dispatch(z.reshape(-1, z.shape[-1]), place, source, k)
        y = self._experts(x.reshape(E, capacity, -1)).reshape(E * capacity, -1)
        y = _collect(y, place, source).reshape(*indices.shape, -1)
        self._dropped = (place == E * capacity).mean()
        return weighted_sum(y, weights).astype(z.dtype)

    def _experts(self, x):
        """``[E, places, D]`` -> ``[E, places, D]``."""
        gate, up = self._project("gate_proj", x), self._project("up_proj", x)
        return self._project("down_proj", gated_activation(self._config, gate, up))

    def _project(self, name, x):
        weight = self[name].weight
        if self.quantized:
            weight = mxfp4_fake_quantize(weight)
        return x @ weight.astype(x.dtype).swapaxes(-1, -2)


def places(experts: mx.array, num_experts: int, capacity: int) -> tuple[mx.array, mx.array]:
    """Sort pairs into the experts' places.

    Args:
        experts: ``[P]``, the expert of each pair.
        num_experts, capacity: E experts with ``capacity`` places each.

    Returns:
        For each pair its place, ``[P]``, ``E * capacity`` if there is none left; and for each
        place its pair, ``[E * capacity]``, P where it stays empty.
    """
    P = experts.size
    count = (experts[:, None] == mx.arange(num_experts)).sum(0)
    start = mx.cumsum(count) - count
    order = mx.argsort(experts)
    chosen = experts[order]
    rank = mx.arange(P) - start[chosen]
    spot = mx.where(rank < capacity, chosen * capacity + rank, num_experts * capacity)
    place = mx.put_along_axis(mx.zeros(P, mx.int32), order, spot.astype(mx.int32), axis=0)
    within = mx.arange(capacity)
    filled = within < count[:, None]
    source = order[mx.minimum(start[:, None] + within, P - 1)]
    return place, mx.where(filled, source, P).reshape(-1).astype(mx.int32)


def _dispatch(rows: mx.array, place: mx.array, source: mx.array, k: int) -> mx.array:
    """The row ``[N, D]`` of each place's pair ``[E * capacity, D]``, zero where there is none."""

    @mx.custom_function
    def gather(rows):
        return _take(rows, source // k)

    @gather.vjp
    def gather_vjp(primal, cotangent, _):
        return _take(cotangent, place).reshape(-1, k, cotangent.shape[-1]).sum(1)

    return gather(rows)


def _collect(y: mx.array, place: mx.array, source: mx.array) -> mx.array:
    """Each pair's row of ``y [E * capacity, D]``: ``[P, D]``, zero where it had no place."""

    @mx.custom_function
    def gather(y):
        return _take(y, place)

    @gather.vjp
    def gather_vjp(primal, cotangent, _):
        return _take(cotangent, source)

    return gather(y)


def _take(x: mx.array, index: mx.array) -> mx.array:
    """``x[index]``, zero where the index is past the end."""
    inside = index < len(x)
    return mx.where(inside[:, None], x[mx.where(inside, index, 0)], 0)
