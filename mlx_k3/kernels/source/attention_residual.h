// Attention Residuals for one token: mix candidates by a softmax over scores,
//
//   score_m = v_m . weight / rms(v_m),   y = sum_m softmax(score)_m v_m.
//
// With STEP, the last candidate is what a sublayer gave added to the running sum, and the mix is
// normalised:  sum = last + update,  y / rms(y) * norm.
//
// blocks [..., M, D], last, update [..., D], weight, norm [D]; y, sum [..., D]. M at most 31, D at
// least 8. T: dtype of all but weight and norm. Without STEP last, update and norm are not read and
// sum has one element that means nothing. EPS: of both rms. A group takes a token.
//
// First each simd group reads a part of one candidate, for its score; then all threads read all
// candidates once more, which are in a cache by then, each thread a few columns.

// W elements of candidate m; M are blocks, the next one is the sum.
template <int W, typename T>
INLINE void candidate(LOCAL float* x, uint m, uint M, uint D, uint column, CONST_DEVICE T* blocks,
                      CONST_DEVICE T* last, CONST_DEVICE T* update) {
  if (m < M) {
    load<W>(x, blocks + m * D + column);
  } else {
    float add[W];
    load<W>(x, last + column);
    load<W>(add, update + column);
    UNROLL
    for (int i = 0; i < W; ++i) x[i] = to_float(from_float<T>(x[i] + add[i]));
  }
}

KERNEL {
  constexpr int W = D % 4 == 0 ? 4 : 1;
  constexpr uint VECTORS = D / W;
  constexpr int MINE = (VECTORS + GROUP_SIZE - 1) / GROUP_SIZE;
  constexpr uint SIMD_GROUPS = GROUP_SIZE / 32;
  SHARED(float, squares, 32);
  SHARED(float, products, 32);
  SHARED(float, outputs, 32);

  const uint M = blocks_shape[blocks_ndim - 2];
  const uint candidates = M + STEP;
  CONST_DEVICE T* my_blocks = blocks + GROUP_X * M * D;
  CONST_DEVICE T* my_last = last + GROUP_X * D * STEP;
  CONST_DEVICE T* my_update = update + GROUP_X * D * STEP;

  // Each candidate in `parts` parts, as far as there are simd groups.
  const uint parts = max(SIMD_GROUPS / candidates, 1u);
  for (uint p = SIMD_GROUP; p < candidates * parts; p += SIMD_GROUPS) {
    float square = 0.0f, product = 0.0f;
    for (uint v = p % parts * 32 + LANE; v < VECTORS; v += parts * 32) {
      float x[W], w[W];
      candidate<W>(x, p / parts, M, D, v * W, my_blocks, my_last, my_update);
      load<W>(w, weight + v * W);
      UNROLL
      for (int i = 0; i < W; ++i) {
        square += x[i] * x[i];
        product += x[i] * w[i];
      }
    }
    square = simd_sum(square);
    product = simd_sum(product);
    if (LANE == 0) {
      squares[p] = square;
      products[p] = product;
    }
  }
  BARRIER();

  // Every simd group for itself: lane m has the share of candidate m.
  float score = -INF;
  if (LANE < candidates) {
    float square = 0.0f, product = 0.0f;
    for (uint p = LANE * parts; p < (LANE + 1) * parts; ++p) {
      square += squares[p];
      product += products[p];
    }
    score = product * rsqrt_(square / D + EPS);
  }
  float share = exp_(score - simd_max(score));
  share /= simd_sum(share);

  float mixed[MINE * W];
  UNROLL
  for (int i = 0; i < MINE * W; ++i) mixed[i] = 0.0f;
  for (uint m = 0; m < candidates; ++m) {
    const float share_m = simd_shuffle(share, m);
    UNROLL
    for (int j = 0; j < MINE; ++j) {
      const uint v = j * GROUP_SIZE + THREAD;
      if (v < VECTORS) {
        float x[W];
        candidate<W>(x, m, M, D, v * W, my_blocks, my_last, my_update);
        UNROLL
        for (int i = 0; i < W; ++i) mixed[j * W + i] += share_m * x[i];
        if (STEP && m == M) store<W>(sum + GROUP_X * D + v * W, x);
      }
    }
  }
  if (!STEP && GROUP_X == 0 && THREAD == 0) sum[0] = from_float<T>(0.0f);

  float scale = 1.0f;
  if (STEP) {
    float square = 0.0f;
    UNROLL
    for (int i = 0; i < MINE * W; ++i) square += mixed[i] * mixed[i];
    square = simd_sum(square);
    if (LANE == 0) outputs[SIMD_GROUP] = square;
    BARRIER();
    square = simd_sum(LANE < SIMD_GROUPS ? outputs[LANE] : 0.0f);
    scale = rsqrt_(square / D + EPS);
  }
  UNROLL
  for (int j = 0; j < MINE; ++j) {
    const uint v = j * GROUP_SIZE + THREAD;
    if (v < VECTORS) {
      float x[W], n[W];
      if (STEP) load<W>(n, norm + v * W);
      UNROLL
      for (int i = 0; i < W; ++i) x[i] = mixed[j * W + i] * (STEP ? scale * n[i] : 1.0f);
      store<W>(y + GROUP_X * D + v * W, x);
    }
  }
}
