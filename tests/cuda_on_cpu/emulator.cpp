// The scheduler of the emulator: fibers, blocks, barriers, collectives. See emulator.h; compiled without sanitizers.
#include "cuda_on_cpu/emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cuda_on_cpu/fiber.h"

namespace pymoe::emulator {
namespace {

constexpr int64_t kMostThreads = 1024, kMostShared = 99 << 10, kMostStaticShared = 48 << 10;
#if PYMOE_EMULATOR_THREAD
constexpr int64_t kMostLive = 2048;  // threads at once
#else
constexpr int64_t kMostLive = 8192;
#endif
// after this many rounds of __nanosleep without any other event, a kernel counts as one that never ends
constexpr int64_t kMostWaits = 1 << 20;

// xorshift64*: small, seeded, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  int64_t below(int64_t bound) { return static_cast<int64_t>((next() >> 11) % static_cast<uint64_t>(bound)); }

 private:
  uint64_t state_;
};

struct Block;

// The copies of a thread, in the order in which it began them, and the ends of its groups.
struct Copies {
  static constexpr int kMost = 64;
  Copy under_way[kMost];
  int count = 0;
  int ends[kMost];  // end of each group, counted from the first unfinished copy
  int groups = 0;
};

struct Thread {
  Fiber* fiber = nullptr;
  Block* block = nullptr;
  unsigned index = 0;
  bool done = false;
  Copies* copies = nullptr;
  // The place where the thread waits, for reports on broken kernels.
  const char* waits_at = nullptr;
  Site site{};
};

// One meeting of the lanes of a warp.
struct Meeting {
  const char* name;
  unsigned mask, arrived = 0, left = 0;
  size_t size;
  Site site;
  char token = 0;  // identifies for ThreadSanitizer the order that the meeting establishes
  int waiting_count = 0;
  Thread* waiting[kWarpSize] = {};
  alignas(16) unsigned char brought[kWarpSize][kMostExchanged];
};

// The meetings of a warp that wait for lanes: at most one per lane.
struct Open {
  int count = 0;
  Meeting* meetings[kWarpSize] = {};
};

// Threads write only to fixed arrays: a vector that grows calls memmove, whose accesses ThreadSanitizer would report.
struct Block {
  static constexpr int kMostShared = 32;
  unsigned index = 0;
  std::vector<Thread> threads;
  int64_t ended = 0;
  // Barrier: the number of threads that have arrived, and the results of the last two barriers.
  int64_t came = 0, came_true = 0;
  Site site{};
  int generation = 0;
  int result[2] = {};
  char token[2] = {};
  std::vector<Open> open;  // a warp
  struct Shared {
    const void* declaration;
    void* memory;
  } shared[kMostShared];
  int shared_count = 0;
  int64_t static_shared = 0;
};

struct Grid {
  const char* name;
  int64_t blocks;
  int threads;
  int64_t shared_bytes;
  void (*body)(void*);
  void* context;
  Random random;
  FiberPool* pool;
  std::vector<std::unique_ptr<Block>> live;
  std::vector<Thread*> ready;
  Thread* current = nullptr;
  int64_t waits = 0;  // since something last happened
  char start = 0, end = 0, fence = 0;
};

thread_local Grid* grid = nullptr;

[[noreturn]] void broken(const char* what) {
  std::fprintf(stderr, "emulator: %s: %s\n", grid->name, what);
  int shown = 0;
  for (const auto& block : grid->live) {
    for (const Thread& thread : block->threads) {
      if (thread.done || thread.waits_at == nullptr) continue;
      if (++shown <= 8) {
        std::fprintf(stderr, "  block %u thread %u waits in %s at %s:%d\n", block->index, thread.index, thread.waits_at,
                     thread.site.file, thread.site.line);
      }
    }
  }
  if (shown > 8) std::fprintf(stderr, "  and %d more\n", shown - 8);
  std::fflush(nullptr);
  std::_Exit(kBroken);
}

void make_ready(Thread* thread) {
  thread->waits_at = nullptr;
  grid->waits = 0;
  grid->ready.push_back(thread);
}

// Switches to another thread; the current one continues after it has been made ready.
void give_way() { leave_fiber(grid->current->fiber); }

void wait(const char* where, Site site) {
  grid->current->waits_at = where;
  grid->current->site = site;
  give_way();
}

void run_thread() {
  Grid& g = *grid;
  happens_after(&g.start);
  g.body(g.context);
  happens_before(&g.end);
}

void begin_block(unsigned index) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->threads.resize(static_cast<size_t>(grid->threads));
  block->open.resize(static_cast<size_t>((grid->threads + kWarpSize - 1) / kWarpSize));
  if (grid->shared_bytes > 0) {
    block->shared[block->shared_count++] = {nullptr, shared_block(static_cast<size_t>(grid->shared_bytes))};
  }
  for (int i = 0; i < grid->threads; ++i) {
    Thread& thread = block->threads[static_cast<size_t>(i)];
    thread.block = block.get();
    thread.index = static_cast<unsigned>(i);
    thread.fiber = grid->pool->take(run_thread);
    grid->ready.push_back(&thread);
  }
  grid->live.push_back(std::move(block));
}

void end_block(Block* block) {
  for (int i = 0; i < block->shared_count; ++i) free_shared_block(block->shared[i].memory);
  const auto place = std::find_if(grid->live.begin(), grid->live.end(), [&](auto& one) { return one.get() == block; });
  std::swap(*place, grid->live.back());
  grid->live.pop_back();
}

void end_thread(Thread* thread) {
  thread->done = true;
  grid->waits = 0;
  grid->pool->put_back(thread->fiber);
  Block* block = thread->block;
  const Open& open = block->open[thread->index / kWarpSize];
  for (int i = 0; i < open.count; ++i) {
    if ((open.meetings[i]->mask >> (thread->index % kWarpSize) & 1u) != 0) {
      broken("a thread has ended that others of its warp wait for");
    }
  }
  if (block->came > 0) broken("a thread has ended while others of its block wait at a barrier");
  if (thread->copies != nullptr) {
    if (thread->copies->count > 0) broken("a thread has ended without waiting for its copies");
    delete thread->copies;
  }
  if (++block->ended == grid->threads) end_block(block);
}

// The last lane that leaves a meeting removes it.
void leave_meeting(Meeting* meeting) {
  const Unwatched unwatched;
  if (++meeting->left == static_cast<unsigned>(__builtin_popcount(meeting->mask))) delete meeting;
}

}  // namespace

Index thread_index() { return {grid->current->index, 0, 0}; }
Index block_index() { return {grid->current->block->index, 0, 0}; }
Index block_size() { return {static_cast<unsigned>(grid->threads)}; }
Index grid_size() { return {static_cast<unsigned>(grid->blocks)}; }
unsigned lane() { return grid->current->index % kWarpSize; }

void pause() {
  if (++grid->waits > kMostWaits) {
    grid->current->waits_at = "__nanosleep";
    broken("does not end");
  }
  grid->ready.push_back(grid->current);
  give_way();
}

void maybe_pause() {
  if (grid->random.below(8) == 0) {
    grid->ready.push_back(grid->current);
    give_way();
  }
}

void fence() {
  happens_before(&grid->fence);
  happens_after(&grid->fence);
}

int block_barrier(bool predicate, Site site) {
  Thread* me = grid->current;
  Block* block = me->block;
  if (block->ended > 0) {
    me->waits_at = "__syncthreads", me->site = site;
    broken("a barrier after some threads of the block have ended");
  }
  if (block->came > 0 && (block->site.line != site.line || block->site.file != site.file)) {
    me->waits_at = "__syncthreads", me->site = site;
    broken("the threads of a block are at different barriers");
  }
  block->site = site;
  const int turn = block->generation & 1;
  happens_before(&block->token[turn]);
  block->came_true += predicate ? 1 : 0;
  if (++block->came < grid->threads) {
    wait("__syncthreads", site);
  } else {
    block->result[turn] = static_cast<int>(block->came_true);
    block->came = block->came_true = 0;
    ++block->generation;
    for (Thread& thread : block->threads) {
      if (&thread != me) make_ready(&thread);
    }
    make_ready(me);  // the last to arrive need not be the first to continue
    give_way();
  }
  happens_after(&block->token[turn]);
  return block->result[turn];
}

void warp_exchange(const char* name, unsigned mask, const void* mine, void* all, size_t size, bool ordered, Site site) {
  Thread* me = grid->current;
  const unsigned bit = 1u << (me->index % kWarpSize);
  me->site = site;
  if ((mask & bit) == 0) me->waits_at = name, broken("a lane is not in its own mask");
  const int64_t first = me->index / kWarpSize * kWarpSize;
  const int64_t there = std::min<int64_t>(kWarpSize, grid->threads - first);
  if (there < kWarpSize && mask >> there != 0) me->waits_at = name, broken("a mask names lanes that the warp lacks");
  for (int64_t i = 0; i < there; ++i) {
    if ((mask >> i & 1u) != 0 && me->block->threads[static_cast<size_t>(first + i)].done) {
      me->waits_at = name, broken("a mask names a thread that has ended");
    }
  }
  Open& open = me->block->open[me->index / kWarpSize];
  Meeting* meeting = nullptr;
  int place = 0;
  for (int i = 0; i < open.count; ++i) {
    Meeting* one = open.meetings[i];
    if ((one->mask & mask) == 0) continue;
    if (one->mask != mask || one->name != name || one->site.line != site.line || one->site.file != site.file) {
      me->waits_at = name, broken("the lanes of a warp are at different collectives, or name different masks");
    }
    meeting = one;
    place = i;
  }
  if (meeting == nullptr) {
    const Unwatched unwatched;
    meeting = new Meeting{.name = name, .mask = mask, .size = size, .site = site, .brought = {}};
    place = open.count++;
    open.meetings[place] = meeting;
  }
  if (ordered) happens_before(&meeting->token);
  copy_bytes(meeting->brought[me->index % kWarpSize], mine, size);
  meeting->arrived |= bit;
  if (meeting->arrived == mask) {
    open.meetings[place] = open.meetings[--open.count];
    for (int i = 0; i < meeting->waiting_count; ++i) make_ready(meeting->waiting[i]);
    maybe_pause();
  } else {
    meeting->waiting[meeting->waiting_count++] = me;
    wait(name, site);
  }
  if (ordered) happens_after(&meeting->token);
  for (int i = 0; i < kWarpSize; ++i) {
    if ((mask >> i & 1u) != 0) copy_bytes(static_cast<unsigned char*>(all) + i * size, meeting->brought[i], size);
  }
  leave_meeting(meeting);
}

void begin_copy(const Copy& copy, Site site) {
  const Unwatched unwatched;
  Thread* me = grid->current;
  me->site = site;
  me->waits_at = "cp.async";
  if (copy.bytes < 0 || copy.bytes > kCopied) broken("a copy of fewer than 0 or more than 16 bytes");
  const auto misaligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kCopied != 0; };
  if (misaligned(copy.to) || misaligned(copy.from)) broken("a copy from or to an address that is not a multiple of 16");
  if (me->copies == nullptr) me->copies = new Copies;
  if (me->copies->count == Copies::kMost) broken("more copies under way than the emulator has room for");
  me->copies->under_way[me->copies->count++] = copy;
  me->waits_at = nullptr;
}

void commit_copies() {
  const Unwatched unwatched;
  Thread* me = grid->current;
  if (me->copies == nullptr) me->copies = new Copies;
  Copies& copies = *me->copies;
  if (copies.groups == Copies::kMost) broken("more groups of copies than the emulator has room for");
  copies.ends[copies.groups++] = copies.count;
}

bool next_copy(int pending, Copy& copy) {
  const Unwatched unwatched;
  if (grid->current->copies == nullptr) return false;
  Copies& copies = *grid->current->copies;
  while (copies.groups > pending && copies.ends[0] == 0) {  // the first group has arrived
    std::copy(copies.ends + 1, copies.ends + copies.groups, copies.ends);
    --copies.groups;
  }
  if (copies.groups <= pending) return false;
  copy = copies.under_way[0];
  std::copy(copies.under_way + 1, copies.under_way + copies.count, copies.under_way);
  --copies.count;
  for (int i = 0; i < copies.groups; ++i) --copies.ends[i];
  return true;
}

void* shared_memory(const void* declaration, size_t bytes) {
  Block* block = grid->current->block;
  for (int i = 0; i < block->shared_count; ++i) {
    if (block->shared[i].declaration == declaration) return block->shared[i].memory;
  }
  block->static_shared += static_cast<int64_t>(bytes);
  // A launch requests more only for a kernel without static arrays (kernels/cuda/launch.h).
  if (block->static_shared + grid->shared_bytes > kMostStaticShared) {
    broken("more than 48 KiB of shared memory, part of it static");
  }
  if (block->shared_count == Block::kMostShared) broken("more shared arrays than the emulator has room for");
  block->shared[block->shared_count] = {declaration, shared_block(bytes)};
  return block->shared[block->shared_count++].memory;
}

void* dynamic_shared_memory() {
  if (grid->shared_bytes == 0) broken("the launch gave no dynamic shared memory");
  return grid->current->block->shared[0].memory;
}

namespace {

std::mutex settings;
uint64_t next_seed = 1;
std::map<std::string, int64_t> counts;
std::vector<std::string> names;
int capability = 90;

uint64_t note_launch(const char* name) {
  const std::lock_guard<std::mutex> lock(settings);
  ++counts[name];
  names.emplace_back(name);
  return next_seed++;
}

}  // namespace

void set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(settings);
  next_seed = seed;
}

const std::map<std::string, int64_t>& launches() { return counts; }

const std::vector<std::string>& history() { return names; }

void set_compute_capability(int other) {
  const std::lock_guard<std::mutex> lock(settings);
  capability = other;
}

int compute_capability() {
  const std::lock_guard<std::mutex> lock(settings);
  return capability;
}

void clear(const char* name, void* memory, size_t bytes) {
  const std::lock_guard<std::mutex> lock(settings);
  names.push_back(std::string("memset of ") + name);
  std::memset(memory, 0, bytes);
}

void launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, void (*body)(void*), void* context) {
  if (threads < 1 || threads > kMostThreads || shared_bytes < 0 || shared_bytes > kMostShared) {
    throw std::runtime_error(std::string(name) + ": a launch of " + std::to_string(threads) + " threads with " +
                             std::to_string(shared_bytes) + " bytes of shared memory a block");
  }
  thread_local FiberPool pool;
  Grid g{name, blocks, threads, shared_bytes, body, context, Random(note_launch(name)), &pool, {}, {}};
  Grid* const outer = grid;
  grid = &g;
  pool.begin_launch();
  g.ready.reserve(kMostLive);
  happens_before(&g.start);
  // The order in which blocks become live: a random walk over 0..blocks-1 by a step that is coprime to their number.
  int64_t step = 1 + g.random.below(blocks), at = g.random.below(blocks);
  while (std::__gcd(step, blocks) != 1) ++step;
  const int64_t most = std::max<int64_t>(1, std::min(blocks, kMostLive / threads));
  const int64_t window = g.random.below(2) == 0 ? most : 1 + g.random.below(most);
  int64_t begun = 0;
  for (;;) {
    while (begun < blocks && static_cast<int64_t>(g.live.size()) < window) {
      begin_block(static_cast<unsigned>(at));
      at = (at + step) % blocks;
      ++begun;
    }
    if (g.live.empty()) break;
    if (g.ready.empty()) broken("no thread can go on");
    std::swap(g.ready[static_cast<size_t>(g.random.below(static_cast<int64_t>(g.ready.size())))], g.ready.back());
    Thread* thread = g.ready.back();
    g.ready.pop_back();
    g.current = thread;
    if (!enter_fiber(thread->fiber)) end_thread(thread);
  }
  happens_after(&g.end);
  grid = outer;
}

}  // namespace pymoe::emulator
