// A group of 256 threads as a Hopper GPU would run it, for the text of a CUDA kernel: what the
// prelude and hopper.cuda.h take from the hardware, after NVIDIA's PTX manual.
//
// Products and copies happen either when they are asked for or as late as they may: a kernel that
// waits for too little is wrong in one of the two.
#pragma once

#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <pthread.h>
#include <stdexcept>
#include <thread>
#include <vector>

typedef unsigned char uchar;
typedef unsigned int uint;
struct __nv_bfloat16 {
  uint16_t bits;
};
struct uint4 {
  uint x, y, z, w;
};

#define INLINE inline
#define UNROLL
#define THREAD machine::place.thread
#define LANE (machine::place.thread % 32)
#define SIMD_GROUP (machine::place.thread / 32)
#define GROUP_X machine::place.group
#define GROUPS machine::groups
#define DYNAMIC_SHARED(name) unsigned char* const name = machine::memory
#define INF INFINITY
#define BARRIER() machine::all.wait()
#define SIMD_BARRIER() machine::simds[SIMD_GROUP].wait()

using std::fma;
using std::max;
using std::min;

namespace machine {

constexpr int THREADS = 256, SHARED_BYTES = 232448;
constexpr uint BASE = 1024;  // address of the group's memory

struct Barrier {
  pthread_barrier_t barrier;
  explicit Barrier(int count = 32) { pthread_barrier_init(&barrier, nullptr, count); }
  void wait() { pthread_barrier_wait(&barrier); }
};

struct Place {
  uint thread, group;
};
inline thread_local Place place;
inline uint groups;

// What a thread asked for and what it has not waited for yet.
struct Queue {
  bool late = false;
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> commits;
  void add(std::function<void()> what) {
    if (late) {
      open.push_back(std::move(what));
    } else {
      what();
    }
  }
  void commit() {
    commits.push_back(std::move(open));
    open.clear();
  }
  void wait(size_t pending) {
    while (commits.size() > pending) {
      for (auto& what : commits.front()) what();
      commits.pop_front();
    }
  }
};
inline thread_local Queue products, copies;

// Raised by so many arrivals. Those of late copies are carried out by who waits for them.
struct Flag {
  uint count, arrived = 0, raised = 0;
  std::vector<std::function<void()>> late;
  void arrive() {
    if (++arrived == count) arrived = 0, ++raised;
  }
};
inline std::map<uint, Flag> flags;
inline std::mutex flags_mutex;
inline std::condition_variable flags_changed;

alignas(1024) inline unsigned char memory[SHARED_BYTES];
inline Barrier all(THREADS), teams[2] = {Barrier(128), Barrier(128)}, simds[8];
inline uint32_t exchanged[THREADS];
inline bool said[THREADS];

inline unsigned char* at(uint address) {
  if (address < BASE || address - BASE >= SHARED_BYTES) throw std::out_of_range("shared memory");
  return memory + (address - BASE);
}

inline float value(uint address) {
  uint16_t bits;
  std::memcpy(&bits, at(address), 2);
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Of a matrix descriptor: where element `along` of line `across` lies; lines are 128 bytes, eight of
// them SBO bytes from the next eight, and address bits 4 to 6 change with bits 7 to 9.
inline uint place_of(uint64_t descriptor, uint across, uint along) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) throw std::runtime_error("swizzle");
  const uint start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const uint line = start + across / 8 * stride + across % 8 * 128 + along * 2;
  return line ^ (line >> 7 & 7) << 4;
}

}  // namespace machine

INLINE float simd_shuffle_xor(float x, uint mask) {
  std::memcpy(&machine::exchanged[THREAD], &x, 4);
  SIMD_BARRIER();
  float y;
  std::memcpy(&y, &machine::exchanged[THREAD ^ mask], 4);
  SIMD_BARRIER();
  return y;
}

typedef unsigned long long ulonglong;

INLINE uint shared_address(const void* at) {
  return uint(static_cast<const unsigned char*>(at) - machine::memory) + machine::BASE;
}

// wgmma m64nNk16: "Register Fragments and Shared Memory Matrix Layouts" of the manual.
template <int N, bool ACROSS>
INLINE void product(float* c, uint lower_a, uint lower_b, bool adds) {
  const uint64_t high = std::strtoull(FACTOR_HIGH, nullptr, 16) << 32;
  const uint64_t a = high | lower_a, b = high | lower_b;
  const uint thread = THREAD % 128;
  machine::products.add([=] {
    for (int i = 0; i < N / 2; ++i) {
      const uint row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
      const uint column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = adds ? c[i] : 0.0f;
      for (uint k = 0; k < 16; ++k) {
        const uint left = ACROSS ? machine::place_of(a, k, row) : machine::place_of(a, row, k);
        sum += machine::value(left) * machine::value(machine::place_of(b, column, k));
      }
      c[i] = sum;
    }
  });
}
INLINE void products_begin() {}
INLINE void products_commit() { machine::products.commit(); }
template <int PENDING>
INLINE void products_wait() {
  machine::products.wait(PENDING);
}
template <int COUNT>
INLINE void hold(float*) {}

INLINE void copy_unit(uint to, const void* from, bool real) {
  if (to % 16 || uintptr_t(from) % 16) throw std::runtime_error("a misaligned copy");
  machine::copies.add([=] {
    if (real) {
      std::memcpy(machine::at(to), from, 16);
    } else {
      std::memset(machine::at(to), 0, 16);
    }
  });
}
INLINE void copies_commit() { machine::copies.commit(); }
INLINE void copies_wait() { machine::copies.wait(0); }

INLINE void flag_make(uint flag, uint count) {
  std::lock_guard<std::mutex> lock(machine::flags_mutex);
  machine::flags[flag] = machine::Flag{count};
}
INLINE void flag_arrive_copied(uint flag) {
  std::lock_guard<std::mutex> lock(machine::flags_mutex);
  machine::Flag& to = machine::flags.at(flag);
  if (machine::copies.late) {
    to.late.push_back([of = std::move(machine::copies.open)] {
      for (auto& what : of) what();
    });
    machine::copies.open.clear();
  } else {
    to.arrive();
  }
  machine::flags_changed.notify_all();
}
INLINE void flag_wait(uint flag, uint parity) {
  std::unique_lock<std::mutex> lock(machine::flags_mutex);
  machine::Flag& of = machine::flags.at(flag);
  machine::flags_changed.wait(lock, [&] {
    for (auto& what : of.late) what(), of.arrive();
    of.late.clear();
    return of.raised % 2 != parity;
  });
  machine::flags_changed.notify_all();
}
INLINE void show_to_products() {}
INLINE uint thread_anew() { return THREAD; }
INLINE void team_barrier(uint which) { machine::teams[which].wait(); }

INLINE bool any_of_group(bool says) {
  machine::said[THREAD] = says;
  BARRIER();
  bool any = false;
  for (bool one : machine::said) any = any || one;
  BARRIER();
  return any;
}

INLINE uint rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE uint pair(float low, float high) { return rounded(low) | rounded(high) << 16; }

// stmatrix m8n8.x4.
template <bool ACROSS>
INLINE void store_matrices(uint to, const uint* x) {
  if (to % 16) throw std::runtime_error("a misaligned row");
  machine::exchanged[THREAD] = to;
  SIMD_BARRIER();
  for (uint m = 0; m < 4; ++m) {
    for (uint e = 0; e < 2; ++e) {
      const uint row = LANE / 4, column = LANE % 4 * 2 + e;
      const uint lane = m * 8 + (ACROSS ? column : row);
      const uint16_t bits = x[m] >> 16 * e;
      const uint address = machine::exchanged[THREAD - LANE + lane] + (ACROSS ? row : column) * 2;
      std::memcpy(machine::at(address), &bits, 2);
    }
  }
  SIMD_BARRIER();
}

INLINE float exp2_(float x) { return std::exp2(x); }

namespace machine {

template <typename Kernel>
void run(uint count, bool late_products, bool late_copies, Kernel kernel) {
  groups = count;
  for (uint group = 0; group < groups; ++group) {
    flags.clear();
    std::memset(memory, 0xff, SHARED_BYTES);  // NaN, until something is written
    std::vector<std::thread> threads;
    for (uint thread = 0; thread < THREADS; ++thread) {
      threads.emplace_back([=] {
        place = {thread, group};
        products.late = late_products;
        copies.late = late_copies;
        kernel();
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace machine
