#include "runtime/fingerprint.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pymoe::runtime {
namespace {

constexpr size_t kLanes = 4;                        // independent multiplications, which hide each other's latency
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;       // 2^64 divided by the golden ratio
constexpr uint64_t kOtherOdd = 0xC2B2AE3D27D4EB4F;  // a prime

// For a given word this is a bijection of the state, and for a given state a bijection of the word. So a change of a
// single word that is read once always changes the result.
uint64_t mix(uint64_t state, uint64_t word) { return std::rotl(state ^ (word * kOtherOdd), 29) * kOdd; }

struct Lanes {
  uint64_t lane[kLanes] = {1, 2, 3, 4};

  void add(const unsigned char* line) {
    uint64_t words[kLineBytes / 8];
    std::memcpy(words, line, kLineBytes);
    for (size_t word = 0; word < kLineBytes / 8; ++word) lane[word % kLanes] = mix(lane[word % kLanes], words[word]);
  }
};

// Returns the index of the line, among `count` lines, that is read in a round. The fractional parts of multiples of the
// golden ratio are spread evenly: no gap is much wider than the others.
size_t place_in_part(uint64_t round, size_t count) {
  const uint64_t fraction = (round * kOdd) >> 32;
  return static_cast<size_t>((fraction * count) >> 32);
}

}  // namespace

uint64_t fingerprint(const unsigned char* memory, size_t bytes, uint64_t round, bool whole) {
  Lanes lanes;
  const size_t full = bytes / kLineBytes, rest = bytes % kLineBytes;
  if (whole || bytes <= kWholeBytes) {
    for (size_t line = 0; line < full; ++line) lanes.add(memory + line * kLineBytes);
  } else {
    const unsigned char* lines[kLines - 1] = {memory};  // prefetched together, since most are not in a cache
    constexpr size_t kParts = kLines - 2;
    for (size_t part = 0; part < kParts; ++part) {
      const size_t begin = 1 + part * (full - 1) / kParts, end = 1 + (part + 1) * (full - 1) / kParts;
      lines[1 + part] = memory + (begin + place_in_part(round, end - begin)) * kLineBytes;
      __builtin_prefetch(lines[1 + part]);
    }
    for (const unsigned char* line : lines) lanes.add(line);
  }
  unsigned char last[kLineBytes] = {};
  const size_t tail = rest != 0 ? rest : std::min(bytes, kLineBytes);
  if (tail != 0) std::memcpy(last, memory + bytes - tail, tail);
  lanes.add(last);
  uint64_t state = mix(bytes, 0);
  for (const uint64_t lane : lanes.lane) state = mix(state, lane);
  return state ^ (state >> 32);
}

}  // namespace pymoe::runtime
