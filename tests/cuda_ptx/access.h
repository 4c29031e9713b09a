// Finds the bytes at an address that a lane uses, and checks that the lane may access them.
#pragma once

#include "cuda_ptx/machine.h"

namespace pymoe::ptx {

enum class Space { kGlobal, kShared, kGeneric, kParameter };

// Throws Error if the access is misaligned, out of bounds, or not allowed at this time.
unsigned char* access(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int bytes, Space space,
                      Purpose purpose);

// Does the same for bytes of global memory that are read together.
void read_global(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int bytes);

// Returns address operand `number` of a lane.
inline uint64_t address_of(const Warp& warp, const Instruction& instruction, int lane, int number) {
  const uint64_t base = instruction.width[number] == 8 ? warp.at<uint64_t>(instruction.at[number])[lane]
                                                       : warp.at<uint32_t>(instruction.at[number])[lane];
  return base + static_cast<uint64_t>(instruction.offset);
}

// Does the same as for_lanes, and turns an Error into a Fault of the lane.
template <typename F>
inline void for_lanes_checked(uint32_t lanes, F&& f) {
  int lane = 0;
  try {
    for (; lanes != 0; lanes &= lanes - 1) {
      lane = std::countr_zero(lanes);
      f(lane);
    }
  } catch (const Error& error) {
    throw Fault{lane, error.what()};
  }
}

}  // namespace pymoe::ptx
