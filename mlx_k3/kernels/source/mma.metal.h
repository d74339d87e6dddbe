// Products of small matrices by a simd group; mma.cuda.h defines the same names.
//
// c [16, 8] += a [16, 16] b [16, 8], c in float32. A lane has four values of c, in rows mma_row and
// mma_row + 8, columns mma_column and mma_column + 1 of each, row by row; and what it needs of a
// and b in a Left and a Right of T, float or bfloat16, which the loaders below fill. Products of
// bfloat16 are exact, those of float as precise as float32's; on CUDA a left_of bfloat16 is rounded
// to it, here it stays as it is.

INLINE uint mma_row(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }
INLINE uint mma_column(uint lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

template <typename T>
struct Left {
  float x[8];  // as c's of the first 8 columns, then of the others
};
template <typename T>
struct Right {
  float x[4];  // of the first 8 rows, then of the others
};

template <typename T>
INLINE void multiply(LOCAL float* c, const LOCAL Left<T>& a, const LOCAL Right<T>& b) {
  UNROLL
  for (int s = 0; s < 2; ++s) {
    simdgroup_float8x8 right;
    right.thread_elements()[0] = b.x[2 * s];
    right.thread_elements()[1] = b.x[2 * s + 1];
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      simdgroup_float8x8 left, sum;
      left.thread_elements()[0] = a.x[4 * s + i];
      left.thread_elements()[1] = a.x[4 * s + i + 1];
      sum.thread_elements()[0] = c[i];
      sum.thread_elements()[1] = c[i + 1];
      simdgroup_multiply_accumulate(sum, left, right, sum);
      c[i] = sum.thread_elements()[0];
      c[i + 1] = sum.thread_elements()[1];
    }
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

template <typename T>
INLINE void shared_store2(threadgroup T* to, float x, float y) {
  *reinterpret_cast<threadgroup vec<T, 2>*>(to) = vec<T, 2>(float2(x, y));
}

// a [16, 16], rows PITCH apart.
template <typename T>
INLINE void shared_load_left(LOCAL Left<T>& a, const THREADGROUP T* from, uint pitch, uint lane) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const THREADGROUP T* at =
        from + (mma_row(lane) + i % 2 * 8) * pitch + i / 2 * 8 + mma_column(lane);
    a.x[2 * i] = to_float(at[0]);
    a.x[2 * i + 1] = to_float(at[1]);
  }
}

// b [16, 8], of which columns lie in memory as rows, PITCH apart.
template <typename T>
INLINE void shared_load_right(LOCAL Right<T>& b, const THREADGROUP T* from, uint pitch,
                              uint lane) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    b.x[i] = to_float(from[(mma_column(lane) + i % 2) * pitch + i / 2 * 8 + mma_row(lane)]);
  }
}

// A sum's values as a left factor: x and y as of two c, side by side. Which column is which term
// then follows mma_swap, for load_rights.
template <typename T>
INLINE void left_of(LOCAL Left<T>& a, const LOCAL float* x, const LOCAL float* y) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    a.x[i] = x[i];
    a.x[4 + i] = y[i];
  }
}

// Where an element lies in a matrix whose 8 x 32 blocks follow each other, row by row: load_rights
// finds all of a lane's in one place, on CUDA.
INLINE uint mma_at(uint row, uint column, uint columns) {
  return (row / 8 * (columns / 32) + column / 32) * 256 + row % 8 * 32 + column % 32;
}

// Two right factors from such a block, whose rows are their columns: for the two left factors that
// four sums side by side become.
template <typename T>
INLINE void load_rights(LOCAL Right<T>* b, CONST_DEVICE T* block, uint lane) {
  const uint row = mma_row(lane), column = mma_column(lane);
  UNROLL
  for (int i = 0; i < 8; ++i) {
    b[i / 4].x[i % 4] =
        to_float(block[(column + i % 2) * 32 + row / 2 * 8 + i / 2 * 2 + row % 2]);
  }
}

// The row in which row i is kept, if sums in that order become left factors: of every eight rows of
// 32, each two go to another eight.
INLINE uint mma_swap(uint i) { return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2; }
