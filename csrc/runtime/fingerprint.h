// Fingerprints of memory: two that differ tell that somebody has written there in between.
//
// Memory of up to kWholeBytes is read completely, and so is any other where the caller asks for it. Of more, kLines
// lines of 64 bytes are read, the first and the last among them. The others are spread evenly and move from round to
// round, so that every line is read within twice as many rounds as there are lines for each of them. Two fingerprints
// of one round read the same lines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pymoe::runtime {

inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kLines = 32;
inline constexpr size_t kWholeBytes = 2 * kLines * kLineBytes;

// A change of a single 8-byte word that is read changes the fingerprint; other changes do but for one in 2^64.
uint64_t fingerprint(const unsigned char* memory, size_t bytes, uint64_t round, bool whole);

}  // namespace pymoe::runtime
