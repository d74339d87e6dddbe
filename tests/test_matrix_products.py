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

# y [16, 8] = a b, from a [16, 32] in the order of mma_at and b [32, 8]; z, the same by way of
# shared memory: both loaders of b, and a's.
BODY = """
  SHARED(float, rows, 32 * 10);
  SHARED(float, columns, 8 * 40);
  SHARED(float, left, 16 * 40);
  for (uint i = LANE; i < 256; i += 32) {
    rows[i / 8 * 10 + i % 8] = mma_ready<EXACT>(b[i]);
    columns[i % 8 * 40 + i / 8] = mma_ready<EXACT>(b[i]);
  }
  for (uint i = LANE; i < 512; i += 32) {
    left[i / 32 * 40 + i % 32] = mma_ready<EXACT>(a[mma_at(i / 32, i % 32, 32)]);
  }
  SIMD_BARRIER();
  float one[4] = {0.0f, 0.0f, 0.0f, 0.0f}, other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (uint k = 0; k < 32; k += 16) {
    for (uint s = 0; s < 4; s += 2) {
      CONST_DEVICE float* own = a + k * 16 + mma_own(LANE) + s;
      const float x[4] = {mma_ready<EXACT>(own[0]), mma_ready<EXACT>(own[1]),
                          mma_ready<EXACT>(own[4]), mma_ready<EXACT>(own[5])};
      float w[2];
      shared_load_b(w, rows + (k + s) * 10, 10, LANE);
      mma<EXACT>(one, x, w);
    }
  }
  for (uint k = 0; k < 32; k += 8) {
    float x[4], w[2];
    shared_load_a(x, left + k, 40, LANE);
    shared_load_b_transposed(w, columns + k, 40, LANE);
    mma<EXACT>(other, x, w);
  }
  for (uint i = 0; i < 4; ++i) {
    const uint at = (mma_row(LANE) + i / 2 * 8) * 8 + mma_column(LANE) + i % 2;
    y[at] = one[i];
    z[at] = other[i];
  }
"""

# mma.sync.m16n8k8 for .tf32 (PTX manual, "Matrix Fragments for mma.m16n8k8"): with g = lane / 4 and
# t = lane % 4, a0..a3 are a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]; b0, b1 are b[t][g],
# b[t + 4][g]; c0..c3 are c[g][2t], c[g][2t + 1], c[g + 8][2t], c[g + 8][2t + 1].
INSTRUCTION = """
INLINE float2 make_float2(float x, float y) { return float2(x, y); }
INLINE float cut(float x) { return bits_to_float(float_to_bits(x) & ~0x1fffu); }
INLINE float rounded(float x) { return cut(bits_to_float(float_to_bits(x) + 0x1000u)); }
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
"""


def launch(folder: Path, exact: bool, helpers: str = "", needs: tuple[str, ...] = ()) -> Launch:
    (folder / "product.h").write_text(f"// A product.\n{helpers}\nKERNEL {{{BODY}}}\n")
    mx.random.seed(0)
    a, b = mx.random.normal((16, 32)), mx.random.normal((32, 8))
    packed = a.reshape(16, 2, 4, 4).reshape(2, 8, 2, 4, 4).transpose(2, 1, 3, 0, 4)
    kernel = Kernel("product", ("a", "b"), ("y", "z"), needs=needs, folder=folder)
    outputs = (((16, 8), mx.float32),) * 2
    template = (("EXACT", exact),)
    product = Launch(kernel, (mx.contiguous(packed), b), outputs, (1, 1, 1), 32, template, ())
    return product, a @ b


@pytest.mark.parametrize("exact", [True, False])
def test_products(tmp_path, exact) -> None:
    product, want = launch(tmp_path, exact, needs=("mma",))
    with with_kernels():
        results = product.kernel(
            *product.inputs,
            outputs=product.outputs,
            groups=product.groups,
            threads=product.threads,
            template=dict(product.template),
        )
    for got in results:
        assert relative_error(got, want) < (1e-6 if exact else 1e-3)


@pytest.mark.skipif(not available(), reason="no clang++ here")
@pytest.mark.parametrize("exact", [True, False])
def test_products_of_tensor_cores(tmp_path, exact) -> None:
    text = (SOURCE / "mma.cuda.h").read_text()
    text, products = re.subn(r'asm\("mma\.sync.*?\);\n', played, text, flags=re.S)
    rounding = "bits = float_to_bits(rounded(x));\n"
    text, roundings = re.subn(r'asm\("cvt\.rna\.tf32.*?\);\n', rounding, text, flags=re.S)
    assert products == roundings == 1
    product, want = launch(tmp_path, exact, INSTRUCTION + text)
    errors = [relative_error(got, want) for got in run(product)]
    assert max(errors) < (1e-6 if exact else 1e-3)
    assert exact or min(errors) > 1e-5  # TF32 shows


def played(found: re.Match) -> str:
    """The instruction as a call, with its operands in their order."""
    operands = re.findall(r'"r"\(float_to_bits\((.*?)\)\)', found[0])
    assert len(operands) == 6
    return f"tensor_core(c, {', '.join(operands)});\n"
