// Fingerprints of memory: if two fingerprints of the same round differ, the memory was written to in between.
//
// Memory of up to kWholeBytes bytes is read completely, as is larger memory if the caller asks for it. Otherwise kLines
// lines of 64 bytes are read: the first, the last (it ends with the memory, and may be shorter), and one line of each
// of kLines - 2 nearly equal parts of the full lines after the first. The round selects the lines of the parts: two
// fingerprints of the same round read the same lines, and any 2 n successive rounds read every line of a part of n
// lines. If all lines are full, the last one may be read twice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pymoe::runtime {

inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kLines = 32;
inline constexpr size_t kWholeBytes = 2 * kLines * kLineBytes;

// Returns the fingerprint of `bytes` bytes at `memory`. `round` selects the lines that are read; with `whole`, all are
// read. If a single 8-byte word that is read once changes, the fingerprint changes; in all other cases it stays the
// same with a probability of about 2^-64.
uint64_t fingerprint(const unsigned char* memory, size_t bytes, uint64_t round, bool whole);

}  // namespace pymoe::runtime
