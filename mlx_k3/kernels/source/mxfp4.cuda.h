// The numbers of MXFP4 codes (E2M1, the low nibble first) in CUDA; mxfp4.metal.h defines the same.
//
// A code's sign and its three other bits, moved apart, are the high byte of a half of 2^-14 times
// its value: both formats count exponents from their lowest up, subnormals too. Four codes are
// moved at once, in bytes; that leaves 2 logical operations a code, half the rate of products, for
// 8 bytes to arrive. 10 instructions unpack 8 codes.

#define CODE_UNIT 16384.0f

// The halves whose high bytes are two bytes of x, chosen by `which`.
INLINE float2 high_bytes(uint x, uint which) {
  const uint halves = __byte_perm(x, 0, which);
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// sums += the values of 8 codes times x[8], each of the two over four of them; times 1 / CODE_UNIT.
INLINE float2 dot8(uint codes, const LOCAL float* x, float2 sums) {
  // A product by 2^4 + 2^1 copies a nibble to where its sign belongs and to where its other bits
  // do. It is taken of the complement, which carries into the sign only for a zero.
  const uint even = ~((~codes & 0x0f0f0f0fu) * 0x12u) & 0x8e8e8e8eu;
  const uint odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
  UNROLL
  for (int i = 0; i < 8; i += 4) {
    const uint which = i == 0 ? 0x1404 : 0x3424;  // bytes 0 and 1, or 2 and 3; 4 is a zero
    const float2 pair = high_bytes(even, which);
    sums.x = fma(pair.x, x[i], sums.x);
    sums.y = fma(pair.y, x[i + 2], sums.y);
    const float2 next = high_bytes(odd, which);
    sums.x = fma(next.x, x[i + 1], sums.x);
    sums.y = fma(next.y, x[i + 3], sums.y);
  }
  return sums;
}

// As the prelude's, by one operation a value: a bfloat16 is the upper half of its float.
template <>
INLINE void load<8>(float* to, const __nv_bfloat16* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const uint pairs[4] = {words.x, words.y, words.z, words.w};
  UNROLL
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = bits_to_float(pairs[i] << 16);
    to[2 * i + 1] = bits_to_float(pairs[i] & 0xffff0000u);
  }
}
