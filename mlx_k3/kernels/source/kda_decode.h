// Kimi Delta Attention for a few new tokens: convolution, SiLU, L2 norm, gate, delta rule and the
// gated norm of the output, in one launch. The state is read and written once.
//
// A group works for one head of one sequence. First its threads take queries, keys, values and
// gates, a channel each; what they find goes to shared memory. Then 8 lanes share a row of the
// state and keep it in registers over all tokens: a lane holds D / 8 channels of ROWS rows, and
// three shuffles end a product over the channels. The rows need not meet until the norm at the end,
// so that a group may go through them in several passes, which ask for the next pass' rows ahead.
//
// qkv [B, N, 3 HEADS D], conv_in [B, TAPS - 1, 3 HEADS D], conv_weight [3 HEADS D, TAPS],
// a [B, N, HEADS D], A_log [HEADS], dt_bias [HEADS D], b [B, N, HEADS], g [B, N, HEADS D],
// o_norm [D], state_in [B, HEADS, D, D], mask [B, N]; y [B, N, HEADS D], conv_out as conv_in and
// state_out as state_in.
//
// T: dtype of y and conv_out. D: 32, 64 or 128. N: tokens. BOUNDED: whether the gate has a
// LOWER_BOUND. MASKED: whether there is a mask. SCALE: of the queries. L2_EPS, NORM_EPS: of the two
// norms. Groups: HEADS, B; of D, 2 D or 4 D threads, ROWS 1 or 2.
//
// Bytes a head and sequence at D = 128: 131072 for the state and, in bfloat16 with a float32
// convolution, about 12000 for all else of one token. 96 heads: 13.7 MB, 3.2 us at the 4.3 TB/s of
// an H200. Operations: 7 D^2 a token, 11 MFLOP for 96 heads.

INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

// log(1 + e) for e from 0 to 1, right also where 1 + e is 1.
INLINE float log1p_(float e) {
  const float u = 1.0f + e;
  return u == 1.0f ? e : log_(u) * (e / (u - 1.0f));
}

INLINE float softplus_(float x) { return max(x, 0.0f) + log1p_(exp_(min(x, -x))); }

// The sum over the 8 lanes that share a row, in each of them.
INLINE float row_sum(float x) {
  x += simd_shuffle_xor(x, 4);
  x += simd_shuffle_xor(x, 2);
  return x + simd_shuffle_xor(x, 1);
}

INLINE float dot4(float4 x, const LOCAL float* y) {
  return x.x * y[0] + x.y * y[1] + x.z * y[2] + x.w * y[3];
}

// A lane's share of ROWS rows of the state, four rows apart.
template <int ROWS, int D>
INLINE void load_rows(LOCAL float* S, CONST_DEVICE float* from) {
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    UNROLL
    for (int p = 0; p < D / 32; ++p) load<4>(S + (r * D / 8 + 4 * p), from + (4 * r * D + 32 * p));
  }
}

KERNEL {
  constexpr int SIMDS = GROUP_SIZE / 32;
  constexpr int PARTS = D / 32;  // of D channels, 32 each
  constexpr int PASS = 4 * ROWS * SIMDS, PASSES = D / PASS;
  constexpr int WIDE = TAPS % 4 == 0 ? 4 : 1;
  const uint head = GROUP_X, row = GROUP_Y;

  // Asked for first: nothing else takes as long to arrive.
  const uint first_v = 4 * ROWS * SIMD_GROUP + LANE / 8, first_k = 4 * (LANE % 8);
  const uint state_at = ((row * HEADS + head) * D + first_v) * D + first_k;
  float S[ROWS][4 * PARTS];
  load_rows<ROWS, D>(S[0], state_in + state_at);

  SHARED(float, qkv_now, 3 * N * D);   // after the convolution and SiLU, not yet normalised
  SHARED(float, decays, N * D);
  SHARED(float, gates, N * D);         // the output's, times the norm's weight
  SHARED(float, strengths, N);         // beta
  SHARED(float, squares, 2 * N * PARTS);  // sums of squares of queries and keys, by simd group
  SHARED(float, outputs, N * D);

  UNROLL
  for (int turn = 0; turn < 4 * D; turn += GROUP_SIZE) {
    const uint part = (turn + THREAD) / D, c = THREAD % D;
    if (part < 3) {
      const uint channel = (part * HEADS + head) * D + c;
      float x[TAPS - 1 + N], taps[TAPS];
      UNROLL
      for (int t = 0; t < TAPS - 1; ++t) {
        x[t] = to_float(conv_in[(row * (TAPS - 1) + t) * (3 * HEADS * D) + channel]);
      }
      UNROLL
      for (int t = 0; t < N; ++t) {
        const bool real = !MASKED || mask[row * N + t];
        x[TAPS - 1 + t] = real ? to_float(qkv[(row * N + t) * (3 * HEADS * D) + channel]) : 0.0f;
      }
      UNROLL
      for (int w = 0; w < TAPS; w += WIDE) load<WIDE>(taps + w, conv_weight + channel * TAPS + w);
      UNROLL
      for (int t = 0; t < N; ++t) {
        float z = 0.0f;
        UNROLL
        for (int w = 0; w < TAPS; ++w) z += x[t + w] * taps[w];
        z *= sigmoid_(z);
        qkv_now[(part * N + t) * D + c] = z;
        if (part < 2) {
          const float square = simd_sum(z * z);
          if (LANE == 0) squares[(part * N + t) * PARTS + SIMD_GROUP % PARTS] = square;
        }
      }
      UNROLL
      for (int t = 0; t < TAPS - 1; ++t) {
        conv_out[(row * (TAPS - 1) + t) * (3 * HEADS * D) + channel] = from_float<T>(x[N + t]);
      }
    } else {
      const uint channel = head * D + c;
      const float rate = exp_(to_float(A_log[head]));
      const float bias = to_float(dt_bias[channel]), weight = to_float(o_norm[c]);
      UNROLL
      for (int t = 0; t < N; ++t) {
        const uint at = row * N + t;
        const bool real = !MASKED || mask[at];
        const float z = to_float(a[at * (HEADS * D) + channel]) + bias;
        const float log_decay = BOUNDED ? LOWER_BOUND * sigmoid_(rate * z) : -rate * softplus_(z);
        const float gate = to_float(g[at * (HEADS * D) + channel]);
        decays[t * D + c] = real ? exp_(log_decay) : 1.0f;
        gates[t * D + c] = real ? weight * sigmoid_(gate) : 0.0f;
        if (c == 0) strengths[t] = real ? sigmoid_(to_float(b[at * HEADS + head])) : 0.0f;
      }
    }
  }
  BARRIER();

  UNROLL
  for (int pass = 0; pass < PASSES; ++pass) {
    const uint first = first_v + pass * PASS, at = state_at + pass * (PASS * D);
    float next[ROWS][4 * PARTS];
    if (pass + 1 < PASSES) load_rows<ROWS, D>(next[0], state_in + at + PASS * D);
    for (int t = 0; t < N; ++t) {
      const THREADGROUP float* q = qkv_now + t * D;
      const THREADGROUP float* k = q + N * D;
      const THREADGROUP float* v = k + N * D;
      float q_square = L2_EPS, k_square = L2_EPS;
      UNROLL
      for (int p = 0; p < PARTS; ++p) {
        q_square += squares[t * PARTS + p];
        k_square += squares[(N + t) * PARTS + p];
      }
      const float k_scale = rsqrt_(k_square);

      float seen[ROWS], output[ROWS];
      UNROLL
      for (int r = 0; r < ROWS; ++r) seen[r] = output[r] = 0.0f;
      UNROLL
      for (int p = 0; p < PARTS; ++p) {
        const float4 decay = shared_load4(decays + t * D + 32 * p + first_k);
        const float4 key = shared_load4(k + 32 * p + first_k);
        UNROLL
        for (int r = 0; r < ROWS; ++r) {
          S[r][4 * p] *= decay.x;
          S[r][4 * p + 1] *= decay.y;
          S[r][4 * p + 2] *= decay.z;
          S[r][4 * p + 3] *= decay.w;
          seen[r] += dot4(key, &S[r][4 * p]);
        }
      }
      float update[ROWS];
      UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const float error = v[first + 4 * r] - k_scale * row_sum(seen[r]);
        update[r] = strengths[t] * error * k_scale;
      }
      UNROLL
      for (int p = 0; p < PARTS; ++p) {
        const float4 key = shared_load4(k + 32 * p + first_k);
        const float4 query = shared_load4(q + 32 * p + first_k);
        UNROLL
        for (int r = 0; r < ROWS; ++r) {
          S[r][4 * p] += update[r] * key.x;
          S[r][4 * p + 1] += update[r] * key.y;
          S[r][4 * p + 2] += update[r] * key.z;
          S[r][4 * p + 3] += update[r] * key.w;
          output[r] += dot4(query, &S[r][4 * p]);
        }
      }
      UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const float sum = row_sum(output[r]);
        if (LANE % 8 == 0) outputs[t * D + first + 4 * r] = sum * SCALE * rsqrt_(q_square);
      }
    }
    UNROLL
    for (int r = 0; r < ROWS; ++r) {
      UNROLL
      for (int p = 0; p < PARTS; ++p) {
        store<4>(state_out + at + 4 * r * D + 32 * p, &S[r][4 * p]);
      }
    }
    if (pass + 1 == PASSES) break;
    UNROLL
    for (int i = 0; i < ROWS * 4 * PARTS; ++i) {
      S[i / (4 * PARTS)][i % (4 * PARTS)] = next[i / (4 * PARTS)][i % (4 * PARTS)];
    }
  }
  BARRIER();

  for (int t = SIMD_GROUP; t < N; t += SIMDS) {
    float values[PARTS], square = 0.0f;
    UNROLL
    for (int p = 0; p < PARTS; ++p) {
      values[p] = outputs[t * D + 32 * p + LANE];
      square += values[p] * values[p];
    }
    const float scale = rsqrt_(simd_sum(square) / D + NORM_EPS);
    UNROLL
    for (int p = 0; p < PARTS; ++p) {
      const uint at = t * D + 32 * p + LANE;
      y[(row * N + t) * (HEADS * D) + head * D + 32 * p + LANE] =
          from_float<T>(values[p] * scale * gates[at]);
    }
  }
}
