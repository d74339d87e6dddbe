// What the parts of the machine know of each other.
#pragma once

#include "runtime.h"

namespace host {

constexpr int SIMD = 32;
constexpr int MOST_THREADS = 1024;

enum Memory { DEVICE = 0, THREADGROUP = 1 };

// Counts what orders memory accesses: phases of the group at barriers, of a simd group at its own.
struct Clock {
  uint32_t group_began;  // the phase in which the present group began, in both memories
  uint32_t phase[2];
  uint32_t simd_phase[MOST_THREADS / SIMD][2];
};

extern Clock clock;
extern int current;        // the running thread's number in its group, or -1
extern char message[1024];  // what went wrong, or empty

// Records what went wrong, once. In a thread it does not come back.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

enum Kind { INPUT, OUTPUT, SHARED };

void place_region(int number, const char* name, Kind kind, size_t bytes, size_t item_bytes);
void* region_base(int number);
void forget_regions();
void poison_shared();
void check_written();
void touch(const void* address, size_t bytes, bool write);

}  // namespace host
