// What groups of mla_decode.h found, together: y [512, HEADS] of each, relative to its own exponent.
//
// parts [GROUPS, 512, HEADS] bfloat16, about [GROUPS, 2, HEADS] (exponent of 2, sum of weights);
// y [HEADS, 512]. HEADS: a multiple of 8. A lane takes 8 neighbours of 512 HEADS, a simd group every
// SIMDS-th of the groups. SIMDS simd groups; groups: 2 HEADS.
//
// It reads 13 MB for 132 groups of 96 heads, which are in the second-level cache still.

KERNEL {
  constexpr int SIMDS = GROUP_SIZE / 32;
  SHARED(float, tops, SIMDS * 32 * 8);
  SHARED(float, found, SIMDS * 32 * 8);
  SHARED(float, totals, SIMDS * 32 * 8);
  const uint first = (GROUP_X * 32 + LANE) * 8, head = first % HEADS;
  const uint groups = about_shape[0], mine = (SIMD_GROUP * 32 + LANE) * 8;

  float top[8], y_[8], total[8];
  UNROLL
  for (int i = 0; i < 8; ++i) top[i] = -INF, y_[i] = 0.0f, total[i] = 0.0f;
  for (uint g = SIMD_GROUP; g < groups; g += SIMDS) {
    float x[8];
    load<8>(x, about + g * (2 * HEADS) + head);
    UNROLL
    for (int i = 0; i < 8; ++i) top[i] = max(top[i], x[i]);
  }
  UNROLL
  for (int i = 0; i < 8; ++i) tops[mine + i] = top[i];
  BARRIER();
  UNROLL
  for (int s = 0; s < SIMDS; ++s) {
    UNROLL
    for (int i = 0; i < 8; ++i) top[i] = max(top[i], tops[(s * 32 + LANE) * 8 + i]);
  }
  for (uint g = SIMD_GROUP; g < groups; g += SIMDS) {
    float x[8], sum[8], part[8];
    load<8>(x, about + g * (2 * HEADS) + head);
    load<8>(sum, about + g * (2 * HEADS) + HEADS + head);
    load<8>(part, parts + size_t(g) * (512 * HEADS) + first);
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const float by = fast_exp_((x[i] - top[i]) * 0.6931471805599453f);
      y_[i] = fma(by, part[i], y_[i]);
      total[i] = fma(by, sum[i], total[i]);
    }
  }
  UNROLL
  for (int i = 0; i < 8; ++i) found[mine + i] = y_[i], totals[mine + i] = total[i];
  BARRIER();
  for (uint i = THREAD; i < 256; i += GROUP_SIZE) {
    float sum = 0.0f, of = 0.0f;
    UNROLL
    for (int s = 0; s < SIMDS; ++s) {
      sum += found[s * 256 + i];
      of += totals[s * 256 + i];
    }
    const uint at = GROUP_X * 256 + i;
    y[at % HEADS * 512 + at / HEADS] = from_float<T>(sum / of);
  }
}
