// The same library, declared only, with Metal's address spaces as types: clang then refuses to mix
// them. Compiled for arm64, which has two 16-bit floats, without any system header.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

// Keywords, as in Metal: nothing else can have these names.
#define half _Float16
#define bfloat __fp16  // stands for it: another type of the same size
typedef half float16_t;
typedef bfloat bfloat16_t;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define VECTORS(type)           \
  typedef vec<type, 2> type##2; \
  typedef vec<type, 4> type##4;
typedef vec<half, 2> half2;
typedef vec<half, 4> half4;
VECTORS(float)
VECTORS(int)
VECTORS(uint)
VECTORS(short)
VECTORS(ushort)
VECTORS(char)
VECTORS(uchar)
typedef vec<float, 3> float3;
typedef vec<uint, 3> uint3;

template <typename V, typename... Ts>
V construct(Ts...);
template <typename T, typename U>
T as_type(U);

namespace metal {

#define FLOAT_FUNCTIONS \
  float exp(float);     \
  float exp2(float);    \
  float log(float);     \
  float log2(float);    \
  float tanh(float);    \
  float sqrt(float);    \
  float rsqrt(float);   \
  float fma(float, float, float);

FLOAT_FUNCTIONS
namespace precise {
FLOAT_FUNCTIONS
}
namespace fast {
FLOAT_FUNCTIONS
float divide(float, float);
}

float abs(float);
float fabs(float);
float floor(float);
float ceil(float);
float rint(float);
bool isnan(float);
bool isinf(float);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);
float min(float, float);
float max(float, float);
template <typename T>
T min(T, T);
template <typename T>
T max(T, T);
template <typename T>
T clamp(T, T, T);

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <typename T>
T simd_sum(T);
template <typename T>
T simd_max(T);
template <typename T>
T simd_min(T);
template <typename T>
T simd_shuffle(T, ushort);
template <typename T>
T simd_shuffle_xor(T, ushort);
template <typename T>
T simd_shuffle_down(T, ushort);
template <typename T>
T simd_shuffle_up(T, ushort);

struct simdgroup_float8x8 {
  float2& thread_elements();
};
void simdgroup_multiply_accumulate(simdgroup_float8x8&, simdgroup_float8x8, simdgroup_float8x8,
                                   simdgroup_float8x8);

}  // namespace metal

using namespace metal;

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
