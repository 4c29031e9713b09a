// What one launch does to global memory: reads of what was never written, and accesses that conflict (history.h).
//
// A page of it is looked at when the launch first touches it: a word that holds only kPoison has never been written,
// and becomes written byte by byte by the launch itself. (Of two bytes that another launch has left beside two that it
// wrote nothing is known: numbers of 16 bits may look like poison.)
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
  // What is watched for conflicts, as each byte costs twelve for its history. A launch that touches more, such as those
  // of the design's full shapes, has the pages that it touches later watched for unwritten words alone.
  static constexpr size_t kMostPages = 16384;

  // What an instruction has touched last, which it is likely to touch next.
  struct Recent {
    Stretch stretch;
    uint64_t number = 0;
    void* page = nullptr;  // of that number
  };

  // Checks and notes an access of bytes that a stretch holds. With `written` false they may never have been written.
  // Throws Error.
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
