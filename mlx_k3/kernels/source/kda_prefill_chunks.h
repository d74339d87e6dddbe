// The part of a prefill in which no chunk of 32 tokens needs another: what its tokens are to each
// other, and its updates as far as they can be known before the state is.
//
// A group works for one chunk of one head, a thread for one channel; the thread holds its channel
// of all 32 queries, keys and decays. With a_ij the decay from token j to token i of a channel,
//
//   qk_ij = sum_c q_ic k_jc a_ijc  for j <= i,   A_ij = beta_i sum_c k_ic k_jc a_ijc  for j < i,
//
// come from matrix products, five times: a pair of tokens decays from the left one until a seam
// between them and from the seam to the right one, and the seams of blocks of 16, 8, 4, 2 and 1
// tokens meet each pair once. So decays are only ever multiplied: nothing can overflow, and
// nothing cancels, however strong the gate. Then a forward substitution gives
//
//   w_v = (I + A)^-1 beta v,   w_k = (I + A)^-1 beta k (decay since the chunk's start).
//
// q, k, v, log_decay [B, TOKENS, HEADS, D], beta [B, TOKENS, HEADS], mask [B, TOKENS];
// place [3]: TOKENS, the first one of this part of the sequence, and N, its chunks.
// q_start (queries, times the decay since the chunk's start), w_k and w_v [B, HEADS, N, 32, D],
// k_end (keys, times the decay until the chunk's end) [B, HEADS, N, D, 32], qk
// [B, HEADS, N, 32, 32], decay [B, HEADS, N, D], over the chunk; q_start, w_k, k_end and qk in the
// order of mma_at. Tokens from TOKENS on, or masked, change nothing.
//
// W: dtype of the outputs but decay. D: 32, 64 or 128. HEADS. MASKED: whether there is a mask.
// EXACT: products in float32's precision. Groups: N, HEADS, B; D threads.
//
// With kda_prefill_states.h, a token and head at D = 128 and W = bfloat16: 4000 bytes, of them 1280
// in, 512 out and 1104 both written and read between the two kernels; 135 kFLOP, 28 here and 107
// there. 4096 tokens of 96 heads: 1.57 GB, 0.37 ms at an H200's 4.3 TB/s, and 53 GFLOP, 0.2 ms at
// what its tensor cores do in TF32 by this instruction. With the shared memory's own time on top,
// 0.5 to 0.8 ms are to be expected. W = float32: 6900 bytes, 0.64 ms, and thrice the products.

// Of the lanes that differ in bit HALF only, each keeps half of the HALF * 2 sums.
template <int HALF>
INLINE void halve(LOCAL float* x, uint lane) {
  const bool upper = (lane & HALF) != 0;
  UNROLL
  for (int i = 0; i < HALF; ++i) {
    const float keep = upper ? x[i + HALF] : x[i], give = upper ? x[i] : x[i + HALF];
    x[i] = keep + simd_shuffle_xor(give, HALF);
  }
}

// The sum of x[i] over the lanes, in lane i.
INLINE float lane_sums(LOCAL float* x, uint lane) {
  halve<16>(x, lane);
  halve<8>(x, lane);
  halve<4>(x, lane);
  halve<2>(x, lane);
  halve<1>(x, lane);
  return x[0];
}

KERNEL {
  constexpr int C = 32, SIMDS = D / 32;
  constexpr int PITCH = D + 8;  // of a row in shared memory: neighbours lie in other banks
  const uint n = GROUP_X, head = GROUP_Y, row = GROUP_Z, c = THREAD;
  const uint tokens = place[0], first = place[1] + C * n, chunks = place[2];

  SHARED(float, left, C / 2 * PITCH);
  SHARED(float, right, 2 * C / 2 * PITCH);  // queries, then keys
  SHARED(float, A, C * C);                  // [j, i]
  SHARED(float, diagonal, SIMDS * C);
  SHARED(float, strengths, C);

  float q_[C], k_[C], a_[C];
  const size_t start = ((size_t(row) * tokens + first) * HEADS + head) * D + c;
  UNROLL
  for (int i = 0; i < C; ++i) {
    const bool real = first + i < tokens && (!MASKED || mask[row * tokens + first + i]);
    const size_t at = start + size_t(i) * (HEADS * D);
    q_[i] = real ? to_float(q[at]) : 0.0f;
    k_[i] = real ? to_float(k[at]) : 0.0f;
    a_[i] = real ? exp_(to_float(log_decay[at])) : 1.0f;
  }
  if (c < C) {
    const uint at = row * tokens + first + c;
    const bool real = first + c < tokens && (!MASKED || mask[at]);
    strengths[c] = real ? to_float(beta[size_t(at) * HEADS + head]) : 0.0f;
  }
  {
    float own[C];
    UNROLL
    for (int i = 0; i < C; ++i) own[i] = q_[i] * k_[i];
    diagonal[SIMD_GROUP * C + LANE] = lane_sums(own, LANE);
  }

  const size_t block = (size_t(row) * HEADS + head) * chunks + n;
  DEVICE W* products = qk + block * (C * C);
  for (uint i = c; i < C * C; i += D) {
    A[i] = 0.0f;
    if (i % C > i / C) products[mma_at(i / C, i % C, C)] = from_float<W>(0.0f);
  }
  const uint line = mma_row(LANE), column = mma_column(LANE);
  UNROLL
  for (int size = C / 2; size > 0; size /= 2) {
    BARRIER();
    float since = 1.0f, until = 1.0f;
    UNROLL
    for (int i = 0; i < C; ++i) {
      if (i / size % 2 == 0) continue;
      since = i % size == 0 ? a_[i] : since * a_[i];
      const int at = (i / (2 * size) * size + i % size) * PITCH;
      right[at + c] = mma_ready<EXACT>(q_[i] * since);
      right[at + C / 2 * PITCH + c] = mma_ready<EXACT>(k_[i] * since);
    }
    UNROLL
    for (int i = C - 1; i >= 0; --i) {
      if (i / size % 2 == 1) continue;
      until = i % size == size - 1 ? 1.0f : until * a_[i + 1];
      left[(i / (2 * size) * size + i % size) * PITCH + c] = mma_ready<EXACT>(k_[i] * until);
    }
    BARRIER();
    // Four parts of the work: queries or keys to the right, and half of the keys to the left.
    for (uint part = SIMD_GROUP; part < 4; part += SIMDS) {
      const uint to_left = 8 * (part % 2);
      const THREADGROUP float* rights = right + part / 2 * (C / 2) * PITCH;
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      UNROLL
      for (int d = 0; d < D; d += 8) {
        float x[4], y[2];
        shared_load_a(x, rights + d, PITCH, LANE);
        shared_load_b_transposed(y, left + to_left * PITCH + d, PITCH, LANE);
        mma<EXACT>(sums, x, y);
      }
      UNROLL
      for (int e = 0; e < 4; ++e) {
        const uint r = line + e / 2 * 8, l = to_left + column + e % 2;
        if (r / size != l / size) continue;  // of different blocks
        const uint i = r / size * (2 * size) + size + r % size;
        const uint j = l / size * (2 * size) + l % size;
        if (part < 2) {
          products[mma_at(i, j, C)] = from_float<W>(sums[e]);
        } else {
          A[j * C + i] = strengths[i] * sums[e];
        }
      }
    }
  }
  BARRIER();

  if (c < C) {
    float sum = 0.0f;
    for (int s = 0; s < SIMDS; ++s) sum += diagonal[s * C + c];
    products[mma_at(c, c, C)] = from_float<W>(sum);
  }
  float w_k_[C], w_v_[C], since = 1.0f, until = 1.0f;
  const size_t to = block * (C * D);
  UNROLL
  for (int i = 0; i < C; ++i) {
    const bool real = first + i < tokens && (!MASKED || mask[row * tokens + first + i]);
    since *= a_[i];
    q_start[to + mma_at(i, c, D)] = from_float<W>(q_[i] * since);
    w_k_[i] = strengths[i] * k_[i] * since;
    w_v_[i] = real ? strengths[i] * to_float(v[start + size_t(i) * (HEADS * D)]) : 0.0f;
  }
  decay[block * D + c] = since;
  UNROLL
  for (int i = C - 4; i >= 0; i -= 4) {
    float four[4];
    UNROLL
    for (int e = 3; e >= 0; --e) {
      four[e] = k_[i + e] * until;
      until *= a_[i + e];
    }
    store<4>(k_end + to + mma_at(c, i, C), four);
  }
  UNROLL
  for (int j = 0; j < C; ++j) {
    UNROLL
    for (int i = (j + 1) / 4 * 4; i < C; i += 4) {
      const float4 x = shared_load4(A + j * C + i);
      const float factors[4] = {x.x, x.y, x.z, x.w};
      UNROLL
      for (int e = 0; e < 4; ++e) {
        if (i + e <= j) continue;
        w_k_[i + e] -= factors[e] * w_k_[j];
        w_v_[i + e] -= factors[e] * w_v_[j];
      }
    }
    w_k[to + mma_at(j, c, D)] = from_float<W>(w_k_[j]);
    w_v[to + j * D + c] = from_float<W>(w_v_[j]);
  }
}
