"""Source tensors as the MLX folder wants them, read in blocks.

Owns joining, cutting and transposing: what a tensor of the MLX folder is made of, in order and in
flat memory. Knows nothing about output files or precision.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, repeat

import numpy as np

from ..checkpoint.direct import aligned_buffer
from ..checkpoint.names import MlxTensor, ReleaseTensor
from ..checkpoint.reader import NUMPY_DTYPES, TensorFile, TensorInfo
from ..checkpoint.writer import IN_FLIGHT, tensor_bytes
from ..errors import CheckpointError
from .plan import Output, Plan
from .source import Source

BLOCK_BYTES = 8 * 2**20
# Rows that are quantized at once: enough to keep a device busy, little enough for any memory.
ROWS_BYTES = 16 * 2**20


class Blocks:
    """Reads the tensors of one output file from the open shards ``files``."""

    def __init__(self, plan: Plan, files: dict[str, TensorFile]) -> None:
        self._checkpoint = plan.checkpoint
        self._heads = plan.config.num_attention_heads
        self._nope = plan.config.qk_nope_head_dim
        self._files = files
        # The writer may hold IN_FLIGHT blocks while one more is filled.
        self._buffers = cycle([aligned_buffer(BLOCK_BYTES) for _ in range(IN_FLIGHT + 1)])

    def dtype(self, tensor: MlxTensor) -> str:
        """The dtype of the tensor's sources, as safetensors spells it."""
        return self._checkpoint.info(tensor.sources[0].name).dtype

    def raw(self, tensor: MlxTensor) -> Iterator[memoryview]:
        """The tensor's bytes in order; a block is reused after ``IN_FLIGHT`` more."""
        if tensor.op in ("join", "a_log"):
            yield from self._joined(tensor, self._buffers)
        else:
            yield as_bytes(self._half_of_kv_b(tensor))

    def rows(self, tensor: MlxTensor) -> Iterator[np.ndarray]:
        """The tensor as [rows, width], some rows at a time; a block is reused by the next."""
        dtype, width = NUMPY_DTYPES[self.dtype(tensor)], tensor.shape[-1]
        if tensor.op != "join":
            yield self._half_of_kv_b(tensor).reshape(-1, width)
            return
        row_bytes = width * dtype.itemsize
        buffer = aligned_buffer(max(ROWS_BYTES // row_bytes, 1) * row_bytes)
        for block in self._joined(tensor, repeat(buffer)):
            yield np.frombuffer(block, dtype).reshape(-1, width)

    def _joined(self, tensor: MlxTensor, buffers: Iterator[memoryview]) -> Iterator[memoryview]:
        """The sources' bytes one after the other, filling ``buffers`` in turn.

        ``a_log`` ends at the last head: what follows there is padding.
        """
        left = tensor_bytes(tensor.dtype or self.dtype(tensor), tensor.shape)
        # A buffer is taken only when there are bytes for it: one that is taken and not yielded
        # would bring the next ones round before the writer is done with them.
        buffer, filled = memoryview(b""), 0
        for source in tensor.sources:
            file, info = self._find(source)
            position, end = info.offset, info.offset + min(info.nbytes, left)
            left -= end - position
            while position < end:
                if not filled:
                    buffer = next(buffers)
                n = min(end - position, len(buffer) - filled)
                file.read_into(buffer[filled : filled + n], position)
                position, filled = position + n, filled + n
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]

    def _half_of_kv_b(self, tensor: MlxTensor) -> np.ndarray:
        """``kv_b_proj`` [H * (nope + value), rank] -> ``embed_q`` or ``unembed_out``."""
        source = tensor.sources[0]
        weight = self._find(source)[0].array(source.name)
        weight = weight.reshape(self._heads, -1, weight.shape[-1])
        if tensor.op == "embed_q":
            return weight[:, : self._nope].swapaxes(1, 2)
        return weight[:, self._nope :]

    def _find(self, source: ReleaseTensor) -> tuple[TensorFile, TensorInfo]:
        return self._files[self._checkpoint.files[source.name]], self._checkpoint.info(source.name)


@contextmanager
def open_blocks(source: Source, plan: Plan, output: Output) -> Iterator[Blocks]:
    """The blocks of ``output``, with the shards it needs fetched and open.

    Raises:
        CheckpointError: if a shard is not the one that was planned with.
    """
    with ExitStack() as stack:
        files = {}
        for name in output.shards:
            files[name] = stack.enter_context(TensorFile(source.fetch(name)))
            if files[name].header.sha256 != plan.checkpoint.headers[name].sha256:
                raise CheckpointError(f"{source.label}: {name} changed during the conversion")
        yield Blocks(plan, files)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of ``array`` in C order."""
    return memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B")
