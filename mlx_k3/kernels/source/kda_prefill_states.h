// The pass over the chunks of a prefill: each chunk's outputs from the state at its start, and the
// state at its end. For a chunk, with S the state [K, V] (see kda_prefill_chunks.h for the rest):
//
//   u = w_v - w_k S,   o = q_start S + qk u,   S <- decay S + k_end u
//
// A group works for 32 values of one head and goes through all chunks. The state is in the lanes'
// registers and, once a chunk, in shared memory, where everyone multiplies with it; what the chunk
// brings is used once and comes from device memory straight to who multiplies with it.
//
// q_start, w_k, w_v [B, HEADS, N, 32, D], k_end [B, HEADS, N, D, 32], qk [B, HEADS, N, 32, 32],
// all but w_v in the order of mma_at; decay [B, HEADS, N, D]; state_in [B, HEADS, D, D], values by
// keys; place [2]: TOKENS and N; o [B, TOKENS, HEADS, D] and state_out as state_in, float32.
//
// D: 32, 64 or 128. HEADS. EXACT: products in float32's precision. Groups: D / 32, HEADS, B, of
// 128 threads, or 64 for D = 32.

// A lane's share of a [16, K], which lies in the order of mma_at.
template <int K, typename W>
INLINE void load_left(LOCAL float* x, CONST_DEVICE W* a, uint lane) {
  UNROLL
  for (int k = 0; k < K; k += 16) load<8>(x + k / 2, a + k * 16 + mma_own(lane));
}

// c [16, 32] += a [16, K] b [K, 32], a from load_left, b in rows that lie PITCH apart.
template <bool EXACT, int K, int PITCH>
INLINE void multiply_add(LOCAL float* c, const LOCAL float* x, const THREADGROUP float* b,
                         uint lane) {
  UNROLL
  for (int k = 0; k < K; k += 16) {
    UNROLL
    for (int s = 0; s < 4; s += 2) {
      const int at = k / 2 + s;
      const float own[4] = {x[at], x[at + 1], x[at + 4], x[at + 5]};
      UNROLL
      for (int j = 0; j < 4; ++j) {
        float y[2];
        shared_load_b(y, b + (k + s) * PITCH + 8 * j, PITCH, lane);
        mma<EXACT>(c + 4 * j, own, y);
      }
    }
  }
}

KERNEL {
  constexpr int C = 32, SLICE = 32, SIMDS = D == 32 ? 2 : 4;
  constexpr int BLOCKS = D / 16 / SIMDS;  // of 16 rows of the state, a simd group
  constexpr int PARTS = 4 / SIMDS;        // of w_k S and q_start S, 16 rows each, a simd group
  constexpr int PITCH = SLICE + 2;        // of a row in shared memory: four rows on, other banks
  const uint head = GROUP_Y, row = GROUP_Z;
  const uint tokens = place[0], chunks = place[1];
  const size_t of_head = size_t(row) * HEADS + head;
  // A lane's place in 16 x 8: two rows, and two columns from here on.
  const uint line = mma_row(LANE), column = mma_column(LANE), first = SLICE * GROUP_X + column;

  SHARED(float, S, D * PITCH);
  SHARED(float, u, C * PITCH);

  const uint block_row = BLOCKS * SIMD_GROUP;
  float state[BLOCKS][16];
  UNROLL
  for (int m = 0; m < BLOCKS; ++m) {
    UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint key = (block_row + m) * 16 + line + i / 2 % 2 * 8;
      const uint value = first + i / 4 * 8 + i % 2;
      state[m][i] = state_in[(of_head * D + value) * D + key];
    }
  }

  for (uint n = 0; n < chunks; ++n) {
    // What comes from device memory is asked for before each barrier, to arrive during it.
    const size_t chunk = of_head * chunks + n;
    float rows[PARTS][D / 2], sums[PARTS][16];
    UNROLL
    for (int p = 0; p < PARTS; ++p) {
      const uint part = SIMD_GROUP + p * SIMDS;
      CONST_DEVICE W* from = (part < 2 ? w_k : q_start) + chunk * (C * D) + part % 2 * (16 * D);
      load_left<D>(rows[p], from, LANE);
    }
    UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      UNROLL
      for (int i = 0; i < 16; i += 2) {
        const uint key = (block_row + m) * 16 + line + i / 2 % 2 * 8;
        shared_store2(S + key * PITCH + i / 4 * 8 + column, mma_ready<EXACT>(state[m][i]),
                      mma_ready<EXACT>(state[m][i + 1]));
      }
    }
    BARRIER();

    UNROLL
    for (int p = 0; p < PARTS; ++p) {
      UNROLL
      for (int i = 0; i < 16; ++i) sums[p][i] = 0.0f;
      multiply_add<EXACT, D, PITCH>(sums[p], rows[p], S, LANE);
    }
    float products[C / 2], keys[BLOCKS][C / 2], factors[BLOCKS][2];
    UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      load_left<C>(keys[m], k_end + chunk * (C * D) + (block_row + m) * (16 * C), LANE);
      const uint key = (block_row + m) * 16 + line;
      factors[m][0] = decay[chunk * D + key];
      factors[m][1] = decay[chunk * D + key + 8];
    }
    UNROLL
    for (int p = 0; p < PARTS; ++p) {
      const uint part = SIMD_GROUP + p * SIMDS;
      if (part >= 2) {
        load_left<C>(products, qk + chunk * (C * C) + part % 2 * (16 * C), LANE);
        continue;
      }
      UNROLL
      for (int i = 0; i < 16; i += 2) {
        const uint token = part * 16 + line + i / 2 % 2 * 8;
        const float2 w = load2(w_v + (chunk * C + token) * D + first + i / 4 * 8);
        shared_store2(u + token * PITCH + i / 4 * 8 + column, mma_ready<EXACT>(w.x - sums[p][i]),
                      mma_ready<EXACT>(w.y - sums[p][i + 1]));
      }
    }
    BARRIER();

    UNROLL
    for (int p = 0; p < PARTS; ++p) {
      const uint part = SIMD_GROUP + p * SIMDS;
      if (part < 2) continue;
      multiply_add<EXACT, C, PITCH>(sums[p], products, u, LANE);
      UNROLL
      for (int i = 0; i < 16; i += 2) {
        const uint token = n * C + part % 2 * 16 + line + i / 2 % 2 * 8;
        if (token >= tokens) continue;
        DEVICE float* to = o + ((size_t(row) * tokens + token) * HEADS + head) * D + first;
        store2(to + i / 4 * 8, sums[p][i], sums[p][i + 1]);
      }
    }
    UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      UNROLL
      for (int i = 0; i < 16; ++i) state[m][i] *= factors[m][i / 2 % 2];
      multiply_add<EXACT, C, PITCH>(state[m], keys[m], u, LANE);
    }
  }

  UNROLL
  for (int m = 0; m < BLOCKS; ++m) {
    UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint key = (block_row + m) * 16 + line + i / 2 % 2 * 8;
      const uint value = first + i / 4 * 8 + i % 2;
      state_out[(of_head * D + value) * D + key] = state[m][i];
    }
  }
}
