// What a kernel's code sees of the machine that the tests run it on.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace host {

struct Place {  // of a thread; the first three as Metal has them, x first
  unsigned grid[3], group[3], groups[3];
  unsigned index, lane, simd, threads;
};

enum Fence { NO_MEMORY = 0, DEVICE_MEMORY = 1, THREADGROUP_MEMORY = 2 };

// The group, or the simd group, waits here for all its threads.
void barrier(int fence, int line);
void simd_barrier(int fence, int line);

// Gives `mine` to the lanes of the simd group; returns all 32 values, SLOT bytes apart.
constexpr size_t SLOT = 32;
const char* exchange(const void* mine, size_t bytes, const char* name, int line);

unsigned lane();
void fail_at(int line, const char* what);

// The group's array `id`, the same for all its threads.
void* shared(int id, size_t bytes, size_t item_bytes, const char* name);

}  // namespace host
