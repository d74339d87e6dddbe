// Stacks that one thread of the system switches between; a fiber is its saved stack pointer.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace host {

using Fiber = void*;

#if defined(__x86_64__)

// What a call must keep goes to the old stack and comes from the new one.
asm(R"(
  .text
  .type host_switch_stacks, @function
host_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr size_t SAVED_WORDS = 7, RETURN_WORD = 6, PADDING_WORDS = 1;

#elif defined(__aarch64__)

asm(R"(
  .text
  .type host_switch_stacks, %function
host_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr size_t SAVED_WORDS = 20, RETURN_WORD = 11, PADDING_WORDS = 0;

#else
#error "the host runner knows how to switch stacks on x86-64 and arm64 only"
#endif

extern "C" void host_switch_stacks(Fiber* from, Fiber to) __attribute__((visibility("hidden")));

inline void switch_fiber(Fiber& from, Fiber to) { host_switch_stacks(&from, to); }

inline Fiber new_fiber(char* stack, size_t bytes, void (*run)()) {
  uintptr_t* top = reinterpret_cast<uintptr_t*>(uintptr_t(stack + bytes) / 16 * 16);
  uintptr_t* saved = top - PADDING_WORDS - SAVED_WORDS;
  memset(saved, 0, SAVED_WORDS * sizeof *saved);
  saved[RETURN_WORD] = reinterpret_cast<uintptr_t>(run);
  return saved;
}

}  // namespace host
