// Products of small matrices by a simd group; mma.cuda.h defines the same names.
//
// c [16, 8] += a [16, 8] b [8, 8]. A lane has four values of a and of c, in rows mma_row and
// mma_row + 8, columns mma_column and mma_column + 1 of each, row by row; and two values of b,
// which shared_load_b and shared_load_b_transposed know how to find.

INLINE uint mma_row(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }
INLINE uint mma_column(uint lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

// x as `mma` wants it in a and b: rounded, where it would be cut off.
template <bool EXACT>
INLINE float mma_ready(float x) {
  return x;
}

// EXACT: as precise as float32; else of TF32's precision on CUDA.
template <bool EXACT>
INLINE void mma(LOCAL float* c, const LOCAL float* a, const LOCAL float* b) {
  simdgroup_float8x8 right;
  right.thread_elements()[0] = b[0];
  right.thread_elements()[1] = b[1];
  UNROLL
  for (int i = 0; i < 4; i += 2) {
    simdgroup_float8x8 left, sum;
    left.thread_elements()[0] = a[i];
    left.thread_elements()[1] = a[i + 1];
    sum.thread_elements()[0] = c[i];
    sum.thread_elements()[1] = c[i + 1];
    simdgroup_multiply_accumulate(sum, left, right, sum);
    c[i] = sum.thread_elements()[0];
    c[i + 1] = sum.thread_elements()[1];
  }
}

// Pairs, as load4 and store4 of the prelude.
template <typename T>
INLINE float2 load2(const device T* from) {
  return float2(*reinterpret_cast<const device vec<T, 2>*>(from));
}

template <typename T>
INLINE void store2(device T* to, float x, float y) {
  *reinterpret_cast<device vec<T, 2>*>(to) = vec<T, 2>(float2(x, y));
}

INLINE float2 shared_load2(const threadgroup float* from) {
  return *reinterpret_cast<const threadgroup float2*>(from);
}

INLINE void shared_store2(threadgroup float* to, float x, float y) {
  *reinterpret_cast<threadgroup float2*>(to) = float2(x, y);
}

INLINE void shared_load_a(LOCAL float* a, const THREADGROUP float* from, uint pitch, uint lane) {
  UNROLL
  for (int lower = 0; lower < 2; ++lower) {
    const float2 x = shared_load2(from + (mma_row(lane) + 8 * lower) * pitch + mma_column(lane));
    a[2 * lower] = x.x;
    a[2 * lower + 1] = x.y;
  }
}

// Row r of b is row r / 2 * 4 + r % 2 in memory, to go with mma_at.
INLINE void shared_load_b(LOCAL float* b, const THREADGROUP float* from, uint pitch, uint lane) {
  const uint row = mma_row(lane);
  const float2 x = shared_load2(from + (row / 2 * 4 + row % 2) * pitch + mma_column(lane));
  b[0] = x.x;
  b[1] = x.y;
}

// Row r of b is column r in memory.
INLINE void shared_load_b_transposed(LOCAL float* b, const THREADGROUP float* from, uint pitch,
                                     uint lane) {
  b[0] = from[mma_column(lane) * pitch + mma_row(lane)];
  b[1] = from[(mma_column(lane) + 1) * pitch + mma_row(lane)];
}

// Where an element lies in a matrix whose lanes find what they multiply from the left in one place:
// 16 x 16 after 16 x 16, and of those eight values a lane, from mma_own on: four columns of its two
// rows. The first two of the columns are for one product, the others for the next.
INLINE uint mma_at(uint row, uint column, uint columns) {
  return (row / 16 * (columns / 16) + column / 16) * 256 + (row % 8 * 4 + column % 16 / 4) * 8 +
         row % 16 / 8 * 4 + column % 4;
}

INLINE uint mma_own(uint lane) { return (mma_row(lane) * 4 + mma_column(lane) / 2) * 8; }
