// The first half of the chosen experts of a few tokens: h = situ(gate z, up z), from packed MXFP4.
//
// z [N, OUTER], indices [N K], gate and up [E, INNER, OUTER / 8] and their scales
// [E, INNER, OUTER / 32]; h [N K, INNER], for each token and each of its experts.
//
// T: dtype of z. H: of h. OUTER, INNER: the experts' sizes. K: experts a token. ROWS: of a lane.
// SPAN: lanes that share a row. MXFP8: whether z is rounded to it. LINEAR: whether there is a
// LINEAR_BETA; BETA. A simd group takes ROWS 32 / SPAN rows of one expert for one token, first of
// gate, then of up. Groups: N K, and as many as INNER's rows need. Tokens of the same rows come at
// about the same time, so what they share of an expert is read once where the cache holds it.
//
// K3 at one token: 16 experts of 2 x 3072 rows of 1792 + 112 bytes, 187 MB, 44 us at the 4.3 TB/s
// of an H200, whose 132 processors must each have 28 KB under way if memory answers in 0.85 us.
// ROWS = 6 and SPAN = 8 make 24 rows a simd group and, with 8 simd groups, 256 groups: two a
// processor, all at once, while a thread has at most 128 registers (96 to 122, by nvcc 13.0). A
// step of a simd group is 3.3 KB and 713 instructions, 3.7 a code, of which 3.25 unpack, convert
// and multiply. The 16 of a processor need 2850 clocks for a step at 4 instructions a clock, and
// 3170 at that bandwidth and 1.98 GHz; 713 of them pass until a simd group waits, so that memory
// may take 2450, 1.2 us, to answer. In all 39 us of instructions beside 44 us of bytes.

KERNEL {
  constexpr int SIMDS = GROUP_SIZE / 32, APART = 32 / SPAN;
  constexpr bool WHOLE = INNER % (APART * ROWS * SIMDS) == 0;
  const uint pair = GROUP_X, expert = indices[pair], part = LANE % SPAN;
  const uint first = (GROUP_Y * SIMDS + SIMD_GROUP) * (APART * ROWS) + LANE / SPAN;
  const size_t before = size_t(expert) * (INNER * (OUTER / 32));  // groups of other experts
  CONST_DEVICE T* x = z + pair / K * OUTER;

  float gate_sums[ROWS], up_sums[ROWS];
  multiply_rows<ROWS, SPAN, INNER, OUTER, WHOLE, MXFP8>(gate_sums, gate + 4 * before,
                                                        gate_scales + before, x, first, part);
  multiply_rows<ROWS, SPAN, INNER, OUTER, WHOLE, MXFP8>(up_sums, up + 4 * before,
                                                        up_scales + before, x, first, part);

  // Each lane of a row keeps another of the rows.
  float g = 0.0f, u = 0.0f;
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const float gate_sum = over_row<SPAN>(gate_sums[r]), up_sum = over_row<SPAN>(up_sums[r]);
    if (part == r) {
      g = gate_sum;
      u = up_sum;
    }
  }
  if (LINEAR) u = LINEAR_BETA * tanh_(u / LINEAR_BETA);
  const float y = BETA * tanh_(g / BETA) / (1.0f + exp_(-g)) * u;
  const uint row = first + part * APART;
  if (part < ROWS && row < INNER) h[pair * INNER + row] = from_float<H>(y);
}
