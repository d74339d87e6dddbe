// What NVIDIA's Hopper has beyond the dialect: products of 128 threads together whose factors lie in
// shared memory, and copies into it that nobody waits for.
//
// A tile is rows of 64 bfloat16 values, 128 bytes, of which 16-byte unit u of row r lies at place
// u ^ (r % 8); it begins at a multiple of 1024 bytes. Addresses are those of shared memory.

typedef unsigned long long ulonglong;

#define GROUPS gridDim.x
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

INLINE uint shared_address(const void* at) {
  return static_cast<uint>(__cvta_generic_to_shared(at));
}

// Where unit `unit` of row `row` of a tile lies.
INLINE uint tile_unit(uint tile, uint row, uint unit) {
  return tile + row * 128 + ((unit ^ (row % 8)) << 4);
}

// A tile as a factor, from this address on; the factor BYTES on is `+ BYTES / 16`. The lower half of
// the hardware's descriptor: the upper one, FACTOR_HIGH, says that the next eight rows are 1024 bytes
// on, and that units are exchanged as said above.
INLINE uint factor(uint address) { return address >> 4 | 1u << 16; }
#define FACTOR_HIGH "0x40000040"

#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_48                                            \
  NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"       \
           ", %32, %33, %34, %35, %36, %37, %38, %39"       \
           ", %40, %41, %42, %43, %44, %45, %46, %47"
#define VALUES_8(i)                                                                    \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]),           \
      "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define VALUES_16 VALUES_8(0), VALUES_8(8)
#define VALUES_24 VALUES_16, VALUES_8(16)
#define VALUES_48 VALUES_24, VALUES_8(24), VALUES_8(32), VALUES_8(40)
#define PRODUCT(columns, names, values, a_, b_, more_, across_)                           \
  asm volatile(                                                                           \
      "{\n.reg .pred more;\n.reg .b64 left, right;\nsetp.ne.b32 more, %" more_ ", 0;\n"     \
      "mov.b64 left, {%" a_ ", " FACTOR_HIGH "};\n"                                        \
      "mov.b64 right, {%" b_ ", " FACTOR_HIGH "};\n"                                       \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" names "}, "        \
      "left, right, more, 1, 1, %" across_ ", 0;\n}\n"                                     \
      : values                                                                            \
      : "r"(a), "r"(b), "r"(int(adds)), "n"(int(ACROSS)))

// c [64, N] (+)= a [64, 16] b [16, N]. b has a column in a tile's row. a has a row there, or, ACROSS,
// a column. Of c, a thread has rows 16 (thread / 32) + lane / 4 and 8 more, and of those columns
// 8 j + lane % 4 * 2 and the next: c[4 j], c[4 j + 1] of the upper row, c[4 j + 2], c[4 j + 3].
template <int N, bool ACROSS>
INLINE void product(float* c, uint a, uint b, bool adds) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 96, "no instruction for this width");
  if constexpr (N == 16) PRODUCT("16", NAMES_8, VALUES_8(0), "8", "9", "10", "11");
  if constexpr (N == 32) PRODUCT("32", NAMES_16, VALUES_16, "16", "17", "18", "19");
  if constexpr (N == 48) PRODUCT("48", NAMES_24, VALUES_24, "24", "25", "26", "27");
  if constexpr (N == 96) PRODUCT("96", NAMES_48, VALUES_48, "48", "49", "50", "51");
}

// Before products, after their sums were touched otherwise.
INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the latest PENDING commits are done.
template <int PENDING>
INLINE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The sums stay where they are until here.
template <int COUNT>
INLINE void hold(float* c) {
  UNROLL
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// 16 bytes of device memory, or zeros, on their way to shared memory.
INLINE void copy_unit(uint to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}
INLINE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until what this thread committed is there.
INLINE void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// A flag, 8 bytes of shared memory, is raised by COUNT arrivals, and again by as many more: whoever
// waits names the parity of the raising, 0 for the first. Products may read what was copied after
// that, or after a barrier that follows copies_wait; as in NVIDIA's own pipelines of such copies, no
// fence stands between, which would wait for all copies under way.
INLINE void flag_make(uint flag, uint count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(flag), "r"(count) : "memory");
}
// Arrives by itself once all copies are there that this thread asked for.
INLINE void flag_arrive_copied(uint flag) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(flag) : "memory");
}
INLINE void flag_wait(uint flag, uint parity) {
  asm volatile(
      "{\n.reg .pred raised;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 raised, [%0], %1;\n"
      "@!raised bra again;\n}\n" ::"r"(flag),
      "r"(parity)
      : "memory");
}

// What was written to shared memory before may be read by products after the next barrier.
INLINE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The 128 threads that make products together meet; `which` of those in the group.
INLINE void team_barrier(uint which) {
  asm volatile("bar.sync %0, 128;" ::"r"(which + 1) : "memory");
}

// The group meets: whether any of it says so.
INLINE bool any_of_group(bool says) { return __syncthreads_or(says); }

// THREAD, and what follows from it is worked out anew: no register holds it for long.
INLINE uint thread_anew() {
  uint thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Two values, the first in the lower half.
INLINE uint pair(float low, float high) {
  uint both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Four 8 x 8 matrices of 16 bits, of which a lane has row lane / 4, columns lane % 4 * 2 and the
// next, in x[0] to x[3]; lane 8 m + i says where row i of matrix m goes; ACROSS, where its column.
template <bool ACROSS>
INLINE void store_matrices(uint to, const uint* x) {
  if (ACROSS) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
}

INLINE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
