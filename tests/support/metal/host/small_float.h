// 16-bit floats for a compiler that has none: rounded to nearest even after every operation. Only a
// cast makes one of another number.
#pragma once

#include <stdint.h>

struct HalfFormat {
  static uint16_t round(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // from 65520 on
    if (bits < 0x38800000) {  // denormal: 0.5's last place is the half's
      const float sum = __builtin_bit_cast(float, bits) + 0.5f;
      return sign | uint16_t(__builtin_bit_cast(uint32_t, sum) - 0x3f000000);
    }
    return sign | uint16_t((bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
  }
  static float widen(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31;
    const uint32_t fraction = bits & 1023;
    uint32_t all = (exponent + 112) << 23 | fraction << 13;
    if (exponent == 31) all = 0x7f800000 | fraction << 13;
    if (exponent == 0) all = __builtin_bit_cast(uint32_t, float(fraction) * 0x1p-24f);
    return __builtin_bit_cast(float, all | sign);
  }
};

struct BfloatFormat {
  static uint16_t round(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    if (x != x) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static float widen(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};

template <typename Format>
struct Small {
  uint16_t bits;
  Small() = default;
  template <typename T>
  explicit Small(T x) : bits(Format::round(static_cast<float>(x))) {}
  operator float() const { return Format::widen(bits); }
  Small operator-() const { return Small(-float(*this)); }
  friend Small operator+(Small a, Small b) { return Small(float(a) + float(b)); }
  friend Small operator-(Small a, Small b) { return Small(float(a) - float(b)); }
  friend Small operator*(Small a, Small b) { return Small(float(a) * float(b)); }
  friend Small operator/(Small a, Small b) { return Small(float(a) / float(b)); }
  Small& operator+=(Small b) { return *this = *this + b; }
  Small& operator-=(Small b) { return *this = *this - b; }
  Small& operator*=(Small b) { return *this = *this * b; }
};

typedef Small<HalfFormat> half;
typedef Small<BfloatFormat> bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

template <typename T, int N>
struct SmallVector;
template <typename T>
struct alignas(4) SmallVector<T, 2> {
  T x, y;
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
template <typename T>
struct alignas(8) SmallVector<T, 4> {
  T x, y, z, w;
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
