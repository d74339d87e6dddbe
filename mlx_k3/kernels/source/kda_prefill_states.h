// The pass over the chunks of a prefill: each chunk's outputs from the state at its start, and the
// state at its end. For a chunk, with S the state [K, V] (see kda_prefill_chunks.h for the rest):
//
//   u = w_v - w_k S,   o = q_start S + qk u,   S <- decay S + k_end u
//
// A simd group works for 16 values of one head, goes through all chunks and needs no other: its
// state [V, K] stays in registers. What a product gives is the next one's left factor as it lies
// there, and the right factors, which all simd groups of a head share, come from device memory in
// the order in which they are used. Those of the next chunk are asked for into the caches.
//
// beta [B, T, HEADS], of which only the shape is read; q_start, k_end, w_k, w_v, qk and decay as
// kda_prefill_chunks.h writes them; state_in [B, HEADS, D, D], values by keys; o [B, T, HEADS, D]
// and state_out as state_in, float32.
//
// W: dtype of what comes from there. D: 32, 64 or 128. HEADS. Groups: D / 64 or 1, HEADS, B, of
// 128 threads, or 64 for D = 32.

KERNEL {
  constexpr int C = 32, BLOCKS = D / 16;
  const uint head = GROUP_Y, row = GROUP_Z;
  const uint tokens = beta_shape[1], chunks = (tokens + C - 1) / C;
  const size_t of_head = size_t(row) * HEADS + head;
  const uint slice = (GROUP_X * (GROUP_SIZE / 32) + SIMD_GROUP) * 16;  // the first value
  const uint line = mma_row(LANE), column = mma_column(LANE);

  // In sixteens of keys: a lane's four neighbours of a value are in two sums.
  const size_t state_at = (of_head * D + slice + line) * D + 2 * column;
  float state[2 * BLOCKS][4];
  UNROLL
  for (int m = 0; m < BLOCKS; ++m) {
    UNROLL
    for (int r = 0; r < 2; ++r) {
      float x[4];
      load<4>(x, state_in + (state_at + 8 * r * D + 16 * m));
      UNROLL
      for (int e = 0; e < 4; ++e) state[2 * m + e / 2][2 * r + e % 2] = x[e];
    }
  }

  for (uint n = 0; n < chunks; ++n) {
    const size_t chunk = of_head * chunks + n;
    CONST_DEVICE W* queries = q_start + chunk * (C * D);
    CONST_DEVICE W* keys = w_k + chunk * (C * D);
    CONST_DEVICE W* ends = k_end + chunk * (C * D);
    CONST_DEVICE W* pairs = qk + chunk * (C * C);
    if (n + 1 < chunks) {
      constexpr uint LINE = 128 / sizeof(W);
      UNROLL
      for (uint line = 0; line < C * D / LINE; line += GROUP_SIZE) {
        const uint i = (line + THREAD) * LINE;
        if (i >= C * D) continue;
        PREFETCH(queries + (C * D + i));
        PREFETCH(keys + (C * D + i));
        PREFETCH(ends + (C * D + i));
        PREFETCH(w_v + ((chunk + 1) * (C * D) + i));
        if (i < C * C) PREFETCH(pairs + (C * C + i));
      }
    }
    float seen[4][4], output[4][4], values[16];
    UNROLL
    for (int i = 0; i < 16; ++i) seen[i / 4][i % 4] = output[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      Left<W> own;
      left_of(own, state[2 * m], state[2 * m + 1]);
      UNROLL
      for (int b = 0; b < 2; ++b) {
        Right<W> x[2];
        load_rights(x, keys + (b * BLOCKS + m) * 256, LANE);
        multiply(seen[2 * b], own, x[0]);
        multiply(seen[2 * b + 1], own, x[1]);
        load_rights(x, queries + (b * BLOCKS + m) * 256, LANE);
        multiply(output[2 * b], own, x[0]);
        multiply(output[2 * b + 1], own, x[1]);
      }
    }
    load<16>(values, w_v + (chunk * (C * D) + slice * C + 16 * LANE));
    UNROLL
    for (int i = 0; i < 16; ++i) seen[i / 4][i % 4] = values[i] - seen[i / 4][i % 4];
    Left<W> update[2];
    left_of(update[0], seen[0], seen[1]);
    left_of(update[1], seen[2], seen[3]);

    UNROLL
    for (int b = 0; b < 3; ++b) {  // of the four blocks of qk one is zero
      Right<W> x[2];
      load_rights(x, pairs + (b == 0 ? 0 : b + 1) * 256, LANE);
      multiply(output[b == 0 ? 0 : 2], update[b / 2], x[0]);
      multiply(output[b == 0 ? 1 : 3], update[b / 2], x[1]);
    }
    const uint token = n * C + 2 * column;  // the lane's first
    DEVICE float* to = o + ((size_t(row) * tokens + token) * HEADS + head) * D + slice + line;
    UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint later = i / 8 * 16 + i / 4 % 2 * 2 + i % 2;
      if (token + later < tokens) to[later * (HEADS * D) + i % 4 / 2 * 8] = output[i / 4][i % 4];
    }
    UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      const float4 four = load4(decay + (chunk * D + 16 * m + 2 * column));
      const float factors[4] = {four.x, four.y, four.z, four.w};
      UNROLL
      for (int i = 0; i < 8; ++i) state[2 * m + i / 4][i % 4] *= factors[i / 4 * 2 + i % 2];
      UNROLL
      for (int b = 0; b < 2; ++b) {
        Right<W> x[2];
        load_rights(x, ends + (m * 2 + b) * 256, LANE);
        multiply(state[2 * m], update[b], x[0]);
        multiply(state[2 * m + 1], update[b], x[1]);
      }
    }
  }

  UNROLL
  for (int m = 0; m < BLOCKS; ++m) {
    UNROLL
    for (int r = 0; r < 2; ++r) {
      float x[4];
      UNROLL
      for (int e = 0; e < 4; ++e) x[e] = state[2 * m + e / 2][2 * r + e % 2];
      store<4>(state_out + (state_at + 8 * r * D + 16 * m), x);
    }
  }
}
