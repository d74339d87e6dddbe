// What groups of mla_decode.h found, together: y [512, HEADS] of each, relative to its own exponent.
//
// parts [GROUPS, 512, HEADS] bfloat16, about [GROUPS, 2, HEADS] (exponent of 2, sum of weights);
// y [HEADS, 512]. HEADS: a multiple of 8. A lane takes 8 neighbours of 512 HEADS, a simd group every
// SIMDS-th of the groups, AT_ONCE of these at a time. SIMDS simd groups; groups: 2 HEADS.
//
// It reads 13 MB for 132 groups of 96 heads, which are in the second-level cache still. What takes
// time is to wait for them: a simd group waits five times.

#define AT_ONCE 4
#define LN_2 0.6931471805599453f

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
  for (uint g = SIMD_GROUP; g < groups; g += AT_ONCE * SIMDS) {
    float x[AT_ONCE][8], sum[AT_ONCE][8], part[AT_ONCE][8];
    UNROLL
    for (int c = 0; c < AT_ONCE; ++c) {
      const uint group = min(g + c * SIMDS, groups - 1);
      load<8>(x[c], about + group * (2 * HEADS) + head);
      load<8>(sum[c], about + group * (2 * HEADS) + HEADS + head);
      load<8>(part[c], parts + size_t(group) * (512 * HEADS) + first);
    }
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const float before = top[i];
      UNROLL
      for (int c = 0; c < AT_ONCE; ++c) top[i] = max(top[i], x[c][i]);
      const float faded = fast_exp_((before - top[i]) * LN_2);
      y_[i] *= faded;
      total[i] *= faded;
      UNROLL
      for (int c = 0; c < AT_ONCE; ++c) {
        const float by = g + c * SIMDS < groups ? fast_exp_((x[c][i] - top[i]) * LN_2) : 0.0f;
        y_[i] = fma(by, part[c][i], y_[i]);
        total[i] = fma(by, sum[c][i], total[i]);
      }
    }
  }
  UNROLL
  for (int i = 0; i < 8; ++i) {
    tops[mine + i] = top[i];
    found[mine + i] = y_[i];
    totals[mine + i] = total[i];
  }
  BARRIER();
  for (uint i = THREAD; i < 256; i += GROUP_SIZE) {
    float most = tops[i], sum = 0.0f, of = 0.0f;
    UNROLL
    for (int s = 1; s < SIMDS; ++s) most = max(most, tops[s * 256 + i]);
    UNROLL
    for (int s = 0; s < SIMDS; ++s) {
      const float by = fast_exp_((tops[s * 256 + i] - most) * LN_2);
      sum = fma(by, found[s * 256 + i], sum);
      of = fma(by, totals[s * 256 + i], of);
    }
    const uint at = GROUP_X * 256 + i;
    y[at % HEADS * 512 + at / HEADS] = from_float<T>(sum / of);
  }
}
