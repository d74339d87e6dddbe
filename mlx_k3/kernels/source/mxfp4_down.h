// The second half of the chosen experts of a few tokens: y = sum_j weights_j down_j h_j, from
// packed MXFP4.
//
// h [N K, INNER], indices [N K], weights [N K] float, down [E, OUTER, INNER / 8] and its scales
// [E, OUTER, INNER / 32]; y [N, OUTER].
//
// H: dtype of h. T: of y. OUTER, INNER: the experts' sizes. K: experts a token. ROWS: of a lane.
// SPAN: lanes that share a row. MXFP8: whether h is rounded to it. A group takes ROWS 32 / SPAN
// rows for one token, its simd groups an expert each, several in turn if there are more. Their sums
// meet in shared memory and are added in one order. Groups: N, and as many as OUTER's rows need.
//
// K3 at one token: 16 experts of 3584 rows of 1536 + 96 bytes, 94 MB, 22 us at the 4.3 TB/s of an
// H200. ROWS = 7 and SPAN = 16 make 14 rows and 256 groups of 8 simd groups, two for each of its
// 132 processors while a thread has at most 128 registers (120 to 128, by nvcc 13.0). A step of a
// simd group is 3.8 KB and 856 instructions: the 16 of a processor need 3420 clocks at 4
// instructions a clock and 3700 at that bandwidth and 1.98 GHz. A group reads all of h, 98 KB in 16
// bits, from the cache beside 366 KB of weights; fewer rows would make that share larger. In all 20
// us of instructions beside 22 us of bytes.

KERNEL {
  constexpr int SIMDS = GROUP_SIZE / 32, APART = 32 / SPAN, TILE = APART * ROWS;
  constexpr bool WHOLE = OUTER % TILE == 0;
  const uint token = GROUP_X, part = LANE % SPAN;
  const uint first = GROUP_Y * TILE + LANE / SPAN;
  SHARED(float, partial, SIMDS * TILE);

  float sums[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
  for (uint j = SIMD_GROUP; j < K; j += SIMDS) {
    const uint pair = token * K + j, expert = indices[pair];
    const float weight = weights[pair];
    const size_t before = size_t(expert) * (OUTER * (INNER / 32));  // groups of other experts
    float own[ROWS];
    multiply_rows<ROWS, SPAN, OUTER, INNER, WHOLE, MXFP8>(
        own, down + 4 * before, down_scales + before, h + pair * INNER, first, part);
    UNROLL
    for (int r = 0; r < ROWS; ++r) sums[r] = fma(weight, own[r], sums[r]);
  }
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const float sum = over_row<SPAN>(sums[r]);
    if (part == 0) partial[SIMD_GROUP * TILE + r * APART + LANE / SPAN] = sum;
  }
  BARRIER();
  const uint row = GROUP_Y * TILE + THREAD;
  if (THREAD < TILE && row < OUTER) {
    float sum = 0.0f;
    for (uint s = 0; s < SIMDS; ++s) sum += partial[s * TILE + THREAD];
    y[token * OUTER + row] = from_float<T>(sum);
  }
}
