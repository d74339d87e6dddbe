// Short convolution and SiLU of queries, keys and values, then the L2 norm of queries and keys, for
// a prefill: read once, written once.
//
// A simd group works for 32 tokens of one head's queries, keys or values, 8 tokens at a time, and a
// lane for D / 32 neighbouring channels, whose last TAPS - 1 inputs it carries along.
//
// qkv [B, T, 3 HEADS D], conv_in [B, TAPS - 1, 3 HEADS D], conv_weight [3 HEADS D, TAPS],
// mask [B, T]; q, k, v [B, T, HEADS, D].
//
// W: dtype of q, k and v. D: 32, 64 or 128. HEADS. TAPS. MASKED: whether there is a mask; tokens
// where it is false count as zeros. SCALE: of the queries. L2_EPS: of the norm. Groups: T / 32,
// HEADS, B, of 96 threads.
//
// Bytes a token and head at D = 128 in bfloat16: 1608, the last three tokens of the group before
// included; 4096 tokens of 96 heads: 0.63 GB, 0.15 ms at an H200's 4.3 TB/s. Instructions: some 80
// a token for 128 channels, 0.1 ms if one is issued every cycle.

// A lane's inputs of one token, or zeros.
template <int MINE, typename T>
INLINE void load_inputs(LOCAL float* x, CONST_DEVICE T* from, bool real) {
  constexpr int WIDE = MINE % 4 == 0 ? 4 : 1;
  UNROLL
  for (int i = 0; i < MINE; ++i) x[i] = 0.0f;
  if (!real) return;
  UNROLL
  for (int i = 0; i < MINE; i += WIDE) load<WIDE>(x + i, from + i);
}

KERNEL {
  constexpr int C = 32, BATCH = 8, MINE = D / 32;
  constexpr int WIDE = MINE % 4 == 0 ? 4 : 1, TAPS_WIDE = TAPS % 4 == 0 ? 4 : 1;
  const uint which = GROUP_Y * (GROUP_SIZE / 32) + SIMD_GROUP;
  const uint row = GROUP_Z, tokens = qkv_shape[1];
  const uint part = which / HEADS, head = which % HEADS, channel = which * D + LANE * MINE;
  DEVICE W* to = part == 0 ? q : part == 1 ? k : v;
  float x[TAPS - 1 + BATCH][MINE], taps[MINE * TAPS];
  UNROLL
  for (int i = 0; i < MINE * TAPS; i += TAPS_WIDE) {
    load<TAPS_WIDE>(taps + i, conv_weight + (channel * TAPS + i));
  }
  UNROLL
  for (int i = 0; i < TAPS - 1; ++i) {
    if (GROUP_X == 0) {
      const size_t at = size_t(row) * (TAPS - 1) + i;
      load_inputs<MINE>(x[i], conv_in + (at * (3 * HEADS * D) + channel), true);
    } else {
      const size_t at = size_t(row) * tokens + C * GROUP_X - (TAPS - 1) + i;
      load_inputs<MINE>(x[i], qkv + (at * (3 * HEADS * D) + channel), !MASKED || mask[at]);
    }
  }
  for (uint batch = 0; batch < C / BATCH; ++batch) {
    const uint first = C * GROUP_X + BATCH * batch;
    if (first >= tokens) break;
    UNROLL
    for (int t = 0; t < BATCH; ++t) {
      const size_t at = size_t(row) * tokens + first + t;
      const bool real = first + t < tokens && (!MASKED || mask[at]);
      load_inputs<MINE>(x[TAPS - 1 + t], qkv + (at * (3 * HEADS * D) + channel), real);
    }
    UNROLL
    for (int t = 0; t < BATCH; ++t) {
      float z[MINE], square = 0.0f;
      UNROLL
      for (int i = 0; i < MINE; ++i) {
        float sum = 0.0f;
        UNROLL
        for (int w = 0; w < TAPS; ++w) sum += x[t + w][i] * taps[i * TAPS + w];
        z[i] = fast_divide_(sum, 1.0f + fast_exp_(-sum));
        square += z[i] * z[i];
      }
      const float norm = rsqrt_(simd_sum(square) + L2_EPS) * (part == 0 ? SCALE : 1.0f);
      UNROLL
      for (int i = 0; i < MINE; ++i) z[i] *= part < 2 ? norm : 1.0f;
      if (first + t >= tokens) continue;
      const size_t at = (size_t(row) * tokens + first + t) * HEADS + head;
      UNROLL
      for (int i = 0; i < MINE; i += WIDE) store<WIDE>(to + (at * D + LANE * MINE + i), z + i);
    }
    UNROLL
    for (int i = 0; i < TAPS - 1; ++i) {
      UNROLL
      for (int j = 0; j < MINE; ++j) x[i][j] = x[BATCH + i][j];
    }
  }
}
