// The machine: one group after the other, its threads as fibers that run until they wait.

#include "machine.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fiber.h"

namespace host {

Clock clock;
int current = -1;
char message[1024];

namespace {

constexpr size_t STACK_BYTES = 256 << 10;

enum State { READY, AT_BARRIER, AT_SIMD, ENDED };

struct Thread {
  Fiber fiber;
  State state;
  Place place;
  const char* name;  // of what it waits in
  int line, fence;
};

using Entry = void (*)(void* const*, const Place*);

Thread threads[MOST_THREADS];
char* stacks = nullptr;
int thread_count;
char slots[MOST_THREADS / SIMD][2][SIMD * SLOT];
int turn[MOST_THREADS / SIMD];
Entry entry;
void* const* buffers;
Fiber scheduler;

void run_thread() {
  entry(buffers, &threads[current].place);
  threads[current].state = ENDED;
  switch_fiber(threads[current].fiber, scheduler);
}

void begin_group(const unsigned* group, const unsigned* groups) {
  const uint32_t last = clock.phase[0] > clock.phase[1] ? clock.phase[0] : clock.phase[1];
  clock.group_began = clock.phase[0] = clock.phase[1] = last + 1;
  poison_shared();
  for (unsigned i = 0; i < unsigned(thread_count); ++i) {
    Thread& thread = threads[i];
    thread.fiber = new_fiber(stacks + i * STACK_BYTES, STACK_BYTES, run_thread);
    thread.state = READY;
    Place& place = thread.place;
    for (int d = 0; d < 3; ++d) {
      place.group[d] = place.grid[d] = group[d];
      place.groups[d] = groups[d];
    }
    place.grid[0] = group[0] * thread_count + i;
    place.index = i;
    place.lane = i % SIMD;
    place.simd = i / SIMD;
    place.threads = thread_count;
  }
}

bool wait_together(const Thread& a, const Thread& b) {
  return a.state == b.state && a.line == b.line && strcmp(a.name, b.name) == 0;
}

void count_phase(const Thread& any, uint32_t* phase) {
  phase[DEVICE] += (any.fence & DEVICE_MEMORY) != 0;
  phase[THREADGROUP] += (any.fence & THREADGROUP_MEMORY) != 0;
}

// Lets the threads from `first` on go on if all of them wait in the same operation.
bool release(int first, int count, State state) {
  for (int i = first; i < first + count; ++i) {
    if (threads[i].state != state || !wait_together(threads[first], threads[i])) return false;
  }
  for (int i = first; i < first + count; ++i) threads[i].state = READY;
  return true;
}

bool release_any() {
  bool any = false;
  for (int s = 0; s < thread_count / SIMD; ++s) {
    if (!release(s * SIMD, SIMD, AT_SIMD)) continue;
    count_phase(threads[s * SIMD], clock.simd_phase[s]);
    ++turn[s];
    any = true;
  }
  if (!any && release(0, thread_count, AT_BARRIER)) {
    count_phase(threads[0], clock.phase);
    any = true;
  }
  return any;
}

// Nobody can go on: says who waits for whom.
void report_stuck(State state, int first, int count) {
  for (int i = first; i < first + count && !message[0]; ++i) {
    if (threads[i].state != state) continue;
    for (int j = first; j < first + count && !message[0]; ++j) {
      const Thread &one = threads[i], &other = threads[j];
      if (wait_together(one, other)) continue;
      char does[96] = "has ended";
      if (other.state != ENDED) {
        snprintf(does, sizeof does, "waits in %s of line %d", other.name, other.line);
      }
      fail("thread %d waits in %s of line %d for thread %d, which %s", i, one.name, one.line, j,
           does);
    }
  }
}

void shuffle(int* order, uint64_t& seed) {
  for (int i = thread_count - 1; i > 0; --i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const int j = int((seed >> 33) % (i + 1)), kept = order[i];
    order[i] = order[j];
    order[j] = kept;
  }
}

// Runs a group to its end. Order 0 is the threads' own, the others are shuffles, new each time.
void run_group(int order_number, uint64_t& seed) {
  static int order[MOST_THREADS];
  for (int i = 0; i < thread_count; ++i) order[i] = i;
  for (int ended = 0; ended < thread_count;) {
    if (order_number > 0) shuffle(order, seed);
    ended = 0;
    for (int i = 0; i < thread_count; ++i) {
      current = order[i];
      Thread& thread = threads[current];
      if (thread.state == READY) switch_fiber(scheduler, thread.fiber);
      if (message[0]) return;
      ended += thread.state == ENDED;
    }
    current = -1;
    if (ended < thread_count && !release_any()) {
      for (int s = 0; s < thread_count / SIMD; ++s) report_stuck(AT_SIMD, s * SIMD, SIMD);
      return report_stuck(AT_BARRIER, 0, thread_count);
    }
  }
}

void on_signal(int number, siginfo_t* info, void*) {
  if (current < 0) signal(number, SIG_DFL);  // The machine's own fault: let it end the process.
  const bool memory = number == SIGSEGV || number == SIGBUS;
  fail("%s (%p)", memory ? "a wild address" : "an instruction that cannot run", info->si_addr);
}

// Turns faults into messages while it lives.
struct CatchFaults {
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  static char stack[64 << 10];
  struct sigaction before[4];
  stack_t stack_before;
  CatchFaults() {
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &before[i]);
  }
  ~CatchFaults() {
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};
char CatchFaults::stack[64 << 10];

void wait(State state, int fence, const char* name, int line) {
  Thread& thread = threads[current];
  thread.state = state;
  thread.fence = fence;
  thread.name = name;
  thread.line = line;
  switch_fiber(thread.fiber, scheduler);
}

}  // namespace

void fail(const char* format, ...) {
  size_t used = 0;
  if (current >= 0) {
    const Place& p = threads[current].place;
    used = snprintf(message, sizeof message, "thread %u of group (%u, %u, %u) ", p.index,
                    p.group[0], p.group[1], p.group[2]);
  }
  va_list values;
  va_start(values, format);
  vsnprintf(message + used, sizeof message - used, format, values);
  va_end(values);
  if (current >= 0) switch_fiber(threads[current].fiber, scheduler);
}

void barrier(int fence, int line) { wait(AT_BARRIER, fence, "the barrier", line); }

void simd_barrier(int fence, int line) { wait(AT_SIMD, fence, "the simd barrier", line); }

const char* exchange(const void* mine, size_t bytes, const char* name, int line) {
  // Turns alternate: the other half holds what slower lanes have yet to read.
  const int simd = current / SIMD;
  char* values = slots[simd][turn[simd] % 2];
  memcpy(values + current % SIMD * SLOT, mine, bytes);
  wait(AT_SIMD, NO_MEMORY, name, line);
  return values;
}

unsigned lane() { return current % SIMD; }

void fail_at(int line, const char* what) { fail("line %d: %s", line, what); }

}  // namespace host

using namespace host;

// For Python: place the buffers, fill the inputs, run, read the outputs, forget.

extern "C" const char* host_place(int number, const char* name, int output, size_t bytes,
                                  size_t item_bytes, void** base) {
  message[0] = 0;
  current = -1;
  place_region(number, name, output ? OUTPUT : INPUT, bytes, item_bytes);
  *base = region_base(number);
  return message;
}

extern "C" const char* host_run(void* function, void* const* bases, const unsigned* groups,
                                int count, int order_number) {
  if (stacks == nullptr) stacks = static_cast<char*>(malloc(MOST_THREADS * STACK_BYTES));
  message[0] = 0;
  entry = reinterpret_cast<Entry>(function);
  buffers = bases;
  thread_count = count;
  uint64_t seed = order_number;
  CatchFaults caught;
  unsigned group[3];
  for (group[2] = 0; group[2] < groups[2]; ++group[2]) {
    for (group[1] = 0; group[1] < groups[1]; ++group[1]) {
      for (group[0] = 0; group[0] < groups[0]; ++group[0]) {
        begin_group(group, groups);
        run_group(order_number, seed);
        if (message[0]) return message;
      }
    }
  }
  check_written();
  return message;
}

extern "C" void host_forget() { forget_regions(); }
