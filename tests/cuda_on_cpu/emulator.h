// Runs a CUDA kernel on the CPU: one fiber per CUDA thread, in an order that a seed decides.
//
// A fiber runs until it reaches a barrier, a warp collective, an atomic or __nanosleep; then another one, chosen at
// random, continues. Blocks become live in random order, and a random number of them are live at a time, as on a GPU
// that is partly busy: a kernel may rely neither on all blocks being live nor on one running before another.
//
// The emulator detects, in addition to wrong values:
//   - barriers and collectives that not all threads reach, that threads reach at different places of the source, or
//     after some threads have ended; copies to shared memory that are misaligned or that no thread waits for: the
//     process stops with a message and status kBroken;
//   - kernels that never end (reported in the same way), and launches that a GPU would refuse (std::runtime_error);
//   - with AddressSanitizer: accesses outside global, shared and local memory (every array is its own heap block);
//   - with ThreadSanitizer: data races, even those that give right values. Only the operations that order accesses in
//     CUDA count: barriers, __syncwarp, fences next to atomics. Shuffles and votes do not order anything.
//
// It does not model weak memory (a race is reported instead), speed, and the GPU's own functions such as exp (kernels
// that promise bits use the arithmetic of csrc/core).
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

// A thread's place in the source, which tells whether threads meet at the same place.
struct Site {
  const char* file;
  int line;
};

// Waits for every thread of the block. Returns how many came with a true `predicate`.
int block_barrier(bool predicate, Site site);

// Waits for the lanes of the warp that `mask` names, and copies each lane's value to all[lane * size]; the places of
// other lanes stay unchanged. `ordered`: writes of the lanes before the call are visible after it (__syncwarp).
void warp_exchange(const char* name, unsigned mask, const void* mine, void* all, size_t size, bool ordered, Site site);

// Lets other threads run, in some or all of the calls.
void pause();
void maybe_pause();
// __threadfence.
void fence();

// Returns the block's array for this declaration, which its address identifies; it is created at first use, with
// arbitrary contents.
void* shared_memory(const void* declaration, size_t bytes);
// Returns the array whose size the launch gave.
void* dynamic_shared_memory();

// Unfinished copies of a thread. (async_copy.h moves the bytes, because it is compiled with sanitizers.)
inline constexpr int kCopied = 16;  // bytes that a copy fills
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes;  // to copy; the others are cleared
};
void begin_copy(const Copy& copy, Site site);
void commit_copies();
// Finds the earliest copy that has not arrived and does not belong to the `pending` latest groups; returns false if
// there is none.
bool next_copy(int pending, Copy& copy);

void launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, void (*body)(void*), void* context);
template <typename Body>
void launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, Body&& body) {
  launch(name, blocks, threads, shared_bytes, [](void* opaque) { (*static_cast<Body*>(opaque))(); }, &body);
}

// Launches with the same seed and arguments run in the same order. Each launch advances the seed.
void set_seed(uint64_t seed);
// Returns how often each kernel has run in this process, by the name given to its launch.
const std::map<std::string, int64_t>& launches();
// Returns the names of these launches in order; a memset on a stream is listed as "memset of NAME".
const std::vector<std::string>& history();
// The emulated GPU: ten times its major compute capability plus the minor one. Only host code asks for it.
void set_compute_capability(int capability);
int compute_capability();
// Clears memory as cudaMemsetAsync does; this counts as a launch.
void clear(const char* name, void* memory, size_t bytes);

}  // namespace pymoe::emulator
