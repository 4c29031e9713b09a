#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "guarded.h"
#include "runtime/fingerprint.h"

using namespace pymoe::runtime;

namespace {

using Bytes = std::vector<unsigned char>;

Bytes some(size_t bytes) {
  Bytes memory(bytes);
  for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<unsigned char>(i * 37 + i / 251);
  return memory;
}

}  // namespace

TEST_CASE("every bit of small memory, and of any that is read whole, counts") {
  for (size_t bytes : {1, 7, 8, 63, 64, 65, 200, 1000, 20000}) {
    Bytes memory = some(bytes);
    const bool whole = bytes > kWholeBytes;
    const uint64_t before = fingerprint(memory.data(), bytes, 3, whole);
    for (size_t byte = 0; byte < bytes; byte += bytes > 1000 ? 13 : 1) {
      for (int bit = 0; bit < 8; ++bit) {
        memory[byte] ^= 1 << bit;
        REQUIRE(fingerprint(memory.data(), bytes, 3, whole) != before);
        memory[byte] ^= 1 << bit;
      }
    }
    CHECK(fingerprint(memory.data(), bytes, 3, whole) == before);
    CHECK(fingerprint(memory.data(), bytes - 1, 3, whole) != before);
  }
}

TEST_CASE("words that change their places, and constants, change it") {
  Bytes memory = some(4096);
  const uint64_t before = fingerprint(memory.data(), memory.size(), 0, false);
  for (size_t other : {8, 32, 64, 2048}) {
    for (size_t byte = 0; byte < 8; ++byte) std::swap(memory[byte], memory[other + byte]);
    CHECK(fingerprint(memory.data(), memory.size(), 0, false) != before);
    for (size_t byte = 0; byte < 8; ++byte) std::swap(memory[byte], memory[other + byte]);
  }
  std::set<uint64_t> found;
  for (int value = 0; value < 256; ++value) {
    const Bytes constant(4096, static_cast<unsigned char>(value));
    found.insert(fingerprint(constant.data(), constant.size(), 0, false));
  }
  CHECK(found.size() == 256);
}

TEST_CASE("of large memory the first and the last bytes count in every round, and everything in some round") {
  for (size_t bytes : {kWholeBytes + 1, size_t{100000}, size_t{1} << 20}) {
    Bytes memory = some(bytes);
    const size_t lines = bytes / kLineBytes, rounds = 2 * lines / (kLines - 2) + 2;
    std::vector<uint64_t> before;
    for (uint64_t round = 0; round < rounds; ++round) {
      before.push_back(fingerprint(memory.data(), bytes, round, false));
      for (size_t byte : {size_t{0}, size_t{63}, bytes - 1}) {
        memory[byte] ^= 1;
        REQUIRE(fingerprint(memory.data(), bytes, round, false) != before.back());
        memory[byte] ^= 1;
      }
    }
    for (size_t line = 0; line < lines; line += lines > 4000 ? 17 : 1) {
      memory[line * kLineBytes + 5] ^= 1;
      bool seen = false;
      for (uint64_t round = 0; round < rounds && !seen; ++round) {
        seen = fingerprint(memory.data(), bytes, round, false) != before[round];
      }
      REQUIRE(seen);
      memory[line * kLineBytes + 5] ^= 1;
    }
  }
}

TEST_CASE("a write to all of it is seen in every round") {
  Bytes memory = some(1 << 20);
  for (uint64_t round : {uint64_t{0}, uint64_t{1}, uint64_t{77}, ~uint64_t{0}}) {
    const uint64_t before = fingerprint(memory.data(), memory.size(), round, false);
    for (unsigned char& byte : memory) byte ^= 0x10;
    CHECK(fingerprint(memory.data(), memory.size(), round, false) != before);
  }
}

TEST_CASE("not a byte is read outside of it") {
  for (const bool at_end : {false, true}) {
    for (size_t bytes : {size_t{1}, size_t{65}, kWholeBytes, kWholeBytes + 1, kWholeBytes + 64, size_t{100001}}) {
      const pymoe::test::Guarded<unsigned char> memory(static_cast<int64_t>(bytes), at_end);
      for (uint64_t round = 0; round < 100; ++round) {
        CHECK(fingerprint(memory.data(), bytes, round, false) == fingerprint(memory.data(), bytes, round, false));
      }
      fingerprint(memory.data(), bytes, 0, true);
    }
  }
}

TEST_CASE("nothing is read where there is nothing") {
  CHECK(fingerprint(nullptr, 0, 5, true) == fingerprint(nullptr, 0, 6, false));
}
