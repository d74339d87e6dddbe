// Products of small matrices by a simd group; mma.metal.h defines the same names and explains them.
//
// The tensor cores' m16n8k8, whose lanes hold columns t and t + 4 of a and the same rows of b, for
// t = lane % 4. The order of a sum's terms is free: they stand for 2t and 2t + 1 here, neighbours.

INLINE uint mma_row(uint lane) { return lane / 4; }
INLINE uint mma_column(uint lane) { return lane % 4 * 2; }

template <bool EXACT>
INLINE float mma_ready(float x) {
  if (EXACT) return x;
  uint bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits_to_float(bits);
}

// The tensor cores ignore the lowest 13 bits of a and b.
INLINE void mma_tf32(float* c, const float* a, const float* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(float_to_bits(a[0])), "r"(float_to_bits(a[2])), "r"(float_to_bits(a[1])),
        "r"(float_to_bits(a[3])), "r"(float_to_bits(b[0])), "r"(float_to_bits(b[1])));
}

template <bool EXACT>
INLINE void mma(LOCAL float* c, const LOCAL float* a, const LOCAL float* b) {
  if (EXACT) {  // what is ignored of one, times the other
    float a_rest[4], b_rest[2];
    UNROLL
    for (int i = 0; i < 4; ++i) a_rest[i] = a[i] - bits_to_float(float_to_bits(a[i]) & ~0x1fffu);
    UNROLL
    for (int i = 0; i < 2; ++i) b_rest[i] = b[i] - bits_to_float(float_to_bits(b[i]) & ~0x1fffu);
    mma_tf32(c, a_rest, b);
    mma_tf32(c, a, b_rest);
  }
  mma_tf32(c, a, b);
}

template <typename T>
INLINE float2 load2(const T* from) {
  float x[2];
  load<2>(x, from);
  return make_float2(x[0], x[1]);
}

template <typename T>
INLINE void store2(T* to, float x, float y) {
  const float values[2] = {x, y};
  store<2>(to, values);
}

INLINE float2 shared_load2(const float* from) { return *reinterpret_cast<const float2*>(from); }

INLINE void shared_store2(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

INLINE void shared_load_a(LOCAL float* a, const THREADGROUP float* from, uint pitch, uint lane) {
  UNROLL
  for (int lower = 0; lower < 2; ++lower) {
    const float2 x = shared_load2(from + (mma_row(lane) + 8 * lower) * pitch + mma_column(lane));
    a[2 * lower] = x.x;
    a[2 * lower + 1] = x.y;
  }
}

INLINE void shared_load_b(LOCAL float* b, const THREADGROUP float* from, uint pitch, uint lane) {
  const uint row = lane % 4 * 4;
  b[0] = from[row * pitch + lane / 4];
  b[1] = from[(row + 1) * pitch + lane / 4];
}

INLINE void shared_load_b_transposed(LOCAL float* b, const THREADGROUP float* from, uint pitch,
                                     uint lane) {
  const float2 x = shared_load2(from + lane / 4 * pitch + lane % 4 * 2);
  b[0] = x.x;
  b[1] = x.y;
}

INLINE uint mma_at(uint row, uint column, uint columns) {
  return (row / 16 * (columns / 16) + column / 16) * 256 + (row % 8 * 4 + column % 16 / 4) * 8 +
         row % 16 / 8 * 4 + column % 4;
}

INLINE uint mma_own(uint lane) { return (mma_row(lane) * 4 + mma_column(lane) / 2) * 8; }
