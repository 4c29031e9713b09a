#include "cuda_ptx/launch_memory.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cuda_ptx/module.h"

namespace pymoe::ptx {
namespace {

bool holds_poison(uint64_t word) {
  uint32_t found;
  std::memcpy(&found, reinterpret_cast<const void*>(word), 4);
  return found == kPoisonWord;
}

std::string place(uint64_t address, const Stretch& stretch) {
  return ", at byte " + std::to_string(address - stretch.begin) + " of " + std::to_string(stretch.end - stretch.begin);
}

}  // namespace

void LaunchMemory::note(Recent& recent, uint64_t address, int bytes, Purpose purpose, const Moment& now, bool written) {
  const auto here = static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(bytes), kPage - address % kPage));
  note_within(recent, address, here, purpose, now, written);
  if (here < bytes) {
    note_within(recent, address + static_cast<uint64_t>(here), bytes - here, purpose, now, written);
  }
}

LaunchMemory::Page* LaunchMemory::page_of(uint64_t number) {
  if (const auto known = pages_.find(number); known != pages_.end()) return known->second.get();
  if (pages_.size() >= kMostPages) return nullptr;
  auto page = std::make_unique<Page>();
  for (uint64_t i = 0; i < kPage / 4; ++i) page->unwritten[i] = holds_poison(number * kPage + 4 * i);
  return (pages_[number] = std::move(page)).get();
}

// Nothing is known about a word that belongs only in part to the stretch.
bool LaunchMemory::never_written(const Page* page, uint64_t address, const Stretch& stretch) {
  const uint64_t word = address & ~uint64_t{3};
  if (!stretch.holds(word, 4)) return false;
  if (page == nullptr) return holds_poison(word);
  return page->unwritten[word % kPage / 4] && !page->histories.written(address % kPage);
}

void LaunchMemory::note_within(Recent& recent, uint64_t address, int bytes, Purpose purpose, const Moment& now,
                               bool written) {
  if (recent.page == nullptr || recent.number != address / kPage) {
    recent.number = address / kPage;
    recent.page = page_of(recent.number);
  }
  auto* const page = static_cast<Page*>(recent.page);
  for (uint64_t at = address; written && at < address + static_cast<uint64_t>(bytes); ++at) {
    if (never_written(page, at, recent.stretch)) {
      throw Error("a read of global memory that was never written" + place(at, recent.stretch));
    }
  }
  if (page == nullptr) return;
  const Conflict found = page->histories.note(address % kPage, bytes, purpose, now);
  if (found.access != nullptr) throw Error(found.in("global memory") + place(address, recent.stretch));
}

}  // namespace pymoe::ptx
