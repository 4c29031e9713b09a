#include "cuda_ptx/streams.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#define PYMOE_EXPORT extern "C" __attribute__((visibility("default")))

namespace pymoe::ptx {
namespace {

int (*current_device)() = [] { return 0; };
std::string record;
int refuses_in = -1;                  // so many pieces of work
std::optional<std::string> captured;  // the stream of a capture
std::vector<std::function<void()>> graph;

// A stream other than the default one belongs to a device (cuda_device.cpp), and the default one to the current device.
std::string name_of(int device, int64_t stream) { return std::to_string(device) + " " + std::to_string(stream); }

}  // namespace

std::string issue(const std::string& what, void* stream, std::function<void()> work) {
  const auto handle = reinterpret_cast<int64_t>(stream);
  const int device = current_device();
  if (handle != 0 && handle >> 16 != device + 1) return "a stream of another device than the current one";
  if (refuses_in >= 0 && refuses_in-- == 0) return "refused on purpose";
  const std::string name = name_of(device, handle & 0xffff);
  record += name + " " + what + "\n";
  if (!captured) {
    work();
  } else if (*captured != name) {
    return "work for another stream than the one that is captured";
  } else {
    graph.push_back(std::move(work));
  }
  return {};
}

}  // namespace pymoe::ptx

using namespace pymoe::ptx;

PYMOE_EXPORT void pymoe_ptx_ask_device(int (*ask)()) { current_device = ask; }
// After `accepted` more pieces of work, the next one is refused.
PYMOE_EXPORT void pymoe_ptx_refuse_after(int accepted) { refuses_in = accepted; }

// "DEVICE STREAM WORK" in a line for each piece of work since the last call; valid until the next one.
PYMOE_EXPORT const char* pymoe_ptx_record() {
  static std::string taken;
  taken = std::exchange(record, {});
  return taken.c_str();
}

PYMOE_EXPORT void pymoe_ptx_begin_capture(int device, int64_t stream) {
  graph.clear();
  captured = name_of(device, stream);
}
PYMOE_EXPORT void pymoe_ptx_end_capture() { captured.reset(); }
PYMOE_EXPORT void pymoe_ptx_replay() {
  for (const auto& work : graph) work();
}
