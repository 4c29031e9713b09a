// See fiber.h; compiled without sanitizers.
#include "cuda_on_cpu/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if PYMOE_EMULATOR_ADDRESS
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#endif
#if PYMOE_EMULATOR_THREAD
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace pymoe::emulator {
namespace {

constexpr size_t kStack = 96 << 10;
#if PYMOE_EMULATOR_THREAD
constexpr size_t kMostFibers =
    2048;  // each costs ThreadSanitizer milliseconds, and memory maps, of which a process may have 65,530
#else
constexpr size_t kMostFibers = 1;  // more fibers than live threads would be useless
#endif

}  // namespace

// --- the switch between two stacks ---

#if defined(__x86_64__)

// ucontext's swapcontext asks the system for the signal mask at every switch; this saves what the ABI asks for.
struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void pymoe_switch_stack(Context* from, const Context* to);
asm(R"(
.text
.globl pymoe_switch_stack
.type pymoe_switch_stack, @function
pymoe_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pymoe_switch_stack, .-pymoe_switch_stack
)");

static void switch_stack(Context* from, const Context* to) { pymoe_switch_stack(from, to); }

static void prepare(Context* context, char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;                              // return address of the entry, which never returns; aligns its frame
  *--top = reinterpret_cast<void*>(entry);       // popped by ret
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // the saved registers
  context->stack_pointer = top;
}

#else

struct Context {
  ucontext_t context{};
};

static void switch_stack(Context* from, const Context* to) { swapcontext(&from->context, &to->context); }

static void prepare(Context* context, char* stack, void (*entry)()) {
  getcontext(&context->context);
  context->context.uc_stack.ss_sp = stack;
  context->context.uc_stack.ss_size = kStack;
  context->context.uc_link = nullptr;
  makecontext(&context->context, entry, 0);
}

#endif

struct Fiber {
  Context own, caller;
  char* memory = nullptr;  // an inaccessible page, then the stack
  char* stack = nullptr;
  void (*body)() = nullptr;
  bool done = false;
  // The sanitizers' view.
  void* fake_stack = nullptr;
  void* caller_fake_stack = nullptr;
  const void* caller_stack = nullptr;
  size_t caller_size = 0;
  void* thread = nullptr;
  void* caller_thread = nullptr;
};

static thread_local Fiber* entered = nullptr;

static void back_to_caller(Fiber* fiber, bool forever) {
#if PYMOE_EMULATOR_THREAD
  __tsan_switch_to_fiber(fiber->caller_thread, 1);
#endif
#if PYMOE_EMULATOR_ADDRESS
  __sanitizer_start_switch_fiber(forever ? nullptr : &fiber->fake_stack, fiber->caller_stack, fiber->caller_size);
#endif
  static_cast<void>(forever);
  switch_stack(&fiber->own, &fiber->caller);
#if PYMOE_EMULATOR_ADDRESS
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &fiber->caller_stack, &fiber->caller_size);
#endif
}

static void fiber_main() {
  Fiber* fiber = entered;
#if PYMOE_EMULATOR_ADDRESS
  __sanitizer_finish_switch_fiber(nullptr, &fiber->caller_stack, &fiber->caller_size);
#endif
  fiber->body();
  fiber->done = true;
  back_to_caller(fiber, true);
  std::abort();  // an ended fiber was entered
}

bool enter_fiber(Fiber* fiber) {
  entered = fiber;
#if PYMOE_EMULATOR_THREAD
  fiber->caller_thread = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber->thread, 1);
#endif
#if PYMOE_EMULATOR_ADDRESS
  __sanitizer_start_switch_fiber(&fiber->caller_fake_stack, fiber->stack, kStack);
#endif
  switch_stack(&fiber->caller, &fiber->own);
#if PYMOE_EMULATOR_ADDRESS
  __sanitizer_finish_switch_fiber(fiber->caller_fake_stack, nullptr, nullptr);
#endif
  return !fiber->done;
}

void leave_fiber(Fiber* fiber) { back_to_caller(fiber, false); }

Fiber* FiberPool::take(void (*body)()) {
  Fiber* fiber;
  if (free_.empty() && (count_ < kMostFibers || next_used_ == used_.size())) {
    fiber = new Fiber;
    ++count_;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory =
        mmap(nullptr, page + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
      std::perror("emulator: a fiber's stack");
      std::abort();
    }
    fiber->memory = static_cast<char*>(memory);
    fiber->stack = fiber->memory + page;
#if PYMOE_EMULATOR_THREAD
    fiber->thread = __tsan_create_fiber(0);
#endif
  } else if (!free_.empty()) {
    fiber = free_.back();
    free_.pop_back();
  } else {
    fiber = used_[next_used_++];  // the one that ended first
  }
  fiber->body = body;
  fiber->done = false;
  fiber->fake_stack = nullptr;
  prepare(&fiber->own, fiber->stack, fiber_main);
  return fiber;
}

void FiberPool::put_back(Fiber* fiber) { used_.push_back(fiber); }

void FiberPool::abandon(Fiber* fiber) {
#if PYMOE_EMULATOR_ADDRESS
  __lsan_register_root_region(fiber->stack, kStack);
#else
  static_cast<void>(fiber);
#endif
}

void FiberPool::begin_launch() {
  free_.insert(free_.end(), used_.begin() + static_cast<std::ptrdiff_t>(next_used_), used_.end());
  used_.clear();
  next_used_ = 0;
}

FiberPool::~FiberPool() {
  begin_launch();
  for (Fiber* fiber : free_) {
#if PYMOE_EMULATOR_THREAD
    __tsan_destroy_fiber(fiber->thread);
#endif
    munmap(fiber->memory, static_cast<size_t>(fiber->stack - fiber->memory) + kStack);
    delete fiber;
  }
}

void happens_before(void* token) {
#if PYMOE_EMULATOR_THREAD
  __tsan_release(token);
#else
  static_cast<void>(token);
#endif
}

void happens_after(void* token) {
#if PYMOE_EMULATOR_THREAD
  __tsan_acquire(token);
#else
  static_cast<void>(token);
#endif
}

Unwatched::Unwatched() {
#if PYMOE_EMULATOR_THREAD
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}

Unwatched::~Unwatched() {
#if PYMOE_EMULATOR_THREAD
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

void* shared_block(size_t bytes) {
  const Unwatched unwatched;
  auto* memory = static_cast<volatile unsigned char*>(std::malloc(bytes));
  for (size_t i = 0; i < bytes; ++i) memory[i] = 0xa5;
  return const_cast<unsigned char*>(memory);
}

void free_shared_block(void* memory) {
  const Unwatched unwatched;
  std::free(memory);
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<volatile unsigned char*>(to);
  const auto* source = static_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < bytes; ++i) target[i] = source[i];
}

}  // namespace pymoe::emulator
