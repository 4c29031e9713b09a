// Checks the accesses of one launch to global memory: reads of memory that was never written, and conflicts
// (history.h).
//
// A page is examined when the launch first accesses it: a word that holds only kPoison has never been written, and
// becomes written byte by byte by the launch itself. (If another launch wrote only two bytes of a word, nothing is
// known about the other two: numbers of 16 bits may look like poison.)
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "cuda_ptx/history.h"
#include "cuda_ptx/memory.h"

namespace pymoe::ptx {

class LaunchMemory {
 public:
  static constexpr uint64_t kPage = 1024;
  // The number of pages that are checked for conflicts; each byte costs twelve for its history. If a launch accesses
  // more pages, like those of the design's full shapes, later pages are only checked for unwritten words.
  static constexpr size_t kMostPages = 16384;

  // The page that an instruction accessed last, which it is likely to access next.
  struct Recent {
    Stretch stretch;
    uint64_t number = 0;
    void* page = nullptr;  // of that number
  };

  // Checks and records an access to bytes of a stretch. If `written` is false, bytes that were never written are
  // allowed. Throws Error.
  void note(Recent& recent, uint64_t address, int bytes, Purpose purpose, const Moment& now, bool written);

 private:
  struct Page {
    Histories histories{kPage};
    std::array<bool, kPage / 4> unwritten;  // before the launch
  };
  Page* page_of(uint64_t number);
  static bool never_written(const Page* page, uint64_t address, const Stretch& stretch);
  void note_within(Recent& recent, uint64_t address, int bytes, Purpose purpose, const Moment& now, bool written);

  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
};

}  // namespace pymoe::ptx
