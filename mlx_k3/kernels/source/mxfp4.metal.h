// The numbers of MXFP4 codes (E2M1, the low nibble first) in Metal; mxfp4.cuda.h defines the same.
//
// A code's sign and its three other bits, moved apart, are a half of 2^-14 times its value: both
// formats count exponents from their lowest up, subnormals too. Metal may flush subnormal floats
// but computes with subnormal halves, so the factor is taken back in half.

#define CODE_UNIT 1.0f

INLINE float code_value(half x) { return to_float(x * half(16384.0f)); }

// sums += the values of 8 codes times x[8], each of the two over four of them; times 1 / CODE_UNIT.
INLINE float2 dot8(uint codes, const LOCAL float* x, float2 sums) {
  const uint sign = 0x80008000u, rest = 0x0e000e00u;
  const uint pairs[4] = {(codes << 12 & sign) | (codes << 9 & rest),
                         (codes << 8 & sign) | (codes << 5 & rest),
                         (codes << 4 & sign) | (codes << 1 & rest),
                         (codes & sign) | (codes >> 3 & rest)};
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const half2 pair = as_type<half2>(pairs[i]);
    sums.x = fma(code_value(pair.x), x[i], sums.x);
    sums.y = fma(code_value(pair.y), x[i + 4], sums.y);
  }
  return sums;
}
