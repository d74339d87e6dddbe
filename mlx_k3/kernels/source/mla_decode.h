// One token's attention to latents, all heads at once: what a group's share of the keys gives. For
// CUDA and Hopper alone: what it needs beyond the dialect stands in hopper.cuda.h.
//
// q_latent [HEADS, 512], q [HEADS, Q_WIDTH] of which the last 64 columns meet the shared keys;
// blocks of latents [rows, 512] and shared keys [rows, 64], all but the last of BLOCK_ROWS rows;
// place [TOKENS], which tells how many there are and is not read. All bfloat16. Group g of GROUPS
// takes its share of the tiles of 64 keys, and gives y [GROUPS, 512, HEADS], sums of weights times
// latents, and about [GROUPS, 2, HEADS]: the exponent of 2 the weights are relative to, and their
// sum, in float32.
//
// HEADS: 96 or 32. 256 threads, a team of 128 for half of the work each; shared memory for the
// queries, for RING parts of tiles (a part is 64 keys' 64 columns), and for a tile's weights.
//
// A tile goes through two products. Scores [64 keys, HEADS] = tile x queries: a team takes half of
// the heads. Sums [512, HEADS] += latents^T x weights: a team takes every other part, 192 of its
// registers a thread at 96 heads. Both read the same parts, in the order they came. The next tile's
// scores are asked for before the sums are done, so products stand still during the softmax alone.
// Weights are relative to a maximum that is raised only when a score exceeds it by 2^8.
//
// A part of the tile that comes RING parts later goes where one was read last. Its flag is raised
// by the copies themselves, so they are always under way: from 1.2 us, for parts 5 to 8, to a whole
// tile before their products.
//
// At 128k tokens and 96 heads: 151 MB, 35 us at an H200's 4.3 TB/s; 27.4 GFLOP, 34 us at 800
// TFLOP/s. A tile's products take 3300 cycles, 3600 as the first one waits for shared memory (3.5
// KB for 24 cycles' work), its softmax some 700, waits 200: 2.5 us for each of the 16 tiles of a
// group, 40 us in all, with the start and the end of it some 48.

#define PARTS 9
#define RING 13
#define PART_BYTES 8192
#define TILE_KEYS 64
#define RAISE 8.0f
#define LOG2_E 1.4426950408889634f

// Over the 8 lanes that have the same columns.
INLINE float most_of_rows(float x) {
  UNROLL
  for (uint mask = 4; mask < 32; mask *= 2) x = max(x, simd_shuffle_xor(x, mask));
  return x;
}

// The group's tiles, its ring, and a flag for each place there.
struct Tiles {
  const __nv_bfloat16* const* latents;
  const __nv_bfloat16* const* keys;
  uint tokens, first, count, ring, flags;
  INLINE uint place(uint n) const { return ring + n % RING * PART_BYTES; }
  INLINE uint flag(uint n) const { return flags + n % RING * 8; }
};

// Ask for part `n` of the group's tiles, counted from its first: a team does.
template <int BLOCK_ROWS>
INLINE void ask(const Tiles& tiles, uint n) {
  const uint tile = n / PARTS, part = n % PARTS;
  if (tile >= tiles.count) return;
  const uint thread = thread_anew() % 128, row = thread / 8, unit = thread % 8;
  const uint first = (tiles.first + tile) * TILE_KEYS, block = first / BLOCK_ROWS;
  const uint pitch = part == 0 ? 64 : 512;
  const __nv_bfloat16* from =
      part == 0 ? tiles.keys[block] : tiles.latents[block] + (part - 1) * 64;
  from += size_t(first % BLOCK_ROWS + row) * pitch + unit * 8;
  const uint to = tile_unit(tiles.place(n), row, unit);
  UNROLL
  for (int i = 0; i < 4; ++i) {
    copy_unit(to + i * 2048, from + i * 16 * pitch, first + row + i * 16 < tiles.tokens);
  }
  flag_arrive_copied(tiles.flag(n));
}

// A thread's place among those that make products.
struct Worker {
  uint team, simd, lane, line, column;
  INLINE Worker() {
    const uint thread = thread_anew();
    team = thread / 128, simd = thread / 32 % 4, lane = thread % 32;
    line = lane / 4, column = lane % 4 * 2;
  }
};

// Ask for a tile's scores, as its parts come. AFTER_SUMS: those of the tile before were asked for,
// and as they are done, copies are to where they read.
template <int HEADS, int BLOCK_ROWS, bool AFTER_SUMS>
INLINE void score(float* s, const Tiles& tiles, uint tile, uint queries) {
  const uint team = thread_anew() / 128, own = factor(queries + team * (HEADS / 2) * 128);
  UNROLL
  for (int part = 0; part < PARTS; ++part) {
    const uint n = tile * PARTS + part;
    flag_wait(tiles.flag(n), n / RING % 2);
    products_begin();
    UNROLL
    for (int k = 0; k < 4; ++k) {
      product<HEADS / 2, false>(s, factor(tiles.place(n)) + k * 2,
                                own + (part * HEADS * 128 + k * 32) / 16, part > 0 || k > 0);
    }
    products_commit();
    if (AFTER_SUMS && part < 4) {
      products_wait<4>();
      team_barrier(team);
      ask<BLOCK_ROWS>(tiles, n - PARTS + 1 + part + team + RING);
    }
  }
}

KERNEL {
  constexpr int HALF = HEADS / 2;           // whose scores a team computes
  constexpr int QUERY_BYTES = HEADS * 128;  // of a part of the queries
  const __nv_bfloat16* const latent_blocks[] = {LATENT_BLOCKS};
  const __nv_bfloat16* const key_blocks[] = {KEY_BLOCKS};
  DYNAMIC_SHARED(memory);
  const uint queries = shared_address(memory), ring = queries + PARTS * QUERY_BYTES;
  const uint weights = ring + RING * PART_BYTES;
  float* const by_simd = reinterpret_cast<float*>(memory + (weights - queries) + QUERY_BYTES);
  float* const tops = by_simd + 4 * HEADS;
  float* const factors = tops + HEADS;

  const uint tokens = place_shape[0], all_tiles = (tokens + TILE_KEYS - 1) / TILE_KEYS;
  const uint first_tile = uint(ulonglong(all_tiles) * GROUP_X / GROUPS);
  const uint count = uint(ulonglong(all_tiles) * (GROUP_X + 1) / GROUPS) - first_tile;
  const Tiles tiles = {latent_blocks, key_blocks, tokens, first_tile, count, ring,
                       shared_address(factors + HEADS)};
  if (THREAD < RING) flag_make(tiles.flag(THREAD), 128);
  if (THREAD < HEADS) tops[THREAD] = -INF;
  BARRIER();  // the flags are made
  // First some of what comes from far, then the queries, which all groups read.
  for (uint n = THREAD / 128; n < 4; n += 2) ask<BLOCK_ROWS>(tiles, n);
  for (uint i = THREAD; i < HEADS * PARTS * 8; i += GROUP_SIZE) {
    const uint head = i / (PARTS * 8), part = i / 8 % PARTS, unit = i % 8;
    const __nv_bfloat16* from = part == 0 ? q + (head + 1) * Q_WIDTH - 64
                                          : q_latent + head * 512 + (part - 1) * 64;
    copy_unit(tile_unit(queries + part * QUERY_BYTES, head, unit), from + unit * 8, true);
  }
  copies_commit();
  for (uint n = 4 + THREAD / 128; n < RING; n += 2) ask<BLOCK_ROWS>(tiles, n);
  copies_wait();
  BARRIER();

  float y_[4][HEADS / 2], sums[HALF / 4];
  UNROLL
  for (int i = 0; i < HEADS / 2; ++i) {
    UNROLL
    for (int m = 0; m < 4; ++m) y_[m][i] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < HALF / 4; ++i) sums[i] = 0.0f;

  float s[HALF / 2];
  score<HEADS, BLOCK_ROWS, false>(s, tiles, 0, queries);
  products_wait<0>();
  for (uint tile = 0; tile < count; ++tile) {
    hold<HALF / 2>(s);
    const Worker worker;
    const uint team = worker.team, simd = worker.simd, lane = worker.lane;
    const uint line = worker.line, column = worker.column;
    const uint first = (first_tile + tile) * TILE_KEYS;
    if (first + TILE_KEYS > tokens) {
      UNROLL
      for (int i = 0; i < HALF / 2; ++i) {
        if (first + simd * 16 + line + i % 4 / 2 * 8 >= tokens) s[i] = -INF;
      }
    }
    float over[4] = {-INF, -INF, -INF, -INF};  // several, so that few wait for one another
    UNROLL
    for (int i = 0; i < HALF / 2; ++i) {
      const uint head = team * HALF + i / 4 * 8 + column + i % 2;
      over[i % 4] = max(over[i % 4], fma(s[i], LOG2_E, -tops[head]));
    }
    if (any_of_group(max(max(over[0], over[1]), max(over[2], over[3])) > RAISE)) {
      UNROLL
      for (int i = 0; i < HALF / 4; ++i) {
        const uint head = team * HALF + i / 2 * 8 + column + i % 2;
        const int at = i / 2 * 4 + i % 2;
        const float most = most_of_rows(max(s[at], s[at + 2])) * LOG2_E;
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
        const float low = exp2_(fma(s[at], LOG2_E, -tops[head]));
        const float high = exp2_(fma(s[at + 1], LOG2_E, -tops[head + 1]));
        sums[at / 4 * 2] += low;
        sums[at / 4 * 2 + 1] += high;
        x[i] = pair(low, high);
      }
      const uint head = team * HALF + (j + lane / 16) * 8 + lane % 8;
      store_matrices<true>(tile_unit(weights, head, simd * 2 + lane / 8 % 2), x);
    }
    show_to_products();
    BARRIER();

    UNROLL
    for (int m = 0; m < 4; ++m) hold<HEADS / 2>(y_[m]);
    products_begin();
    UNROLL
    for (int m = 0; m < 4; ++m) {
      const uint at = (tile * PARTS + 1 + 2 * m + team) % RING;
      UNROLL
      for (int k = 0; k < 4; ++k) {
        product<HEADS, true>(y_[m], factor(ring + at * PART_BYTES) + k * 128,
                             factor(weights) + k * 2, true);
      }
      products_commit();
    }
    if (team == 0) ask<BLOCK_ROWS>(tiles, tile * PARTS + RING);  // where the shared keys were
    if (tile + 1 < count) score<HEADS, BLOCK_ROWS, true>(s, tiles, tile + 1, queries);
    products_wait<0>();
    UNROLL
    for (int m = 0; m < 4; ++m) hold<HEADS / 2>(y_[m]);
  }

  const Worker worker;
  const uint team = worker.team, simd = worker.simd, lane = worker.lane;
  UNROLL
  for (int i = 0; i < HALF / 4; ++i) {
    float sum = sums[i];
    UNROLL
    for (uint mask = 4; mask < 32; mask *= 2) sum += simd_shuffle_xor(sum, mask);
    const uint head = team * HALF + i / 2 * 8 + worker.column + i % 2;
    if (worker.line == 0) by_simd[simd * HEADS + head] = sum;
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
      const uint row = lane % 8 + lane / 8 % 2 * 8;
      store_matrices<false>(queries + own + row * HEADS * 2 + (j + lane / 16) * 16, x);
    }
    SIMD_BARRIER();
    const uint row = (2 * m + team) * 64 + simd * 16;
    uint4* to = reinterpret_cast<uint4*>(y + (size_t(GROUP_X) * 512 + row) * HEADS);
    const uint4* from = reinterpret_cast<const uint4*>(memory + own);
    UNROLL
    for (int i = 0; i < HEADS / 16; ++i) to[i * 32 + lane] = from[i * 32 + lane];
    SIMD_BARRIER();
  }
}
