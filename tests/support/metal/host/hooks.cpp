// What the compiler's sanitizers call in the kernel's code, answered by the machine.

#include <string.h>

#include "machine.h"

using host::fail;
using host::touch;

#define ACCESS(bytes)                                                                            \
  extern "C" void __tsan_read##bytes(void* at) { touch(at, bytes, false); }                      \
  extern "C" void __tsan_write##bytes(void* at) { touch(at, bytes, true); }                      \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { touch(at, bytes, false); }            \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { touch(at, bytes, true); }            \
  extern "C" void __tsan_read_write##bytes(void* at) {                                           \
    touch(at, bytes, false);                                                                     \
    touch(at, bytes, true);                                                                      \
  }                                                                                              \
  extern "C" void __tsan_unaligned_read_write##bytes(void* at) { __tsan_read_write##bytes(at); }

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

extern "C" void __tsan_init() {}

extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  touch(from, bytes, false);
  touch(to, bytes, true);
  return memcpy(to, from, bytes);
}

extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  touch(from, bytes, false);
  touch(to, bytes, true);
  return memmove(to, from, bytes);
}

extern "C" void* __tsan_memset(void* to, int value, size_t bytes) {
  touch(to, bytes, true);
  return memset(to, value, bytes);
}

// Older compilers leave the plain names, which the linker is told to wrap.
extern "C" void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  return __tsan_memcpy(to, from, bytes);
}
extern "C" void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  return __tsan_memmove(to, from, bytes);
}
extern "C" void* __wrap_memset(void* to, int value, size_t bytes) {
  return __tsan_memset(to, value, bytes);
}

// Every record of the undefined-behaviour sanitizer begins with the place in the source.
struct SourcePlace {
  const char* file;
  unsigned line, column;
};

#define UNDEFINED(name, what, ...)                                                               \
  extern "C" void __ubsan_handle_##name(SourcePlace* place, ##__VA_ARGS__) {                     \
    fail("%s:%u: %s", place->file, place->line, what);                                           \
  }

UNDEFINED(out_of_bounds, "an index outside its array", void*)
UNDEFINED(type_mismatch_v1, "an address that is not aligned for its type", void*)
UNDEFINED(shift_out_of_bounds, "a shift by more bits than there are", void*, void*)
UNDEFINED(divrem_overflow, "an integer division by zero", void*, void*)
