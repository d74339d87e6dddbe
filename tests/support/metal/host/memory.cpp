// The kernel's memory: every access is checked for bounds, for order and for being written before.
//
// Regions lie far apart in one reservation, so that an address tells its region, and a wrong index
// lands beside the region it was meant for.

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <vector>

#include "machine.h"

namespace host {
namespace {

constexpr int POISON = 0xCD;
constexpr int MOST_REGIONS = 64;
constexpr int FIRST_SHARED = 32;
constexpr uintptr_t STRIDE = uintptr_t(1) << 32;
constexpr size_t ALIGNMENT = 16;  // of a region: no more than this can be relied on
constexpr size_t MOST_SHARED_BYTES = 32 << 10;  // what Apple's GPUs have

constexpr char WROTE[] = "wrote with no barrier between";
constexpr char READ[] = "read with no barrier between";

constexpr uint16_t NOBODY = 0xFFFF, SEVERAL = 0xFFFE;

struct Item {  // who touched it last, and in which phases
  uint32_t write_phase = 0, write_simd_phase = 0, read_phase = 0, read_simd_phase = 0;
  uint16_t writer = NOBODY, reader = NOBODY, reader_simd = NOBODY;
};

struct Region {
  const char* name = nullptr;
  Kind kind = INPUT;
  char* base = nullptr;
  size_t bytes = 0, mapped_bytes = 0, item_bytes = 1;
  std::vector<Item> items;
};

Region regions[MOST_REGIONS];
char* reservation = nullptr;

struct Cell {  // an item's name for people
  char text[96];
  Cell(const Region& region, intptr_t offset) {
    const intptr_t item = region.item_bytes;
    const intptr_t index = offset >= 0 ? offset / item : -((-offset + item - 1) / item);
    snprintf(text, sizeof text, "%s[%ld]", region.name, long(index));
  }
};

void race(const Region& region, size_t offset, const char* does, const char* did, uint16_t other) {
  char whom[32] = "several threads";
  if (other < SEVERAL) snprintf(whom, sizeof whom, "thread %u", other);
  fail("%s %s, which %s %s", does, Cell(region, offset).text, whom, did);
}

struct Now {
  uint16_t thread, simd;
  uint32_t phase, simd_phase;
  explicit Now(Kind kind) {
    const Memory memory = kind == SHARED ? THREADGROUP : DEVICE;
    thread = current;
    simd = current / SIMD;
    phase = clock.phase[memory];
    simd_phase = clock.simd_phase[simd][memory];
  }
  bool after_write(const Item& item) const {
    return item.writer == NOBODY || item.writer == thread || item.write_phase < phase ||
           (item.writer / SIMD == simd && item.write_simd_phase < simd_phase);
  }
  bool after_reads(const Item& item) const {
    return item.reader == NOBODY || item.reader == thread || item.read_phase < phase ||
           (item.reader_simd == simd && item.read_simd_phase < simd_phase);
  }
};

void read_item(Region& region, Item& item, size_t offset) {
  const Now now(region.kind);
  const bool of_other_group = item.write_phase < clock.group_began;
  if (item.writer == NOBODY || (region.kind == SHARED && of_other_group)) {
    fail("reads %s, which nobody has written", Cell(region, offset).text);
  }
  if (of_other_group) race(region, offset, "reads", "of another group wrote too", item.writer);
  if (!now.after_write(item)) race(region, offset, "reads", WROTE, item.writer);
  if (item.reader == NOBODY || item.read_phase != now.phase) {
    item.reader = now.thread;
    item.reader_simd = now.simd;
  } else if (item.reader_simd != now.simd) {
    item.reader = item.reader_simd = SEVERAL;
  } else if (item.read_simd_phase != now.simd_phase) {
    item.reader = now.thread;
  } else if (item.reader != now.thread) {
    item.reader = SEVERAL;
  }
  item.read_phase = now.phase;
  item.read_simd_phase = now.simd_phase;
}

void write_item(Region& region, Item& item, size_t offset) {
  const Now now(region.kind);
  const bool of_other_group = item.writer != NOBODY && item.write_phase < clock.group_began;
  if (region.kind == OUTPUT && of_other_group) {
    race(region, offset, "writes", "of another group wrote too", item.writer);
  }
  if (!now.after_write(item)) race(region, offset, "writes", WROTE, item.writer);
  if (!now.after_reads(item)) race(region, offset, "writes", READ, item.reader);
  item.writer = now.thread;
  item.write_phase = now.phase;
  item.write_simd_phase = now.simd_phase;
}

}  // namespace

void touch(const void* address, size_t bytes, bool write) {
  const uintptr_t at = uintptr_t(address) - uintptr_t(reservation);
  if (current < 0 || at >= STRIDE * MOST_REGIONS) return;
  Region& region = regions[at / STRIDE];
  const char* does = write ? "writes" : "reads";
  if (region.name == nullptr) fail("%s where there is no array", does);
  const intptr_t offset = intptr_t(uintptr_t(address) - uintptr_t(region.base));
  if (offset < 0 || offset + bytes > region.bytes) {
    const size_t items = region.bytes / region.item_bytes;
    fail("%s %s outside its %zu items", does, Cell(region, offset).text, items);
  }
  if (region.kind == INPUT) {
    if (write) fail("writes the input %s", region.name);
    return;
  }
  const size_t last = (offset + bytes - 1) / region.item_bytes;
  for (size_t i = offset / region.item_bytes; i <= last; ++i) {
    (write ? write_item : read_item)(region, region.items[i], i * region.item_bytes);
  }
}

void place_region(int number, const char* name, Kind kind, size_t bytes, size_t item_bytes) {
  if (reservation == nullptr) {
    void* at = mmap(nullptr, STRIDE * MOST_REGIONS, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return fail("no address space to reserve");
    reservation = static_cast<char*>(at);
  }
  if (number >= MOST_REGIONS) return fail("%s is one array too many", name);
  Region& region = regions[number];
  char* page = reservation + number * STRIDE + STRIDE / 2;
  region.base = page + ALIGNMENT;
  region.mapped_bytes = (ALIGNMENT + bytes + 4095) / 4096 * 4096;
  if (mprotect(page, region.mapped_bytes, PROT_READ | PROT_WRITE) != 0) {
    return fail("no memory for %s", name);
  }
  region.name = name;
  region.kind = kind;
  region.bytes = bytes;
  region.item_bytes = item_bytes;
  region.items.assign(kind == INPUT ? 0 : bytes / item_bytes, Item());
  memset(region.base, POISON, bytes);
}

void* region_base(int number) { return regions[number].base; }

void forget_regions() {
  for (Region& region : regions) {
    if (region.mapped_bytes) {
      char* page = region.base - ALIGNMENT;
      madvise(page, region.mapped_bytes, MADV_DONTNEED);
      mprotect(page, region.mapped_bytes, PROT_NONE);
    }
    region = Region();
  }
}

void* shared(int id, size_t bytes, size_t item_bytes, const char* name) {
  const int number = FIRST_SHARED + id;
  if (number >= MOST_REGIONS || regions[number].name == nullptr) {
    size_t all = bytes;
    for (const Region& region : regions) all += region.kind == SHARED ? region.bytes : 0;
    if (all > MOST_SHARED_BYTES) {
      fail("%s brings threadgroup memory to %zu bytes, more than the %zu there are", name, all,
           MOST_SHARED_BYTES);
    }
    place_region(number, name, SHARED, bytes, item_bytes);
  }
  return regions[number].base;
}

void poison_shared() {
  for (Region& region : regions) {
    if (region.kind == SHARED) memset(region.base, POISON, region.bytes);
  }
}

void check_written() {
  for (const Region& region : regions) {
    if (region.kind != OUTPUT) continue;
    size_t missing = 0, first = 0;
    for (size_t i = 0; i < region.items.size(); ++i) {
      if (region.items[i].writer == NOBODY && missing++ == 0) first = i;
    }
    if (missing) {
      return fail("%zu items of %s are never written, the first is %s", missing, region.name,
                  Cell(region, first * region.item_bytes).text);
    }
  }
}

}  // namespace host
