// build_routing: a stable counting sort of all choices by expert.
//
//     offsets[e + 1] - offsets[e] = min(capacity, choices of expert e)
//     slot[t, k]  = offsets[e] + n,  n = number of choices of e = experts[t, k] before (t, k);  -1 if n >= capacity
//     token[slot[t, k]] = t;  token[s] = -1 for s >= offsets[E]
//
// If `foreign` is set, an expert of E or more belongs to another rank: such a choice gets slot -1 and counts for no
// expert, and nothing else changes. For any other expert outside [0, E) the CPU twin throws std::out_of_range and
// leaves the outputs unspecified; the CUDA twin never throws because of a value, and treats such an expert as foreign.
// Neither accesses memory outside its buffers. No result depends on the number of threads. T * K must be below 2^31.
#pragma once

#include <cstdint>

#include "kernels/choice_counts.h"

namespace pymoe {

struct BuildRoutingArguments {
  const void* experts;   // (T, K) int32 or int64
  bool wide;             // experts are int64
  int32_t* slot;         // (T, K)
  int32_t* token;        // (S,), S = T * K
  int32_t* offsets;      // (E + 1,)
  int32_t* workspace;    // build_routing_workspace(...) values; content irrelevant
  int64_t tokens;        // T
  int64_t choices;       // K
  int64_t num_experts;   // E
  int64_t capacity;      // at least 0; T * K or more drops nothing
  bool foreign = false;  // true if experts of E or more are allowed, as those of other ranks
};

struct CountedRoutingArguments : BuildRoutingArguments {  // int32 experts, all in [0, E); no workspace
  ChoiceCounts counts;
  int32_t* load;  // (E,), written: the sums of the counts
};

namespace cpu {
int64_t build_routing_workspace(int64_t rows, int64_t num_experts);
void build_routing(const BuildRoutingArguments& arguments);
}  // namespace cpu

namespace cuda {
int64_t build_routing_workspace(int64_t rows, int64_t num_experts);
// Enqueues on `stream` (a cudaStream_t) and returns immediately: one launch for up to 49152 choices and 1406 experts,
// else two. Throws std::runtime_error if a launch is refused.
void build_routing(const BuildRoutingArguments& arguments, void* stream);
// Does the same as build_routing in one launch, for experts that the gate has chosen and counted.
void build_routing_counted(const CountedRoutingArguments& arguments, void* stream);
}  // namespace cuda

}  // namespace pymoe
