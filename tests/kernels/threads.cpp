// Runs the threads of a GPU kernel on the CPU. Each is a fiber with its own stack, which runs until it has to wait: at a
// barrier of its block, or at a shuffle, vote or product that the 32 lanes of a warp do together. Which fiber runs next is
// random, so that races show. Blocks run one at a time, in random order.
#include "threads.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace {

constexpr int LANES = 32, MOST_WARPS = 32, MOST_ARRAYS = 64;
// The largest page there is.
constexpr size_t STACK = 64 << 10, PAGE = 64 << 10;

#if defined(__x86_64__) && !defined(PORTABLE)
// Callee-saved registers are kept on the stack.
struct Context { void* stack; };
extern "C" void kernel_switch(Context* from, const Context* to);
asm(R"(
.text
kernel_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov (%rsi), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

void prepare(Context& context, char* stack, void (*start)()) {
  void** top = reinterpret_cast<void**>(stack + STACK) - 2;
  *top = reinterpret_cast<void*>(start);
  context.stack = top - 6;
}

void change(Context& from, const Context& to) { kernel_switch(&from, &to); }
#else
using Context = ucontext_t;

void prepare(Context& context, char* stack, void (*start)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK;
  makecontext(&context, start, 0);
}

void change(Context& from, const Context& to) { swapcontext(&from, &to); }
#endif

// Where threads wait for each other: how many have arrived, and the call the first of them made.
struct Meeting {
  int arrived;
  const char* what;
  int line;
};

struct Warp {
  // Bit masks of lanes that can run, and that have returned.
  uint32_t ready, ended;
  Meeting meeting;
  // Meetings so far. Buffers alternate: a lane may still read those of one meeting while another is at the next.
  unsigned round;
  uint64_t values[2][LANES];
  uint32_t words[2][LANES][6];
  float products[2][16][8];
};

Warp warps[MOST_WARPS];
Meeting block_meeting;
Context threads[MOST_WARPS * LANES], scheduler;
unsigned count;
char* stacks;
bool failed;
char message[400];
uint64_t lot;
void (*body)(void**);
void** arguments;

uint64_t draw() {
  lot ^= lot << 13;
  lot ^= lot >> 7;
  return lot ^= lot << 17;
}

void leave() { change(threads[kernel_thread.x], scheduler); }

[[noreturn]] void fail(const char* what, int line, const char* other = "", int other_line = 0) {
  if (!failed) {
    const int n = snprintf(message, sizeof(message), "block (%u, %u), thread %u: %s, line %d", kernel_block.x,
                           kernel_block.y, kernel_thread.x, what, line);
    if (*other) snprintf(message + n, sizeof(message) - n, ", while others are at %s, line %d", other, other_line);
  }
  failed = true;
  for (;;) leave();
}

Warp& own_warp() { return warps[kernel_thread.x / LANES]; }
uint32_t own_bit() { return 1u << kernel_thread.x % LANES; }

// Whether this thread is the last of `all` to arrive; if not, it has to wait.
bool arrive(Meeting& meeting, unsigned all, const char* what, int line) {
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.line = line;
  } else if (meeting.line != line || strcmp(meeting.what, what)) {
    fail(what, line, meeting.what, meeting.line);
  }
  if (++meeting.arrived == int(all)) {
    meeting.arrived = 0;
    return true;
  }
  own_warp().ready &= ~own_bit();
  return false;
}

void release(Warp& warp) {
  warp.round++;
  warp.ready = ~0u;
}

float number(uint32_t word, int high, bool brain) {
  const uint16_t bits = uint16_t(word >> 16 * high);
  return brain ? bfloat16_to_float(bits) : float16_to_float(bits);
}

// The layout of the fragments is in the PTX manual, "Matrix Fragments for mma.m16n8k16".
void multiply(Warp& warp, unsigned side, bool brain) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < LANES; lane++) {
    const uint32_t* words = warp.words[side][lane];
    const int g = lane / 4, t = lane % 4;
    for (int high = 0; high < 2; high++) {
      for (int i = 0; i < 4; i++) a[g + i % 2 * 8][2 * t + i / 2 * 8 + high] = number(words[i], high, brain);
      for (int i = 0; i < 2; i++) b[2 * t + i * 8 + high][g] = number(words[4 + i], high, brain);
    }
  }
  float (*c)[8] = warp.products[side];
  memset(c, 0, sizeof(warp.products[side]));
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) c[m][n] += a[m][k] * b[k][n];
}

void start() {
  body(arguments);
  own_warp().ready &= ~own_bit();
  own_warp().ended |= own_bit();
  for (;;) leave();
}

void run_thread(unsigned thread) {
  kernel_thread = {thread, 0, 0};
  change(scheduler, threads[thread]);
}

// A deadlock: finds a thread that waits.
void stuck() {
  for (unsigned w = 0; w < count / LANES; w++) {
    const Meeting& meeting = warps[w].meeting.arrived ? warps[w].meeting : block_meeting;
    if (meeting.arrived == 0) continue;
    for (unsigned thread = w * LANES; thread < (w + 1) * LANES; thread++) {
      kernel_thread = {thread, 0, 0};
      if (own_warp().ended & own_bit()) continue;
      snprintf(message, sizeof(message), "block (%u, %u), thread %u waits forever at %s, line %d", kernel_block.x,
               kernel_block.y, thread, meeting.what, meeting.line);
      failed = true;
      return;
    }
  }
}

void run_block() {
  memset(warps, 0, sizeof(warps));
  block_meeting = {};
  for (unsigned thread = 0; thread < count; thread++)
    prepare(threads[thread], stacks + thread * (STACK + PAGE) + PAGE, start);
  const unsigned all = count / LANES;
  for (unsigned w = 0; w < all; w++) warps[w].ready = ~0u;
  while (!failed) {
    const unsigned first = draw() % all;
    unsigned w = first;
    while (warps[w].ready == 0)
      if ((w = (w + 1) % all) == first) break;
    if (warps[w].ready == 0) break;
    while (uint32_t ready = warps[w].ready) {
      const unsigned turn = draw() % LANES;
      if (turn) ready = ready >> turn | ready << (LANES - turn);
      run_thread(w * LANES + (__builtin_ctz(ready) + turn) % LANES);
      if (failed) return;
    }
  }
  for (unsigned w = 0; w < all; w++)
    if (warps[w].ended != ~0u) return stuck();
}

unsigned common_factor(unsigned a, unsigned b) { return b ? common_factor(b, a % b) : a; }

char* map(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (made == MAP_FAILED) abort();
  return static_cast<char*>(made);
}

void guard(char* page) { mprotect(page, PAGE, PROT_NONE); }

size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Memory between guard pages; its end, rounded up to 16 bytes, touches the second one.
char* guarded(size_t bytes) {
  char* made = map(pages(bytes) + 2 * PAGE);
  guard(made);
  guard(made + PAGE + pages(bytes));
  return made + PAGE + pages(bytes) - (bytes + 15) / 16 * 16;
}

void unmap(void* at, size_t bytes) {
  munmap(static_cast<char*>(at) + (bytes + 15) / 16 * 16 - pages(bytes) - PAGE, pages(bytes) + 2 * PAGE);
}

void fault(int, siginfo_t*, void*) { fail("an access outside of all arrays", 0); }

// While this exists, an invalid memory access ends the kernel and not the process.
struct Faults {
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS};
  struct sigaction before[2];
  stack_t stack_before;
  char stack[64 << 10];

  Faults() {
    const stack_t own = {stack, 0, sizeof(stack)};
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 2; i++) sigaction(SIGNALS[i], &action, &before[i]);
  }

  ~Faults() {
    for (int i = 0; i < 2; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

}  // namespace

extern "C" {

uint3 kernel_thread, kernel_block, kernel_block_size, kernel_blocks;

void kernel_barrier(const char* what, int line) {
  if (!arrive(block_meeting, count, what, line)) return leave();
  for (unsigned w = 0; w < count / LANES; w++) warps[w].ready = ~0u;
}

const uint64_t* kernel_exchange(uint64_t value, const char* what, int line) {
  Warp& warp = own_warp();
  uint64_t* all = warp.values[warp.round % 2];
  all[kernel_thread.x % LANES] = value;
  if (arrive(warp.meeting, LANES, what, line))
    release(warp);
  else
    leave();
  return all;
}

void kernel_mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, bool brain) {
  Warp& warp = own_warp();
  const unsigned side = warp.round % 2, lane = kernel_thread.x % LANES;
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(warp.words[side][lane], words, sizeof(words));
  if (arrive(warp.meeting, LANES, "mma", 0)) {
    multiply(warp, side, brain);
    release(warp);
  } else {
    leave();
  }
  for (int i = 0; i < 4; i++) c[i] += warp.products[side][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

// Runs `with` in every thread of `blocks` blocks of `size` threads. Returns null, or what went wrong. The kernel works on
// guarded copies of the `arrays`, which are copied back afterwards; an array passed twice has one copy.
const char* kernel_run(void (*with)(void**), void** arrays, const uint64_t* bytes, unsigned number,
                       const unsigned* blocks, unsigned size, char* shared, uint64_t shared_bytes, uint64_t seed) {
  if (stacks == nullptr) {
    stacks = map((STACK + PAGE) * MOST_WARPS * LANES);
    for (size_t thread = 0; thread < MOST_WARPS * LANES; thread++) guard(stacks + thread * (STACK + PAGE));
  }
  void* copies[MOST_ARRAYS];
  for (unsigned i = 0; i < number; i++) {
    unsigned first = 0;
    while (arrays[first] != arrays[i]) first++;
    copies[i] = first < i ? copies[first] : memcpy(guarded(bytes[i]), arrays[i], bytes[i]);
  }
  body = with;
  arguments = copies;
  count = size;
  lot = seed * 2654435769u + 1;
  failed = false;
  kernel_block_size = {size, 1, 1};
  kernel_blocks = {blocks[0], blocks[1], blocks[2]};
  const unsigned all = blocks[0] * blocks[1] * blocks[2];
  // A random stride coprime to the number of blocks visits each once.
  unsigned stride = draw() % all + 1;
  while (common_factor(stride, all) != 1) stride++;
  unsigned at = draw() % all;
  Faults faults;
  for (unsigned i = 0; i < all && !failed; i++, at = unsigned((uint64_t(at) + stride) % all)) {
    kernel_block = {at % blocks[0], at / blocks[0] % blocks[1], at / blocks[0] / blocks[1]};
    // NaN in floats; booleans are sometimes true, sometimes false.
    memset(shared, 255, shared_bytes);
    if (draw() % 2)
      for (uint64_t i = 0; i < shared_bytes; i += 4) shared[i] = 0;
    run_block();
  }
  for (unsigned i = 0; i < number; i++) {
    if (copies[i] == nullptr) continue;
    memcpy(arrays[i], copies[i], bytes[i]);
    for (unsigned j = i + 1; j < number; j++)
      if (copies[j] == copies[i]) copies[j] = nullptr;
    unmap(copies[i], bytes[i]);
  }
  return failed ? message : nullptr;
}

// Handlers for -fsanitize=alignment,bounds.
struct Place { const char* file; uint32_t line, column; };
void __ubsan_handle_type_mismatch_v1(const Place* place, uintptr_t) { fail("an address is not aligned", int(place->line)); }
void __ubsan_handle_out_of_bounds(const Place* place, uintptr_t) { fail("an index is out of bounds", int(place->line)); }
}
