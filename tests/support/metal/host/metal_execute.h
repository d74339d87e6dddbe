// The part of Metal's standard library that kernels use, to be executed.
#pragma once

#include "runtime.h"
#include "small_float.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <int N>
struct VectorOf<half, N> {
  typedef SmallVector<half, N> type;
};
template <int N>
struct VectorOf<bfloat, N> {
  typedef SmallVector<bfloat, N> type;
};
template <typename T, int N>
using vec = typename VectorOf<T, N>::type;

#define VECTORS(type)           \
  typedef vec<type, 2> type##2; \
  typedef vec<type, 4> type##4;
VECTORS(float)
VECTORS(half)
VECTORS(int)
VECTORS(uint)
VECTORS(short)
VECTORS(ushort)
VECTORS(char)
VECTORS(uchar)
typedef vec<float, 3> float3;
typedef vec<uint, 3> uint3;

template <typename V>
struct Vector {
  static constexpr int lanes = 0;
};
template <typename T, int N>
struct Vector<T __attribute__((ext_vector_type(N)))> {
  static constexpr int lanes = N;
  typedef T item;
};
template <typename T, int N>
struct Vector<SmallVector<T, N>> {
  static constexpr int lanes = N;
  typedef T item;
};

// Metal's `float4(...)`, which the runner writes as `construct<float4>(...)`: from one scalar, from
// a vector of another type, or from all its items.
template <typename V, typename T>
V construct(T x) {
  V result;
  for (int i = 0; i < Vector<V>::lanes; ++i) {
    if constexpr (Vector<T>::lanes > 0) {
      static_assert(Vector<T>::lanes == Vector<V>::lanes, "vectors of different lengths");
      result[i] = static_cast<typename Vector<V>::item>(x[i]);
    } else {
      result[i] = static_cast<typename Vector<V>::item>(x);
    }
  }
  return result;
}
template <typename V, typename T, typename... Ts>
V construct(T first, Ts... rest) {
  static_assert(sizeof...(Ts) + 1 == Vector<V>::lanes, "one value for each item");
  const typename Vector<V>::item items[] = {static_cast<typename Vector<V>::item>(first),
                                            static_cast<typename Vector<V>::item>(rest)...};
  V result;
  for (int i = 0; i < Vector<V>::lanes; ++i) result[i] = items[i];
  return result;
}

template <typename T, typename U>
T as_type(U x) {
  return __builtin_bit_cast(T, x);
}

namespace metal {

#define FLOAT_FUNCTIONS                                                  \
  inline float exp(float x) { return __builtin_expf(x); }                \
  inline float exp2(float x) { return __builtin_exp2f(x); }              \
  inline float log(float x) { return __builtin_logf(x); }                \
  inline float log2(float x) { return __builtin_log2f(x); }              \
  inline float tanh(float x) { return __builtin_tanhf(x); }              \
  inline float sqrt(float x) { return __builtin_sqrtf(x); }              \
  inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }      \
  inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

FLOAT_FUNCTIONS
namespace precise {
FLOAT_FUNCTIONS
}
namespace fast {
FLOAT_FUNCTIONS
inline float divide(float x, float y) { return x / y; }
}

inline float abs(float x) { return __builtin_fabsf(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline float ceil(float x) { return __builtin_ceilf(x); }
inline float rint(float x) { return __builtin_rintf(x); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }

// Of a number and NaN the number, as Metal's.
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
template <typename T>
T min(T x, T y) {
  return y < x ? y : x;
}
template <typename T>
T max(T x, T y) {
  return x < y ? y : x;
}
template <typename T>
T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  host::barrier(int(flags), line);
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  host::simd_barrier(int(flags), line);
}

template <typename T>
T simd_at(const char* values, uint lane) {
  return *reinterpret_cast<const T*>(values + lane * host::SLOT);
}

// Combined in pairs, as a tree; every lane has the same bits.
#define SIMD_REDUCTION(name, combine)                                              \
  template <typename T>                                                            \
  T name(T x, int line = __builtin_LINE()) {                                       \
    const char* values = host::exchange(&x, sizeof x, #name, line);                \
    T all[32];                                                                     \
    for (int i = 0; i < 32; ++i) all[i] = simd_at<T>(values, i);                   \
    for (int half = 16; half > 0; half /= 2) {                                     \
      for (int i = 0; i < half; ++i) all[i] = combine(all[i], all[i + half]);      \
    }                                                                              \
    return all[0];                                                                 \
  }

template <typename T>
T add(T x, T y) {
  return x + y;
}
SIMD_REDUCTION(simd_sum, add)
SIMD_REDUCTION(simd_max, max)
SIMD_REDUCTION(simd_min, min)

template <typename T>
T simd_shuffle(T x, ushort lane, int line = __builtin_LINE()) {
  const char* values = host::exchange(&x, sizeof x, "simd_shuffle", line);
  if (lane >= 32) host::fail_at(line, "simd_shuffle from a lane beyond 31");
  return simd_at<T>(values, lane);
}
template <typename T>
T simd_shuffle_xor(T x, ushort mask, int line = __builtin_LINE()) {
  const char* values = host::exchange(&x, sizeof x, "simd_shuffle_xor", line);
  const uint from = host::lane() ^ mask;
  if (from >= 32) host::fail_at(line, "simd_shuffle_xor from a lane beyond 31");
  return simd_at<T>(values, from);
}
// Lanes without a partner keep their own value.
template <typename T>
T simd_shuffle_down(T x, ushort delta, int line = __builtin_LINE()) {
  const char* values = host::exchange(&x, sizeof x, "simd_shuffle_down", line);
  const uint from = host::lane() + delta;
  return from < 32 ? simd_at<T>(values, from) : x;
}
template <typename T>
T simd_shuffle_up(T x, ushort delta, int line = __builtin_LINE()) {
  const char* values = host::exchange(&x, sizeof x, "simd_shuffle_up", line);
  return delta <= host::lane() ? simd_at<T>(values, host::lane() - delta) : x;
}

// A matrix of 8 x 8 of which each lane holds two neighbours of a row.
struct simdgroup_float8x8 {
  float2 mine;
  float2& thread_elements() { return mine; }
};

inline uint matrix_lane(uint row, uint column) {
  return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column / 2 % 2;
}

inline void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_float8x8& a,
                                          const simdgroup_float8x8& b, const simdgroup_float8x8& c,
                                          int line = __builtin_LINE()) {
  const float2 mine[2] = {a.mine, b.mine};
  const char* values = host::exchange(mine, sizeof mine, "a matrix product", line);
  const uint lane = host::lane();
  const uint row = lane / 16 * 4 + lane / 2 % 4, column = lane / 8 % 2 * 4 + lane % 2 * 2;
  float2 sum = c.mine;
  for (uint k = 0; k < 8; ++k) {
    const float* from_a = reinterpret_cast<const float*>(values + matrix_lane(row, k) * host::SLOT);
    for (uint i = 0; i < 2; ++i) {
      const char* from_b = values + matrix_lane(k, column + i) * host::SLOT + sizeof(float2);
      sum[i] += from_a[k % 2] * reinterpret_cast<const float*>(from_b)[(column + i) % 2];
    }
  }
  d.mine = sum;
}

}  // namespace metal

using namespace metal;

// An array of the group, which the runner makes of `threadgroup T name[...]`.
template <typename T>
struct ItemBytes {
  static constexpr size_t value = sizeof(T);
};
template <typename T, size_t N>
struct ItemBytes<T[N]> : ItemBytes<T> {};

template <typename T, int ID>
T& threadgroup_array(const char* name) {
  return *static_cast<T*>(host::shared(ID, sizeof(T), ItemBytes<T>::value, name));
}
#define THREADGROUP_ARRAY(name, dimensions, ...) \
  auto& name = threadgroup_array<__VA_ARGS__ dimensions, __COUNTER__>(#name)

// Functions may be called with any pointer here; metal_addresses.h tells them apart.
#define device
#define constant
#define thread
#define threadgroup
