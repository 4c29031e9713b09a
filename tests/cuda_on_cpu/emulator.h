// Runs a CUDA kernel on the CPU: one fiber per CUDA thread, in an order that a seed decides.
//
// A fiber runs until it meets a barrier, a warp collective, an atomic or __nanosleep; then another one goes on, chosen
// at random. Blocks become live in random order, as many at once as a random window holds, as on a GPU that is
// partly busy: a kernel may neither count on all blocks being there nor on one running before another.
//
// What it finds, beside wrong values:
//   - barriers and collectives that not all threads reach, or that they reach at different places of the source, or
//     after some have ended, copies to shared memory that are misaligned or that nobody waits for: the process stops
//     with a message and status kBroken;
//   - kernels that never end (the same way), and launches that a GPU would refuse (std::runtime_error);
//   - with AddressSanitizer: accesses outside global, shared and local memory (every array is its own heap block);
//   - with ThreadSanitizer: data races, also those whose values come out right. Order comes only from what CUDA says
//     gives order: barriers, __syncwarp, fences beside atomics. Shuffles and votes give none.
//
// What it does not model: weak memory (a race is reported instead), speed, and the GPU's own functions for exp and the
// like (kernels that promise bits use the arithmetic of csrc/core).
//
// emulator.cpp must be compiled without sanitizers, with PYMOE_EMULATOR_ADDRESS or PYMOE_EMULATOR_THREAD to announce
// fibers to the one that the kernels are compiled with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pymoe::emulator {

inline constexpr int kWarpSize = 32;
inline constexpr int kBroken = 67;            // exit status when a kernel breaks a rule of synchronisation
inline constexpr size_t kMostExchanged = 64;  // bytes that a lane may bring to a collective

struct Index {
  unsigned x, y = 1, z = 1;
};

// Returns the index of the running thread.
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
unsigned lane();

// Where a thread stands in the source, so that threads that meet at different places are told apart.
struct Site {
  const char* file;
  int line;
};

// Waits for every thread of the block. Returns how many came with a true `predicate`.
int block_barrier(bool predicate, Site site);

// Waits for the lanes of the warp that `mask` names and copies what each brought into all[lane * size]; those that are
// not in the mask leave their place as it is. `ordered`: what the lanes wrote before is seen after (__syncwarp).
void warp_exchange(const char* name, unsigned mask, const void* mine, void* all, size_t size, bool ordered, Site site);

// Lets other threads run: always, or now and then.
void pause();
void maybe_pause();
// __threadfence.
void fence();

// The block's array for this declaration (its address stands for it), created at first use with arbitrary contents.
void* shared_memory(const void* declaration, size_t bytes);
// Returns the array whose size the launch gave.
void* dynamic_shared_memory();

// Copies of a thread that are under way (async_copy.h moves the bytes, where sanitizers see it).
inline constexpr int kCopied = 16;  // bytes that a copy fills
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes;  // to copy; the others are cleared
};
void begin_copy(const Copy& copy, Site site);
void commit_copies();
// The earliest copy that has not arrived and belongs to a group other than the `pending` latest; false if there is
// none.
bool next_copy(int pending, Copy& copy);

void launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, void (*body)(void*), void* context);
template <typename Body>
void launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, Body&& body) {
  launch(name, blocks, threads, shared_bytes, [](void* opaque) { (*static_cast<Body*>(opaque))(); }, &body);
}

// Launches with the same seed and arguments run in the same order. Each launch advances the seed.
void set_seed(uint64_t seed);
// How often each kernel (by the name given to its launch) has run in this process.
const std::map<std::string, int64_t>& launches();
// The names of those launches in their order, "memset of NAME" where a stream was asked to clear memory.
const std::vector<std::string>& history();
// The emulated GPU: ten times its major compute capability plus the minor one. Only host code asks for it.
void set_compute_capability(int capability);
int compute_capability();
// Clears memory as cudaMemsetAsync does, which is a launch like any other.
void clear(const char* name, void* memory, size_t bytes);

}  // namespace pymoe::emulator
