#include "cuda_ptx/history.h"

#include <algorithm>
#include <bit>

namespace pymoe::ptx {

// Returns true if all these accesses are ordered before `now`.
bool Accessors::before(const Moment& now) const {
  if (lanes == 0) return true;
  if (block != now.block) return false;
  if (in_block != (now.in_block & 0xffffff)) return true;
  if (warp != now.warp || warp == Moment::kSeveral) return false;
  for (uint32_t others = lanes & ~(1u << now.lane); others != 0; others &= others - 1) {
    if (in_warp >= now.known[std::countr_zero(others)]) return false;
  }
  return true;
}

// Lanes that no barrier orders among themselves share the latest one's `in_warp`. If a barrier covers only a part of a
// warp, this may be later than a lane's own: then the lane may be reported without need, but no conflict is missed.
void Accessors::join(const Moment& now) {
  const bool same_time = lanes != 0 && block == now.block && in_block == (now.in_block & 0xffffff);
  if (lanes != 0 && block != now.block) {
    block = kBlocks;
  } else if (!same_time || (warp == now.warp && in_warp != now.in_warp && before(now))) {
    block = now.block;
    in_block = now.in_block & 0xffffff;
    warp = now.warp & 0x7f;
    in_warp = now.in_warp;
    lanes = 1u << now.lane;
  } else if (warp != now.warp) {
    warp = Moment::kSeveral;
  } else {
    in_warp = now.in_warp;
    lanes |= 1u << now.lane;
  }
}

Conflict History::note(Purpose purpose, const Moment& now) {
  const bool reads = purpose == Purpose::kRead || purpose == Purpose::kConstantRead;
  const char* const access =
      reads ? "a read of" : (purpose == Purpose::kWrite ? "a write to" : "an atomic operation on");
  if (purpose == Purpose::kConstantRead && (writers.lanes != 0 || updaters.lanes != 0)) {
    return {"a read through the read-only cache of", "the same launch has written"};
  }
  if (!reads && readers.constant != 0) return {access, "the same launch has read through the read-only cache"};
  for (const Accessors* them : {&writers, &readers, &updaters}) {
    if (them == &readers && reads) continue;
    if (them == &updaters && purpose == Purpose::kUpdate) continue;
    if (them->before(now)) continue;
    if (them->block != now.block) return {access, "another block has read or written"};
    return {access, reads ? "another thread has written since the last barrier"
                          : "another thread has read or written since the last barrier"};
  }
  (reads ? readers : (purpose == Purpose::kWrite ? writers : updaters)).join(now);
  if (purpose == Purpose::kConstantRead) readers.constant = 1;
  return {};
}

std::array<History, 4>& Histories::split(History& word) {
  if (word.writers.warp != kSplit) {
    split_.push_back({word, word, word, word});
    word.writers.warp = kSplit;
    word.writers.lanes = static_cast<uint32_t>(split_.size() - 1);
  }
  return split_[word.writers.lanes];
}

Conflict Histories::note(size_t first, int bytes, Purpose purpose, const Moment& now) {
  for (size_t at = first, end = first + static_cast<size_t>(bytes); at < end;) {
    History& word = words_[at / 4];
    if (at % 4 == 0 && end - at >= 4 && word.writers.warp != kSplit) {
      if (const Conflict found = word.note(purpose, now); found.access != nullptr) return found;
      at += 4;
      continue;
    }
    auto& of_bytes = split(word);
    for (const size_t last = std::min(end, (at / 4 + 1) * 4); at < last; ++at) {
      if (const Conflict found = of_bytes[at % 4].note(purpose, now); found.access != nullptr) return found;
    }
  }
  return {};
}

bool Histories::written(size_t byte) const {
  const History& word = words_[byte / 4];
  const History& one = word.writers.warp == kSplit ? split_[word.writers.lanes][byte % 4] : word;
  return one.writers.lanes != 0 || one.updaters.lanes != 0;
}

}  // namespace pymoe::ptx
