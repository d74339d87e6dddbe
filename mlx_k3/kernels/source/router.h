// The router's choice for one token: the TOP_K of E experts whose sigmoid score plus bias is
// highest, of equal ones those with the lower number, best first; and the scores' shares.
//
// logits [N, E], bias [E]; indices, weights [N, TOP_K]. TOP_K at most 32. NORMALISE: whether the
// weights are divided by their sum (plus 1e-20). SCALE: factor on them.
// A simd group takes a token, a lane every 32nd expert; groups take GROUP_SIZE / 32 tokens.

// Whole numbers in the order of the floats; all but a negative NaN's are greater than 0.
INLINE uint in_order(float x) {
  const uint bits = float_to_bits(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

KERNEL {
  constexpr int MINE = (E + 31) / 32;
  const uint token = GROUP_X * (GROUP_SIZE / 32) + SIMD_GROUP;
  uint tokens = 1;
  for (int i = 0; i + 1 < logits_ndim; ++i) tokens *= logits_shape[i];
  if (token < tokens) {
    uint choice[MINE];  // 0: taken, or beyond the experts
    UNROLL
    for (int j = 0; j < MINE; ++j) {
      const uint expert = j * 32 + LANE;
      choice[j] = 0;
      if (expert < E) {
        const float score = sigmoid_(to_float(logits[token * E + expert]));
        choice[j] = in_order(score + to_float(bias[expert]));
      }
    }
    uint mine = 0;  // lane j keeps the j-th choice
    for (uint k = 0; k < TOP_K; ++k) {
      uint best = 0, at = 0;
      UNROLL
      for (int j = 0; j < MINE; ++j) {
        if (choice[j] > best) {
          best = choice[j];
          at = j * 32 + LANE;
        }
      }
      const uint best_of_all = simd_max(best);
      const uint expert = simd_min(best == best_of_all ? at : 0xffffffffu);
      UNROLL
      for (int j = 0; j < MINE; ++j) {
        if (j * 32 + LANE == expert) choice[j] = 0;
      }
      if (LANE == k) mine = expert;
    }
    const bool chooses = LANE < TOP_K;
    const float score = chooses ? sigmoid_(to_float(logits[token * E + mine])) : 0.0f;
    const float sum = NORMALISE ? simd_sum(score) + 1e-20f : 1.0f;
    if (chooses) {
      indices[token * TOP_K + LANE] = mine;
      weights[token * TOP_K + LANE] = score / sum * SCALE;
    }
  }
}
