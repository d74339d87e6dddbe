// The part of a prefill in which no chunk of 32 tokens needs another: what its tokens are to each
// other, and its updates as far as they can be known before the state is.
//
// A group works for one chunk of one head, a thread for two channels of half of its tokens, whose
// queries, keys and decays it holds. With a_ij the decay from token j to token i of a channel,
//
//   qk_ij = sum_c q_ic k_jc a_ijc  for j <= i,   A_ij = beta_i sum_c k_ic k_jc a_ijc  for j < i,
//
// come from matrix products, five times: a pair of tokens decays from the left one until a seam
// between them and from the seam to the right one, and the seams of blocks of 16, 8, 4, 2 and 1
// tokens meet each pair once. So decays are only ever multiplied: nothing can overflow, and
// nothing cancels, however strong the gate. Then a simd group inverts I + A by a forward
// substitution, a column a lane, and with that
//
//   w_v = (I + A)^-1 beta v,   w_k = (I + A)^-1 beta k (decay since the chunk's start).
//
// q, k, v, log_decay [B, T, HEADS, D], beta [B, T, HEADS], mask [B, T]; N is the number of chunks.
// q_start (queries, times the decay since the chunk's start) and w_k [B, HEADS, N, 32, D], k_end
// (keys, times the decay until the chunk's end) [B, HEADS, N, D, 32] and qk [B, HEADS, N, 32, 32]
// in the order of mma_at, their rows in that of mma_swap; w_v [B, HEADS, N, D, 32] as the lanes
// have it that computed it, 16 channels after 16; decay [B, HEADS, N, D], over the chunk. Tokens
// from T on, or masked, change nothing.
//
// W: dtype of the outputs but decay, and of what is multiplied: float, then as precise as that, or
// bfloat16. D: 32, 64 or 128. HEADS. MASKED: whether there is a mask. Groups: N, HEADS, B; D
// threads.
//
// With kda_prefill_states.h, a token and head at D = 128 and W = bfloat16: 4000 bytes, of them 1280
// in, 512 out and 1104 both written and read between the two kernels; 135 kFLOP, 28 here and 107
// there. 4096 tokens of 96 heads: 1.57 GB, 0.37 ms at an H200's 4.3 TB/s; the products are a tenth
// of that. W = float32: 6900 bytes, 0.64 ms, and six times the products.

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

// The sum of x[i] over 16 lanes, in lane i of them.
INLINE float lane_sums(LOCAL float* x, uint lane) {
  halve<8>(x, lane);
  halve<4>(x, lane);
  halve<2>(x, lane);
  halve<1>(x, lane);
  return x[0];
}

// Column `lane` of (I + A)^-1, from A [j, i]; its rows in the order of mma_swap.
template <typename W>
INLINE void invert(THREADGROUP W* inverse, uint pitch, const THREADGROUP float* A, uint lane) {
  float x[32];
  UNROLL
  for (int i = 0; i < 32; ++i) x[i] = i == int(lane) ? 1.0f : 0.0f;
  UNROLL
  for (int j = 0; j < 32; ++j) {
    UNROLL
    for (int i = (j + 1) / 4 * 4; i < 32; i += 4) {
      const float4 four = shared_load4(A + j * 32 + i);
      const float factors[4] = {four.x, four.y, four.z, four.w};
      UNROLL
      for (int e = 0; e < 4; ++e) {
        if (i + e > j) x[i + e] -= factors[e] * x[j];
      }
    }
  }
  UNROLL
  for (int i = 0; i < 32; ++i) inverse[mma_swap(i) * pitch + lane] = from_float<W>(x[i]);
}

KERNEL {
  constexpr int C = 32, HALF = 16, SIMDS = D / 32;
  // Of rows in shared memory, by channels and by tokens: neighbours lie in other banks.
  constexpr int PITCH = D + 8, TALL = C + 8;
  constexpr int SEAMS = 3 * HALF * PITCH, SIDES = (D + C) * TALL;
  const uint n = GROUP_X, head = GROUP_Y, row = GROUP_Z;
  const uint tokens = q_shape[1], chunks = (tokens + C - 1) / C;
  const uint h = THREAD / (D / 2), c = THREAD % (D / 2) * 2;
  const uint first = C * n + HALF * h;

  SHARED(W, area, SEAMS > SIDES ? SEAMS : SIDES);
  SHARED(float, A, C * C);       // [j, i]
  SHARED(float, totals, 2 * D);  // the decay over each half
  SHARED(float, diagonal, C * SIMDS);
  SHARED(float, strengths, C);

  float2 q_[HALF], k_[HALF], a_[HALF], total = {1.0f, 1.0f};
  const size_t start = ((size_t(row) * tokens + first) * HEADS + head) * D + c;
  UNROLL
  for (int i = 0; i < HALF; ++i) {
    const bool real = first + i < tokens && (!MASKED || mask[row * tokens + first + i]);
    const size_t at = start + size_t(i) * (HEADS * D);
    const float2 zero = {0.0f, 0.0f};
    q_[i] = real ? load2(q + at) : zero;
    k_[i] = real ? load2(k + at) : zero;
    a_[i] = real ? load2(log_decay + at) : zero;
  }
  for (uint i = THREAD; i < C * C; i += D) A[i] = 0.0f;
  if (THREAD < C) {
    const uint token = C * n + THREAD, at = row * tokens + token;
    const bool real = token < tokens && (!MASKED || mask[at]);
    strengths[THREAD] = real ? to_float(beta[size_t(at) * HEADS + head]) : 0.0f;
  }
  UNROLL
  for (int i = 0; i < HALF; ++i) {
    a_[i].x = fast_exp_(a_[i].x);
    a_[i].y = fast_exp_(a_[i].y);
    total.x *= a_[i].x;
    total.y *= a_[i].y;
  }
  shared_store2(totals + h * D + c, total.x, total.y);
  const size_t block = (size_t(row) * HEADS + head) * chunks + n;
  DEVICE W* products = qk + block * (C * C);
  for (uint i = THREAD; i < C * C; i += D) {
    if (i % C > i / C) products[mma_at(mma_swap(i / C), i % C, C)] = from_float<W>(0.0f);
  }
  const uint line = mma_row(LANE), column = mma_column(LANE);
  THREADGROUP W* right = area;  // queries, then keys
  THREADGROUP W* left = area + 2 * HALF * PITCH;
  UNROLL
  for (int size = HALF; size > 0; size /= 2) {
    BARRIER();
    const uint rows = size == HALF ? 0 : HALF / 2 * h;  // of the half's tokens on either side
    if (size < HALF || h == 1) {
      float2 since = {1.0f, 1.0f};
      UNROLL
      for (int i = 0; i < HALF; ++i) {
        if (size < HALF && i / size % 2 == 0) continue;
        if (i % size == 0) {
          since = a_[i];
        } else {
          since.x *= a_[i].x;
          since.y *= a_[i].y;
        }
        const uint at = (rows + i / (2 * size) * size + i % size) * PITCH + c;
        shared_store2(right + at, q_[i].x * since.x, q_[i].y * since.y);
        shared_store2(right + HALF * PITCH + at, k_[i].x * since.x, k_[i].y * since.y);
      }
    }
    if (size < HALF || h == 0) {
      float2 until = {1.0f, 1.0f};
      UNROLL
      for (int i = HALF - 1; i >= 0; --i) {
        if (size < HALF && i / size % 2 == 1) continue;
        if (i % size == size - 1) {
          until.x = 1.0f;
          until.y = 1.0f;
        } else {
          until.x *= a_[i + 1].x;
          until.y *= a_[i + 1].y;
        }
        const uint at = (rows + i / (2 * size) * size + i % size) * PITCH + c;
        shared_store2(left + at, k_[i].x * until.x, k_[i].y * until.y);
      }
    }
    BARRIER();
    // Four parts of the work: queries or keys to the right, and half of the keys to the left.
    for (uint part = SIMD_GROUP; part < 4; part += SIMDS) {
      const uint to_left = 8 * (part % 2);
      const THREADGROUP W* rights = right + part / 2 * HALF * PITCH;
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      UNROLL
      for (int d = 0; d < D; d += 16) {
        Left<W> x;
        Right<W> y;
        shared_load_left(x, rights + d, PITCH, LANE);
        shared_load_right(y, left + to_left * PITCH + d, PITCH, LANE);
        multiply(sums, x, y);
      }
      UNROLL
      for (int e = 0; e < 4; ++e) {
        const uint r = line + e / 2 * 8, l = to_left + column + e % 2;
        if (r / size != l / size) continue;  // of different blocks
        const uint i = r / size * (2 * size) + size + r % size;
        const uint j = l / size * (2 * size) + l % size;
        if (part < 2) {
          products[mma_at(mma_swap(i), j, C)] = from_float<W>(sums[e]);
        } else {
          A[j * C + i] = strengths[i] * sums[e];
        }
      }
    }
  }
  BARRIER();

  {
    float own[HALF];
    UNROLL
    for (int i = 0; i < HALF; ++i) own[i] = q_[i].x * k_[i].x + q_[i].y * k_[i].y;
    diagonal[THREAD] = lane_sums(own, LANE);  // by half, then by 16 lanes
  }

  // By channels and tokens now: beta k, decayed since the start; after it the inverse.
  THREADGROUP W* sides = area;
  THREADGROUP W* inverse = area + D * TALL;
  // Where a thread's first token is; the others' places are as far from there as in the first half.
  const size_t to = block * (C * D);
  DEVICE W* queries = q_start + to + mma_at(mma_swap(HALF * h), c, D);
  DEVICE W* ends = k_end + to + mma_at(mma_swap(c), HALF * h, C);
  float2 since = {1.0f, 1.0f}, until = {1.0f, 1.0f};
  if (h == 1) {
    since.x = totals[c];
    since.y = totals[c + 1];
  } else {
    until.x = totals[D + c];
    until.y = totals[D + c + 1];
  }
  UNROLL
  for (int i = 0; i < HALF; i += 4) {
    float x[4], y[4];
    UNROLL
    for (int e = 0; e < 4; ++e) {
      const uint token = HALF * h + i + e;
      since.x *= a_[i + e].x;
      since.y *= a_[i + e].y;
      store2(queries + mma_at(mma_swap(i + e), 0, D), q_[i + e].x * since.x,
             q_[i + e].y * since.y);
      x[e] = strengths[token] * k_[i + e].x * since.x;
      y[e] = strengths[token] * k_[i + e].y * since.y;
    }
    shared_store4(sides + c * TALL + HALF * h + i, make4(x[0], x[1], x[2], x[3]));
    shared_store4(sides + (c + 1) * TALL + HALF * h + i, make4(y[0], y[1], y[2], y[3]));
  }
  if (h == 1) store2(decay + block * D + c, since.x, since.y);
  UNROLL
  for (int i = HALF - 8; i >= 0; i -= 8) {
    float x[8], y[8];
    UNROLL
    for (int e = 7; e >= 0; --e) {
      x[e] = k_[i + e].x * until.x;
      y[e] = k_[i + e].y * until.y;
      until.x *= a_[i + e].x;
      until.y *= a_[i + e].y;
    }
    store<8>(ends + i, x);
    store<8>(ends + mma_at(mma_swap(1), i, C), y);
  }
  if (SIMD_GROUP == n % SIMDS) invert(inverse, TALL, A, LANE);
  BARRIER();

  if (THREAD < C) {
    float sum = 0.0f;
    const uint own = THREAD / HALF * (D / 2) + THREAD % HALF;
    for (uint s = 0; s < D / 32; ++s) sum += diagonal[own + s * HALF];
    products[mma_at(mma_swap(THREAD), THREAD, C)] = from_float<W>(sum);
  }
  float2 v_[HALF];
  UNROLL
  for (int i = 0; i < HALF; ++i) {
    const bool real = first + i < tokens && (!MASKED || mask[row * tokens + first + i]);
    const float2 zero = {0.0f, 0.0f};
    v_[i] = real ? load2(v + (start + size_t(i) * (HEADS * D))) : zero;
  }
  {
    DEVICE W* keys = w_k + to + mma_at(line, 32 * SIMD_GROUP + column, D);
    Left<W> x[4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      shared_load_left(x[i], inverse + (i / 2 * TALL + i % 2) * HALF, TALL, LANE);
    }
    UNROLL
    for (int t = 0; t < 4; ++t) {
      const uint channel = 32 * SIMD_GROUP + 8 * t;
      Right<W> y[2];
      shared_load_right(y[0], sides + channel * TALL, TALL, LANE);
      shared_load_right(y[1], sides + channel * TALL + HALF, TALL, LANE);
      float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
      UNROLL
      for (int i = 0; i < 4; ++i) multiply(sums[i / 2], x[i], y[i % 2]);
      UNROLL
      for (int e = 0; e < 4; ++e) {
        DEVICE W* there = keys + mma_at(8 * e, 8 * t, D);
        store2(there, sums[e / 2][e % 2 * 2], sums[e / 2][e % 2 * 2 + 1]);
      }
    }
  }
  BARRIER();
  UNROLL
  for (int i = 0; i < HALF; i += 4) {
    float x[4], y[4];
    UNROLL
    for (int e = 0; e < 4; ++e) {
      const float strength = strengths[HALF * h + i + e];
      x[e] = strength * v_[i + e].x;
      y[e] = strength * v_[i + e].y;
    }
    shared_store4(sides + c * TALL + HALF * h + i, make4(x[0], x[1], x[2], x[3]));
    shared_store4(sides + (c + 1) * TALL + HALF * h + i, make4(y[0], y[1], y[2], y[3]));
  }
  BARRIER();
  {
    Right<W> y[8];
    UNROLL
    for (int i = 0; i < 8; ++i) {
      shared_load_right(y[i], inverse + (i / 2 * 8 * TALL + i % 2 * HALF), TALL, LANE);
    }
    UNROLL
    for (int m = 0; m < 2; ++m) {
      const uint channel = 32 * SIMD_GROUP + 16 * m;
      Left<W> x[2];
      shared_load_left(x[0], sides + channel * TALL, TALL, LANE);
      shared_load_left(x[1], sides + channel * TALL + HALF, TALL, LANE);
      float sums[16];
      UNROLL
      for (int i = 0; i < 16; ++i) sums[i] = 0.0f;
      UNROLL
      for (int i = 0; i < 8; ++i) multiply(sums + i / 2 * 4, x[i % 2], y[i]);
      store<16>(w_v + to + channel * C + 16 * LANE, sums);
    }
  }
}
