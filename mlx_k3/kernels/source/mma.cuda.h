// Products of small matrices by a simd group; mma.metal.h defines the same names and explains them.
//
// bfloat16 takes the tensor cores' m16n8k16; float32 m16n8k8 in TF32, three times. A lane has, for
// g = lane / 4 and t = lane % 4, two neighbours of rows g and g + 8 in every 8 columns of the left
// factor. The order of a sum's terms is free, so that which ones these are is up to the loaders.

INLINE uint mma_row(uint lane) { return lane / 4; }
INLINE uint mma_column(uint lane) { return lane % 4 * 2; }

template <typename T>
struct Left;
template <>
struct Left<float> {
  float x[8];
};
template <>
struct Left<__nv_bfloat16> {
  uint x[4];
};
template <typename T>
struct Right;
template <>
struct Right<float> {
  float x[4];
};
template <>
struct Right<__nv_bfloat16> {
  uint x[2];
};

INLINE uint bfloat16_pair(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint*>(&pair);
}

// The tensor cores ignore the lowest 13 bits of a and b.
INLINE void mma_tf32(float* c, const float* a, const float* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(float_to_bits(a[0])), "r"(float_to_bits(a[2])), "r"(float_to_bits(a[1])),
        "r"(float_to_bits(a[3])), "r"(float_to_bits(b[0])), "r"(float_to_bits(b[1])));
}

INLINE float ignored(float x) { return x - bits_to_float(float_to_bits(x) & ~0x1fffu); }

INLINE void multiply(LOCAL float* c, const LOCAL Left<float>& a, const LOCAL Right<float>& b) {
  UNROLL
  for (int s = 0; s < 2; ++s) {  // what is ignored of one, times the other; then all the rest
    const float* left = a.x + 4 * s;
    const float* right = b.x + 2 * s;
    const float left_rest[4] = {ignored(left[0]), ignored(left[1]), ignored(left[2]),
                                ignored(left[3])};
    const float right_rest[2] = {ignored(right[0]), ignored(right[1])};
    mma_tf32(c, left_rest, right);
    mma_tf32(c, left, right_rest);
    mma_tf32(c, left, right);
  }
}

INLINE void multiply(LOCAL float* c, const LOCAL Left<__nv_bfloat16>& a,
                     const LOCAL Right<__nv_bfloat16>& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
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

template <typename T>
INLINE void shared_store2(T* to, float x, float y) {
  store2(to, x, y);
}

// Two neighbours as a factor holds them.
INLINE void take2(float* to, const float* from) {
  const float2 x = *reinterpret_cast<const float2*>(from);
  to[0] = x.x;
  to[1] = x.y;
}
INLINE void take2(uint* to, const __nv_bfloat16* from) {
  *to = *reinterpret_cast<const uint*>(from);
}

template <typename T>
INLINE void shared_load_left(LOCAL Left<T>& a, const THREADGROUP T* from, uint pitch, uint lane) {
  constexpr int PAIR = sizeof(a.x) / sizeof(a.x[0]) / 4;
  UNROLL
  for (int i = 0; i < 4; ++i) {
    take2(a.x + PAIR * i, from + (lane / 4 + i % 2 * 8) * pitch + i / 2 * 8 + lane % 4 * 2);
  }
}

template <typename T>
INLINE void shared_load_right(LOCAL Right<T>& b, const THREADGROUP T* from, uint pitch,
                              uint lane) {
  constexpr int PAIR = sizeof(b.x) / sizeof(b.x[0]) / 2;
  UNROLL
  for (int i = 0; i < 2; ++i) take2(b.x + PAIR * i, from + lane / 4 * pitch + i * 8 + lane % 4 * 2);
}

INLINE void left_of(LOCAL Left<float>& a, const LOCAL float* x, const LOCAL float* y) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    a.x[i] = x[i];
    a.x[4 + i] = y[i];
  }
}
INLINE void left_of(LOCAL Left<__nv_bfloat16>& a, const LOCAL float* x, const LOCAL float* y) {
  a.x[0] = bfloat16_pair(x[0], x[1]);
  a.x[1] = bfloat16_pair(x[2], x[3]);
  a.x[2] = bfloat16_pair(y[0], y[1]);
  a.x[3] = bfloat16_pair(y[2], y[3]);
}

INLINE uint mma_at(uint row, uint column, uint columns) {
  return (row / 8 * (columns / 32) + column / 32) * 256 + row % 8 * 32 + column % 32;
}

INLINE void load_rights(LOCAL Right<float>* b, const float* block, uint lane) {
  UNROLL
  for (int i = 0; i < 2; ++i) load<4>(b[i].x, block + 8 * lane + 4 * i);
}
INLINE void load_rights(LOCAL Right<__nv_bfloat16>* b, const __nv_bfloat16* block, uint lane) {
  const uint4 words = *reinterpret_cast<const uint4*>(block + 8 * lane);
  b[0].x[0] = words.x;
  b[0].x[1] = words.y;
  b[1].x[0] = words.z;
  b[1].x[1] = words.w;
}

// The row in which row i is kept, if sums in that order become left factors: of every eight rows of
// 32, each two go to another eight.
INLINE uint mma_swap(uint i) { return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2; }
