// The kernels' dialect in Metal; prelude.cuda.h defines the same names, docs/kernels.md explains.

#define DEVICE device
#define CONST_DEVICE const device
#define THREADGROUP threadgroup
#define LOCAL thread
#define INLINE METAL_FUNC
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHARED(type, name, count) alignas(16) threadgroup type name[count]

// Orders what the threads of a group read and write in SHARED memory.
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
// The same, in device memory too.
#define BARRIER_DEVICE() threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup)
// Orders SHARED memory within a simd group.
#define SIMD_BARRIER() simdgroup_barrier(mem_flags::mem_threadgroup)

// Asks the caches for what `pointer` points to, where there is a way; 128 bytes or less.
#define PREFETCH(pointer) ((void)(pointer))

// simd_sum, simd_max, simd_min, simd_shuffle, simd_shuffle_xor, simd_shuffle_down,
// simd_shuffle_up, fma, min and max are Metal's own.

#define INF INFINITY

INLINE float exp_(float x) { return metal::precise::exp(x); }
INLINE float log_(float x) { return metal::precise::log(x); }
INLINE float tanh_(float x) { return metal::precise::tanh(x); }
INLINE float sqrt_(float x) { return metal::precise::sqrt(x); }
INLINE float rsqrt_(float x) { return metal::precise::rsqrt(x); }
// A few units in the last place worse, and quicker.
INLINE float fast_exp_(float x) { return metal::fast::exp(x); }
INLINE float fast_divide_(float x, float y) { return metal::fast::divide(x, y); }

INLINE float bits_to_float(uint bits) { return as_type<float>(bits); }
INLINE uint float_to_bits(float x) { return as_type<uint>(x); }

template <typename T>
INLINE float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
INLINE T from_float(float x) {
  return static_cast<T>(x);
}

INLINE float4 make4(float x, float y, float z, float w) { return float4(x, y, z, w); }

// Four values at once, as float; the address is a multiple of their size together. `shared_` is for
// SHARED memory.
template <typename T>
INLINE float4 load4(const device T* from) {
  return float4(*reinterpret_cast<const device vec<T, 4>*>(from));
}

template <typename T>
INLINE float4 shared_load4(const threadgroup T* from) {
  return float4(*reinterpret_cast<const threadgroup vec<T, 4>*>(from));
}

template <typename T>
INLINE void store4(device T* to, float4 x) {
  *reinterpret_cast<device vec<T, 4>*>(to) = vec<T, 4>(x);
}

template <typename T>
INLINE void shared_store4(threadgroup T* to, float4 x) {
  *reinterpret_cast<threadgroup vec<T, 4>*>(to) = vec<T, 4>(x);
}

// N values, a multiple of 4 or 1, with as few instructions as the hardware has.
template <int N, typename T>
INLINE void load(thread float* to, const device T* from) {
  if (N == 1) to[0] = to_float(from[0]);
  UNROLL
  for (int i = 0; i + 4 <= N; i += 4) {
    float4 x = load4(from + i);
    to[i] = x.x;
    to[i + 1] = x.y;
    to[i + 2] = x.z;
    to[i + 3] = x.w;
  }
}

template <int N, typename T>
INLINE void store(device T* to, const thread float* from) {
  if (N == 1) to[0] = from_float<T>(from[0]);
  UNROLL
  for (int i = 0; i + 4 <= N; i += 4) {
    store4(to + i, float4(from[i], from[i + 1], from[i + 2], from[i + 3]));
  }
}
