// Short convolution and SiLU of queries, keys and values, then the L2 norm of queries and keys, for
// a prefill: read once, written once.
//
// A group works for 32 tokens of one head with 3 D threads, three rows of a channel each, 8 tokens
// at a time. A thread carries the last TAPS - 1 inputs along.
//
// qkv [B, TOKENS, 3 HEADS D], conv_in [B, TAPS - 1, 3 HEADS D], conv_weight [3 HEADS D, TAPS],
// mask [B, TOKENS], place [1]: TOKENS; q, k, v [B, TOKENS, HEADS, D].
//
// T: dtype of q, k and v. D: 32, 64 or 128. HEADS. TAPS. MASKED: whether there is a mask; tokens
// where it is false count as zeros. SCALE: of the queries. L2_EPS: of the norm. Groups:
// TOKENS / 32, HEADS, B.
//
// Bytes a token and head at D = 128 in bfloat16: 1608, the last three tokens of the group before
// included; 4096 tokens of 96 heads: 0.63 GB, 0.15 ms at an H200's 4.3 TB/s.

KERNEL {
  constexpr int C = 32, BATCH = 8, PARTS = D / 32;
  const uint head = GROUP_Y, row = GROUP_Z, tokens = place[0];
  const uint part = THREAD / D, c = THREAD % D, channel = (part * HEADS + head) * D + c;

  SHARED(float, squares, 2 * 2 * BATCH * PARTS);  // of even and of odd batches

  float x[TAPS - 1 + BATCH], taps[TAPS];
  UNROLL
  for (int w = 0; w < TAPS; ++w) taps[w] = to_float(conv_weight[channel * TAPS + w]);
  UNROLL
  for (int i = 0; i < TAPS - 1; ++i) {
    if (GROUP_X == 0) {
      x[i] = to_float(conv_in[(row * (TAPS - 1) + i) * (3 * HEADS * D) + channel]);
    } else {
      const size_t at = size_t(row) * tokens + C * GROUP_X - (TAPS - 1) + i;
      const bool real = !MASKED || mask[at];
      x[i] = real ? to_float(qkv[at * (3 * HEADS * D) + channel]) : 0.0f;
    }
  }
  DEVICE T* to = part == 0 ? q : part == 1 ? k : v;
  for (uint batch = 0; batch < C / BATCH; ++batch) {
    const uint first = C * GROUP_X + BATCH * batch;
    if (first >= tokens) break;
    float z[BATCH];
    UNROLL
    for (int t = 0; t < BATCH; ++t) {
      const size_t at = size_t(row) * tokens + first + t;
      const bool real = first + t < tokens && (!MASKED || mask[at]);
      x[TAPS - 1 + t] = real ? to_float(qkv[at * (3 * HEADS * D) + channel]) : 0.0f;
    }
    THREADGROUP float* sums = squares + batch % 2 * (2 * BATCH * PARTS);
    UNROLL
    for (int t = 0; t < BATCH; ++t) {
      float sum = 0.0f;
      UNROLL
      for (int w = 0; w < TAPS; ++w) sum += x[t + w] * taps[w];
      z[t] = sum / (1.0f + exp_(-sum));
      if (part < 2) {
        const float square = simd_sum(z[t] * z[t]);
        if (LANE == 0) sums[(part * BATCH + t) * PARTS + SIMD_GROUP % PARTS] = square;
      }
    }
    BARRIER();
    UNROLL
    for (int t = 0; t < BATCH; ++t) {
      if (part < 2) {
        float square = L2_EPS;
        for (int p = 0; p < PARTS; ++p) square += sums[(part * BATCH + t) * PARTS + p];
        z[t] *= rsqrt_(square) * (part == 0 ? SCALE : 1.0f);
      }
      if (first + t >= tokens) continue;
      to[((size_t(row) * tokens + first + t) * HEADS + head) * D + c] = from_float<T>(z[t]);
    }
    UNROLL
    for (int i = 0; i < TAPS - 1; ++i) x[i] = x[BATCH + i];
  }
}
