// One token's attention to latents, all heads at once: what a group's share of the keys gives. For
// CUDA and Hopper alone: what it needs beyond the dialect stands in hopper.cuda.h.
//
// q_latent [HEADS, 512], q [HEADS, Q_WIDTH] of which the last 64 columns meet the shared keys;
// blocks of latents [rows, 512] and shared keys [rows, 64], all but the last of BLOCK_ROWS rows;
// place [2]: TOKENS, in all blocks, and GROUPS. All bfloat16. Group g of GROUPS takes its share of the tiles of
// 64 keys, and gives y [GROUPS, 512, HEADS], sums of weights times latents, and about
// [GROUPS, 2, HEADS]: the exponent of 2 the weights are relative to, and their sum, in float32.
//
// HEADS: 96 or 32. 256 threads, a team of 128 for half of the work each; shared memory for the
// queries, for RING parts of tiles (a part is 64 keys' 64 columns), and for a tile's weights.
//
// A tile goes through two products. Scores [64 keys, HEADS] = tile x queries: a team takes half of
// the heads. Sums [512, HEADS] += latents^T x weights: a team takes every other part, 192 of its
// registers a thread at 96 heads. Both read the same parts, in the order they came. A part of the
// tile that comes RING parts later goes where one was read last, so copies are always under way:
// parts 0 to 4 of the next tile have been asked for a whole tile before, the last ones 1 us.
// Weights are relative to a maximum that is raised only when a score exceeds it by 2^8.
//
// At 128k tokens and 96 heads: 151 MB, 35 us at an H200's 4.3 TB/s; 27.4 GFLOP, 34 us at 800
// TFLOP/s. A tile's products take 3300 cycles, 3600 as the first one waits for shared memory (3.5 KB
// for 24 cycles' work), its 6144 exponentials 384, barriers some 200: 2.4 to 2.8 us for each of the
// 16 tiles of a group, 45 us in all, with the start and the end of it some 50.

#define PARTS 9
#define RING 13
#define PART_BYTES 8192
#define TILE_KEYS 64
#define RAISE 8.0f
#define LOG2_E 1.4426950408889634f

// What copies need to know.
struct Source {
  const __nv_bfloat16* const* latents;
  const __nv_bfloat16* const* keys;
  uint tokens, first_tile, tiles, ring;
};

// Ask for part `n` of the group's tiles, counted from its first: so many threads share it.
template <int BLOCK_ROWS, int THREADS>
INLINE void ask(const Source& source, uint n, uint thread) {
  const uint tile = n / PARTS, part = n % PARTS;
  if (tile >= source.tiles) return;
  const uint first = (source.first_tile + tile) * TILE_KEYS, block = first / BLOCK_ROWS;
  const uint pitch = part == 0 ? 64 : 512;
  const __nv_bfloat16* from =
      part == 0 ? source.keys[block] : source.latents[block] + (part - 1) * 64;
  from += size_t(first % BLOCK_ROWS) * pitch;
  const uint to = source.ring + n % RING * PART_BYTES;
  UNROLL
  for (int i = 0; i < TILE_KEYS * 8; i += THREADS) {
    const uint row = (i + thread) / 8, unit = thread % 8;
    copy_unit(tile_unit(to, row, unit), from + row * pitch + unit * 8,
              first + row < source.tokens);
  }
}

// Over the 8 lanes that have the same columns.
template <typename Join>
INLINE float over_rows(float x, Join join) {
  UNROLL
  for (uint mask = 4; mask < 32; mask *= 2) x = join(x, simd_shuffle_xor(x, mask));
  return x;
}

struct Larger {
  INLINE float operator()(float x, float y) const { return max(x, y); }
};
struct Plus {
  INLINE float operator()(float x, float y) const { return x + y; }
};

KERNEL {
  constexpr int HALF = HEADS / 2;      // whose scores a team computes
  constexpr int QUERY_BYTES = HEADS * 128;  // of a part of the queries
  const __nv_bfloat16* const latent_blocks[] = {LATENT_BLOCKS};
  const __nv_bfloat16* const key_blocks[] = {KEY_BLOCKS};
  DYNAMIC_SHARED(memory);
  const uint queries = shared_address(memory), ring = queries + PARTS * QUERY_BYTES;
  const uint weights = ring + RING * PART_BYTES;
  float* const by_simd = reinterpret_cast<float*>(memory + (weights - queries) + QUERY_BYTES);
  float* const tops = by_simd + 4 * HEADS;
  float* const factors = tops + HEADS;

  const uint team = THREAD / 128, simd = SIMD_GROUP % 4;  // of its team
  const uint own_queries = factor(queries + team * HALF * 128);
  const uint line = LANE / 4, column = LANE % 4 * 2;
  const uint tokens = place[0], groups = place[1], all_tiles = (tokens + TILE_KEYS - 1) / TILE_KEYS;
  const uint first_tile = uint(ulonglong(all_tiles) * GROUP_X / groups);
  const uint tiles = uint(ulonglong(all_tiles) * (GROUP_X + 1) / groups) - first_tile;
  const Source source = {latent_blocks, key_blocks, tokens, first_tile, tiles, ring};

  for (uint i = THREAD; i < HEADS * PARTS * 8; i += GROUP_SIZE) {
    const uint head = i / (PARTS * 8), part = i / 8 % PARTS, unit = i % 8;
    const __nv_bfloat16* from = part == 0 ? q + (head + 1) * Q_WIDTH - 64
                                          : q_latent + head * 512 + (part - 1) * 64;
    copy_unit(tile_unit(queries + part * QUERY_BYTES, head, unit), from + unit * 8, true);
  }
  for (uint n = 0; n < 5; ++n) ask<BLOCK_ROWS, GROUP_SIZE>(source, n, THREAD);
  copies_commit();
  for (uint n = 5; n < RING; n += 2) {
    ask<BLOCK_ROWS, GROUP_SIZE>(source, n, THREAD);
    ask<BLOCK_ROWS, GROUP_SIZE>(source, n + 1, THREAD);
    copies_commit();
  }
  if (THREAD < HEADS) tops[THREAD] = -INF;

  float y_[4][HEADS / 2], sums[HALF / 4];
  UNROLL
  for (int i = 0; i < HEADS / 2; ++i) {
    UNROLL
    for (int m = 0; m < 4; ++m) y_[m][i] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < HALF / 4; ++i) sums[i] = 0.0f;

  for (uint tile = 0; tile < tiles; ++tile) {
    const uint n = tile * PARTS, slot = n % RING;
    float s[HALF / 2];
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
      if (part == 0) copies_wait<4>();
      if (part == 5) copies_wait<3>();
      if (part == 7) copies_wait<2>();
      if (part == 0 || part == 5 || part == 7) BARRIER();
      if (part == 0) products_begin();
      const uint at = slot + part < RING ? slot + part : slot + part - RING;
      UNROLL
      for (int k = 0; k < 4; ++k) {
        product<HALF, false>(s, factor(ring + at * PART_BYTES) + k * 2,
                             own_queries + (part * QUERY_BYTES + k * 32) / 16, part > 0 || k > 0);
      }
    }
    products_commit();
    products_wait<0>();
    hold<HALF / 2>(s);

    const uint first = (first_tile + tile) * TILE_KEYS + simd * 16 + line;
    bool exceeds = false;
    UNROLL
    for (int i = 0; i < HALF / 2; ++i) {
      const uint head = team * HALF + i / 4 * 8 + column + i % 2;
      s[i] = first + i % 4 / 2 * 8 < tokens ? s[i] * LOG2_E : -INF;
      exceeds = exceeds || s[i] - tops[head] > RAISE;
    }
    if (any_of_group(exceeds)) {
      UNROLL
      for (int i = 0; i < HALF / 4; ++i) {
        const uint head = team * HALF + i / 2 * 8 + column + i % 2;
        const int at = i / 2 * 4 + i % 2;
        const float most = over_rows(max(s[at], s[at + 2]), Larger());
        if (line == 0) by_simd[simd * HEADS + head] = most;
      }
      BARRIER();
      if (THREAD < HEADS) {
        const float before = tops[THREAD];
        float top = before;
        for (int i = 0; i < 4; ++i) top = max(top, by_simd[i * HEADS + THREAD]);
        factors[THREAD] = exp2_(before - top);
        tops[THREAD] = top;
      }
      BARRIER();
      UNROLL
      for (int m = 0; m < 4; ++m) hold<HEADS / 2>(y_[m]);
      UNROLL
      for (int i = 0; i < HEADS / 2; ++i) {
        const float by = factors[i / 4 * 8 + column + i % 2];
        UNROLL
        for (int m = 0; m < 4; ++m) y_[m][i] *= by;
      }
      UNROLL
      for (int i = 0; i < HALF / 4; ++i) {
        sums[i] *= factors[team * HALF + i / 2 * 8 + column + i % 2];
      }
    }
    UNROLL
    for (int j = 0; j < HALF / 8; j += 2) {
      uint x[4];
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = j * 4 + i * 2, head = team * HALF + at / 4 * 8 + column;
        const float low = exp2_(s[at] - tops[head]), high = exp2_(s[at + 1] - tops[head + 1]);
        sums[at / 4 * 2] += low;
        sums[at / 4 * 2 + 1] += high;
        x[i] = pair(low, high);
      }
      const uint head = team * HALF + (j + LANE / 16) * 8 + LANE % 8;
      store_matrices<true>(tile_unit(weights, head, simd * 2 + LANE / 8 % 2), x);
    }
    show_to_products();
    BARRIER();
    ask<BLOCK_ROWS, GROUP_SIZE>(source, n + RING, THREAD);
    copies_commit();

    UNROLL
    for (int m = 0; m < 4; ++m) hold<HEADS / 2>(y_[m]);
    products_begin();
    UNROLL
    for (int m = 0; m < 4; ++m) {
      const uint part = slot + 1 + 2 * m + team, at = part < RING ? part : part - RING;
      UNROLL
      for (int k = 0; k < 4; ++k) {
        product<HEADS, true>(y_[m], factor(ring + at * PART_BYTES) + k * 128,
                             factor(weights) + k * 2, true);
      }
      products_commit();
    }
    UNROLL
    for (int m = 0; m < 4; ++m) {
      if (m == 0) products_wait<3>();
      if (m == 1) products_wait<2>();
      if (m == 2) products_wait<1>();
      if (m == 3) products_wait<0>();
      team_barrier(team);
      ask<BLOCK_ROWS, 128>(source, n + RING + 1 + 2 * m + team, THREAD % 128);
      copies_commit();
    }
    UNROLL
    for (int m = 0; m < 4; ++m) hold<HEADS / 2>(y_[m]);
  }

  UNROLL
  for (int i = 0; i < HALF / 4; ++i) {
    const float sum = over_rows(sums[i], Plus());
    const uint head = team * HALF + i / 2 * 8 + column + i % 2;
    if (line == 0) by_simd[simd * HEADS + head] = sum;
  }
  BARRIER();  // and no product reads the ring any more
  if (THREAD < HEADS) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += by_simd[i * HEADS + THREAD];
    about[(GROUP_X * 2) * HEADS + THREAD] = tops[THREAD];
    about[(GROUP_X * 2 + 1) * HEADS + THREAD] = sum;
  }
  const uint own = (ring - queries) + SIMD_GROUP * 16 * HEADS * 2;  // 16 rows of the sums
  UNROLL
  for (int m = 0; m < 4; ++m) {
    UNROLL
    for (int j = 0; j < HEADS / 8; j += 2) {
      const uint x[4] = {pair(y_[m][j * 4], y_[m][j * 4 + 1]),
                         pair(y_[m][j * 4 + 2], y_[m][j * 4 + 3]),
                         pair(y_[m][j * 4 + 4], y_[m][j * 4 + 5]),
                         pair(y_[m][j * 4 + 6], y_[m][j * 4 + 7])};
      const uint row = LANE % 8 + LANE / 8 % 2 * 8;
      store_matrices<false>(queries + own + row * HEADS * 2 + (j + LANE / 16) * 16, x);
    }
    SIMD_BARRIER();
    const uint row = (2 * m + team) * 64 + simd * 16;
    uint4* to = reinterpret_cast<uint4*>(y + (size_t(GROUP_X) * 512 + row) * HEADS);
    const uint4* from = reinterpret_cast<const uint4*>(memory + own);
    UNROLL
    for (int i = 0; i < HEADS / 16; ++i) to[i * 32 + LANE] = from[i * 32 + LANE];
    SIMD_BARRIER();
  }
}
