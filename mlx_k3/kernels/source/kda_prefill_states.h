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
  constexpr int C = 32, BLOCKS = D / 32;
  const uint head = GROUP_Y, row = GROUP_Z;
  const uint tokens = beta_shape[1], chunks = (tokens + C - 1) / C;
  const size_t of_head = size_t(row) * HEADS + head;
  const uint slice = (GROUP_X * (GROUP_SIZE / 32) + SIMD_GROUP) * 16;  // the first value
  const uint line = mma_row(LANE), column = mma_column(LANE);

  // Of 32 keys of a value, a lane has eight neighbours, in four sums.
  const size_t state_at = (of_head * D + slice + line) * D + 4 * column;
  float state[4 * BLOCKS][4];
  UNROLL
  for (int m = 0; m < BLOCKS; ++m) {
    UNROLL
    for (int r = 0; r < 2; ++r) {
      float x[8];
      load<8>(x, state_in + (state_at + 8 * r * D + 32 * m));
      UNROLL
      for (int i = 0; i < 8; ++i) state[4 * m + i / 2][2 * r + i % 2] = x[i];
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
      Left<W> own[2];
      left_of(own[0], state[4 * m], state[4 * m + 1]);
      left_of(own[1], state[4 * m + 2], state[4 * m + 3]);
      UNROLL
      for (int j = 0; j < 4; ++j) {
        Right<W> x[2];
        load_rights(x, keys + (j * BLOCKS + m) * 256, LANE);
        multiply(seen[j], own[0], x[0]);
        multiply(seen[j], own[1], x[1]);
        load_rights(x, queries + (j * BLOCKS + m) * 256, LANE);
        multiply(output[j], own[0], x[0]);
        multiply(output[j], own[1], x[1]);
      }
    }
    load<16>(values, w_v + (chunk * (C * D) + slice * C + 16 * LANE));
    UNROLL
    for (int i = 0; i < 16; ++i) seen[i / 4][i % 4] = values[i] - seen[i / 4][i % 4];
    Left<W> update[2];
    left_of(update[0], seen[0], seen[1]);
    left_of(update[1], seen[2], seen[3]);

    UNROLL
    for (int j = 0; j < 4; ++j) {
      Right<W> x[2];
      load_rights(x, pairs + j * 256, LANE);
      multiply(output[j], update[0], x[0]);
      multiply(output[j], update[1], x[1]);
    }
    const uint token = n * C + 4 * column;  // the lane's first
    DEVICE float* to = o + ((size_t(row) * tokens + token) * HEADS + head) * D + slice + line;
    UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint later = i / 4 * 2 + i % 2;
      if (token + later < tokens) to[later * (HEADS * D) + i % 4 / 2 * 8] = output[i / 4][i % 4];
    }
    UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      float factors[8];
      load<8>(factors, decay + (chunk * D + 32 * m + 4 * column));
      UNROLL
      for (int j = 0; j < 4; ++j) {
        Right<W> x[2];
        load_rights(x, ends + (m * 4 + j) * 256, LANE);
        UNROLL
        for (int e = 0; e < 4; ++e) state[4 * m + j][e] *= factors[2 * j + e % 2];
        multiply(state[4 * m + j], update[0], x[0]);
        multiply(state[4 * m + j], update[1], x[1]);
      }
    }
  }

  UNROLL
  for (int m = 0; m < BLOCKS; ++m) {
    UNROLL
    for (int r = 0; r < 2; ++r) {
      float x[8];
      UNROLL
      for (int i = 0; i < 8; ++i) x[i] = state[4 * m + i / 2][2 * r + i % 2];
      store<8>(state_out + (state_at + 8 * r * D + 32 * m), x);
    }
  }
}
