"""Products of a simd group's small matrices: on the GPU or the host runner, and CUDA's by the book.

The tensor cores' instruction cannot run without a GPU, but which lane holds which value is written
in NVIDIA's PTX manual; here the CUDA text runs on the host with the instruction played by that.
"""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_k3.kernels.build import SOURCE, Kernel, Launch

from .support.measure import relative_error
from .support.metal import available, run, with_kernels

DTYPES = [mx.float32, mx.bfloat16]

# y [16, 16] = a b, from a [16, 64] and b [64, 16] by way of shared memory; z, the same from a as
# sums hold it, and from b's columns in the order of mma_at.
BODY = """
  SHARED(W, columns, 16 * 72);
  SHARED(W, left, 16 * 72);
  for (uint i = LANE; i < 1024; i += 32) {
    left[i / 64 * 72 + i % 64] = a[i];
    columns[i / 64 * 72 + i % 64] = b[mma_at(i / 64, i % 64, 64)];
  }
  SIMD_BARRIER();
  const uint line = mma_row(LANE), column = mma_column(LANE);
  float one[2][4], other[2][4];
  for (uint i = 0; i < 8; ++i) one[i / 4][i % 4] = other[i / 4][i % 4] = 0.0f;
  for (uint k = 0; k < 64; k += 16) {
    Left<W> x;
    Right<W> w;
    shared_load_left(x, left + k, 72, LANE);
    for (uint j = 0; j < 2; ++j) {
      shared_load_right(w, columns + 8 * j * 72 + k, 72, LANE);
      multiply(one[j], x, w);
    }
  }
  for (uint k = 0; k < 64; k += 32) {
    float sums[4][4];
    for (uint i = 0; i < 16; ++i) {  // whose columns are the rows of mma_swap
      const uint term = 8 * (column / 2) + i / 4 * 2 + i % 2;
      sums[i / 4][i % 4] = to_float(a[(line + i % 4 / 2 * 8) * 64 + k + term]);
    }
    Left<W> x[2];
    left_of(x[0], sums[0], sums[1]);
    left_of(x[1], sums[2], sums[3]);
    for (uint j = 0; j < 2; ++j) {
      Right<W> w[2];
      load_rights(w, b + (2 * j + k / 32) * 256, LANE);
      multiply(other[j], x[0], w[0]);
      multiply(other[j], x[1], w[1]);
    }
  }
  for (uint i = 0; i < 8; ++i) {
    const uint at = (line + i % 4 / 2 * 8) * 16 + i / 4 * 8 + column + i % 2;
    y[at] = one[i / 4][i % 4];
    z[at] = other[i / 4][i % 4];
  }
"""

# mma.sync.m16n8k8 for .tf32 (PTX manual, "Matrix Fragments for mma.m16n8k8"): with g = lane / 4 and
# t = lane % 4, a0..a3 are a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]; b0, b1 are b[t][g],
# b[t + 4][g]; c0..c3 are c[g][2t], c[g][2t + 1], c[g + 8][2t], c[g + 8][2t + 1].
# m16n8k16 for .bf16: a0..a3 hold pairs, a[g][2t], a[g + 8][2t], a[g][2t + 8], a[g + 8][2t + 8] and
# their right neighbours; b0, b1 b[2t][g], b[2t + 8][g] and those below; c as before.
INSTRUCTION = """
typedef bfloat __nv_bfloat16;
struct alignas(4) __nv_bfloat162 {
  bfloat x, y;
};
INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {from_float<bfloat>(x), from_float<bfloat>(y)};
}
INLINE float2 make_float2(float x, float y) { return float2(x, y); }
INLINE float cut(float x) { return bits_to_float(float_to_bits(x) & ~0x1fffu); }
INLINE void tensor_core(LOCAL float* c, float a0, float a1, float a2, float a3, float b0,
                        float b1) {
  const uint g = host::lane() / 4, t = host::lane() % 4;
  for (uint k = 0; k < 8; ++k) {
    const float upper_low = simd_shuffle(cut(a0), g * 4 + k % 4);
    const float lower_low = simd_shuffle(cut(a1), g * 4 + k % 4);
    const float upper_high = simd_shuffle(cut(a2), g * 4 + k % 4);
    const float lower_high = simd_shuffle(cut(a3), g * 4 + k % 4);
    for (uint j = 0; j < 2; ++j) {
      const float low = simd_shuffle(cut(b0), (2 * t + j) * 4 + k % 4);
      const float high = simd_shuffle(cut(b1), (2 * t + j) * 4 + k % 4);
      c[j] += (k < 4 ? upper_low : upper_high) * (k < 4 ? low : high);
      c[2 + j] += (k < 4 ? lower_low : lower_high) * (k < 4 ? low : high);
    }
  }
}
INLINE float of_pair(uint pair, uint which) {
  return bits_to_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
}
INLINE void tensor_core_16(LOCAL float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  const uint g = host::lane() / 4, t = host::lane() % 4;
  for (uint k = 0; k < 16; ++k) {
    const uint from = k % 8 / 2;
    const uint upper = simd_shuffle(k < 8 ? a0 : a2, g * 4 + from);
    const uint lower = simd_shuffle(k < 8 ? a1 : a3, g * 4 + from);
    for (uint j = 0; j < 2; ++j) {
      const float right = of_pair(simd_shuffle(k < 8 ? b0 : b1, (2 * t + j) * 4 + from), k % 2);
      c[j] += of_pair(upper, k % 2) * right;
      c[2 + j] += of_pair(lower, k % 2) * right;
    }
  }
}
"""


def launch(folder: Path, dtype: mx.Dtype, helpers: str = "", needs: tuple[str, ...] = ()):
    """The product's launch, and what it is to give."""
    (folder / "product.h").write_text(f"// A product.\n{helpers}\nKERNEL {{{BODY}}}\n")
    mx.random.seed(0)
    a, b = (mx.random.normal(shape).astype(dtype) for shape in ((16, 64), (64, 16)))
    packed = b.T.reshape(2, 8, 2, 32).swapaxes(1, 2)
    kernel = Kernel("product", ("a", "b"), ("y", "z"), needs=needs, folder=folder)
    outputs = (((16, 16), mx.float32),) * 2
    product = Launch(
        kernel, (a, mx.contiguous(packed)), outputs, (1, 1, 1), 32, (("W", dtype),), ()
    )
    return product, a.astype(mx.float32) @ b.astype(mx.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(tmp_path, dtype) -> None:
    product, want = launch(tmp_path, dtype, needs=("mma",))
    with with_kernels():
        results = product.kernel(
            *product.inputs,
            outputs=product.outputs,
            groups=product.groups,
            threads=product.threads,
            template=dict(product.template),
        )
    for got in results:
        assert relative_error(got, want) < 1e-6


@pytest.mark.skipif(not available(), reason="no clang++ here")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_tensor_cores(tmp_path, dtype) -> None:
    text = (SOURCE / "mma.cuda.h").read_text()
    text, products = re.subn(r'asm\("mma\.sync.*?\);\n', played, text, flags=re.S)
    assert products == 2
    product, want = launch(tmp_path, dtype, INSTRUCTION + text)
    for got in run(product):
        assert relative_error(got, want) < 1e-6


def played(found: re.Match) -> str:
    """The instruction as a call, with its operands in their order."""
    operands = re.findall(r'"r"\(((?:[^()]|\([^()]*\))*)\)', found[0])
    assert len(operands) == 6
    operands = [re.sub(r"^float_to_bits\((.*)\)$", r"\1", x) for x in operands]
    name = "tensor_core_16" if "bf16" in found[0] else "tensor_core"
    return f"{name}(c, {', '.join(operands)});\n"
