// Fingerprints of memory: if two differ, the memory was written to in between.
//
// Memory of up to kWholeBytes is read completely, and larger memory if the caller asks for it. Otherwise kLines lines
// of 64 bytes are read, among them the first and the last. The other lines are spread evenly and move from round to
// round, so that every line is read within 2 n rounds if one of n lines is read in a round. Two fingerprints of one
// round read the same lines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pymoe::runtime {

inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kLines = 32;
inline constexpr size_t kWholeBytes = 2 * kLines * kLineBytes;

// Returns the fingerprint of `bytes` bytes. `round` chooses the lines that are read, and `whole` means all of them. A
// change of a single 8-byte word that is read changes the fingerprint; other changes of what is read do so except with
// a chance of 2^-64.
uint64_t fingerprint(const unsigned char* memory, size_t bytes, uint64_t round, bool whole);

}  // namespace pymoe::runtime
