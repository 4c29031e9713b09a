#include "cuda_ptx/memory.h"

#include <map>
#include <mutex>

namespace pymoe::ptx {
namespace {

struct Known {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> ends;  // by begin
};

// Never destroyed: memory is freed until the process ends.
Known& known() {
  static Known& all = *new Known;
  return all;
}

}  // namespace

void add_memory(const void* begin, int64_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(known().mutex);
  const auto address = reinterpret_cast<uint64_t>(begin);
  known().ends[address] = address + static_cast<uint64_t>(bytes);
}

void remove_memory(const void* begin) {
  const std::lock_guard lock(known().mutex);
  known().ends.erase(reinterpret_cast<uint64_t>(begin));
}

Stretch find_memory(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(known().mutex);
  auto next = known().ends.upper_bound(address);
  if (next == known().ends.begin()) return {};
  --next;
  const Stretch found{next->first, next->second};
  return found.holds(address, bytes) ? found : Stretch{};
}

}  // namespace pymoe::ptx
