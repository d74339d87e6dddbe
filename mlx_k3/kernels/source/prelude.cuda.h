// The kernels' dialect in CUDA C++; prelude.metal.h defines the same names.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define DEVICE
#define CONST_DEVICE const
#define THREADGROUP
#define LOCAL
#define INLINE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]

#define BARRIER() __syncthreads()
#define BARRIER_DEVICE() __syncthreads()
#define SIMD_BARRIER() __syncwarp()

// Soon somebody will read what `pointer` points to.
#define PREFETCH(pointer) asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer))

#define INF __int_as_float(0x7f800000)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

template <typename T>
INLINE T simd_shuffle(T x, uint lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T>
INLINE T simd_shuffle_xor(T x, uint mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename T>
INLINE T simd_shuffle_down(T x, uint delta) {
  return __shfl_down_sync(0xffffffffu, x, delta);
}

template <typename T>
INLINE T simd_shuffle_up(T x, uint delta) {
  return __shfl_up_sync(0xffffffffu, x, delta);
}

template <typename T>
INLINE T simd_sum(T x) {
  UNROLL
  for (uint mask = 16; mask > 0; mask /= 2) x += simd_shuffle_xor(x, mask);
  return x;
}

template <typename T>
INLINE T simd_max(T x) {
  UNROLL
  for (uint mask = 16; mask > 0; mask /= 2) x = max(x, simd_shuffle_xor(x, mask));
  return x;
}

template <typename T>
INLINE T simd_min(T x) {
  UNROLL
  for (uint mask = 16; mask > 0; mask /= 2) x = min(x, simd_shuffle_xor(x, mask));
  return x;
}

#if __CUDA_ARCH__ >= 800
// One instruction, where all else takes five shuffles.
template <>
INLINE uint simd_max(uint x) {
  return __reduce_max_sync(0xffffffffu, x);
}
template <>
INLINE uint simd_min(uint x) {
  return __reduce_min_sync(0xffffffffu, x);
}
#endif

INLINE float exp_(float x) { return expf(x); }
INLINE float log_(float x) { return logf(x); }
INLINE float tanh_(float x) { return tanhf(x); }
INLINE float sqrt_(float x) { return sqrtf(x); }
INLINE float rsqrt_(float x) { return rsqrtf(x); }
INLINE float fast_exp_(float x) { return __expf(x); }
INLINE float fast_divide_(float x, float y) { return __fdividef(x, y); }

INLINE float bits_to_float(uint bits) { return __uint_as_float(bits); }
INLINE uint float_to_bits(float x) { return __float_as_uint(x); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(__half x) { return __half2float(x); }
INLINE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
INLINE float to_float(int x) { return static_cast<float>(x); }
INLINE float to_float(uint x) { return static_cast<float>(x); }

template <typename T>
INLINE T from_float(float x) {
  return static_cast<T>(x);
}
template <>
INLINE __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
INLINE __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

INLINE float4 make4(float x, float y, float z, float w) { return make_float4(x, y, z, w); }

// BYTES of memory moved at once; at most 16, what one instruction moves.
template <int BYTES>
struct Words;
template <>
struct Words<2> {
  typedef ushort type;
};
template <>
struct Words<4> {
  typedef uint type;
};
template <>
struct Words<8> {
  typedef uint2 type;
};
template <>
struct Words<16> {
  typedef uint4 type;
};

template <int N, typename T>
INLINE void load(float* to, const T* from) {
  constexpr int BYTES = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  constexpr int COUNT = BYTES / sizeof(T);
  typedef typename Words<BYTES>::type W;
  UNROLL
  for (int i = 0; i < N; i += COUNT) {
    W word = *reinterpret_cast<const W*>(from + i);
    const T* values = reinterpret_cast<const T*>(&word);
    UNROLL
    for (int j = 0; j < COUNT; ++j) to[i + j] = to_float(values[j]);
  }
}

template <int N, typename T>
INLINE void store(T* to, const float* from) {
  constexpr int BYTES = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  constexpr int COUNT = BYTES / sizeof(T);
  typedef typename Words<BYTES>::type W;
  UNROLL
  for (int i = 0; i < N; i += COUNT) {
    W word;
    T* values = reinterpret_cast<T*>(&word);
    UNROLL
    for (int j = 0; j < COUNT; ++j) values[j] = from_float<T>(from[i + j]);
    *reinterpret_cast<W*>(to + i) = word;
  }
}

template <typename T>
INLINE float4 load4(const T* from) {
  float x[4];
  load<4>(x, from);
  return make_float4(x[0], x[1], x[2], x[3]);
}

template <typename T>
INLINE void store4(T* to, float4 x) {
  const float values[4] = {x.x, x.y, x.z, x.w};
  store<4>(to, values);
}

template <typename T>
INLINE float4 shared_load4(const T* from) {
  return load4(from);
}

template <typename T>
INLINE void shared_store4(T* to, float4 x) {
  store4(to, x);
}
