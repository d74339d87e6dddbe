// Products of a packed MXFP4 matrix with a vector, a few rows a simd group: what the kernels of the
// experts share.
//
// SPAN lanes share a row, so that a simd group works on 32 / SPAN rows at a time and a lane on ROWS
// of them, that many apart. A lane's unit is a group of 32 columns, 16 bytes of codes and a scale
// byte; in a step the lanes of a row take adjacent groups, whole cache lines. The lane needs the
// vector's 32 values once for all its rows.

// Rounds the 32 values of a group to MXFP8: E4M3 with a common power of two, which puts the largest
// between 256 and 512; what is beyond 448 becomes that.
INLINE void round_to_mxfp8(LOCAL float* x) {
  float largest = 0.0f;
  UNROLL
  for (int i = 0; i < 32; ++i) largest = max(largest, fabs(x[i]));
  const uint scale = max(float_to_bits(largest) >> 23, 8u) - 8u;
  const float down = bits_to_float((254u - scale) << 23);
  const float back = bits_to_float(max(scale << 23, 0x00400000u));
  UNROLL
  for (int i = 0; i < 32; ++i) {
    const float y = min(max(x[i] * down, -448.0f), 448.0f);
    // Added to 1.5 2^20 times its own power of two, a number keeps four bits; at least 2^-9
    // remains.
    const uint exponent = max(float_to_bits(y) >> 23 & 255u, 121u);
    const float rounder = bits_to_float((exponent + 20u) << 23 | 0x00400000u);
    x[i] = ((y + rounder) - rounder) * back;
  }
}

// sums[r] = the lane's share of row `first + r 32 / SPAN` of a matrix [HEIGHT, WIDTH] times x
// [WIDTH]; rows from HEIGHT on are as the last one. `codes` and `scales` are the matrix, `part` is
// LANE % SPAN. A scale of 2^-127, the least, counts as zero.
//
// The next step's codes are asked for within the present step, ROWS times 16 bytes a lane.
template <int ROWS, int SPAN, int HEIGHT, int WIDTH, bool WHOLE, bool MXFP8, typename T>
INLINE void multiply_rows(LOCAL float* sums, CONST_DEVICE uint* codes, CONST_DEVICE uint8_t* scales,
                          CONST_DEVICE T* x, uint first, uint part) {
  constexpr uint GROUPS = WIDTH / 32, APART = 32 / SPAN, LAST = HEIGHT - 1;
  UNROLL
  for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
  if (part >= GROUPS) return;
  const uint top = WHOLE ? first : min(first, LAST);
  codes += 4 * (top * GROUPS + part);
  scales += top * GROUPS + part;
  x += 32 * part;
  uint at[ROWS], scale[ROWS];
  uint4 packed[ROWS];
  UNROLL
  for (uint r = 0; r < ROWS; ++r) {
    at[r] = (WHOLE ? r * APART : min(first + r * APART, LAST) - top) * GROUPS;
    packed[r] = *reinterpret_cast<CONST_DEVICE uint4*>(codes + 4 * at[r]);
    scale[r] = scales[at[r]];
  }
  const uint steps = GROUPS % SPAN == 0 ? GROUPS / SPAN : (GROUPS - 1 - part) / SPAN + 1;
  for (uint step = 1; step <= steps; ++step) {
    float values[32];
    UNROLL
    for (int i = 0; i < 32; i += 8) load<8>(values + i, x + i);
    if (MXFP8) round_to_mxfp8(values);
    const uint ahead = step < steps ? SPAN : 0;  // the last step asks for its own once more
    codes += 4 * ahead;
    scales += ahead;
    x += 32 * ahead;
    UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const uint4 now = packed[r];
      const float power = bits_to_float(scale[r] << 23);  // 2^(scale - 127)
      packed[r] = *reinterpret_cast<CONST_DEVICE uint4*>(codes + 4 * at[r]);
      scale[r] = scales[at[r]];
      float2 sum = {0.0f, 0.0f};
      sum = dot8(now.x, values, sum);
      sum = dot8(now.y, values + 8, sum);
      sum = dot8(now.z, values + 16, sum);
      sum = dot8(now.w, values + 24, sum);
      sums[r] = fma(sum.x + sum.y, power, sums[r]);
    }
  }
  UNROLL
  for (int r = 0; r < ROWS; ++r) sums[r] *= CODE_UNIT;
}

// The sum over the SPAN lanes of a row, in each of them.
template <int SPAN>
INLINE float over_row(float x) {
  UNROLL
  for (int mask = SPAN / 2; mask > 0; mask /= 2) x += simd_shuffle_xor(x, mask);
  return x;
}
