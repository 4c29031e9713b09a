// The runtime for callers in Python (ctypes).
#include <cstring>

#include "cuda_ptx/runtime.h"

#define PYMOE_EXPORT extern "C" __attribute__((visibility("default")))

PYMOE_EXPORT void pymoe_ptx_set_seed(uint64_t seed) { pymoe::ptx::set_seed(seed); }

// Counts launches of kernels with `part` in their names, or all launches for "".
PYMOE_EXPORT int64_t pymoe_ptx_launches(const char* part) {
  int64_t count = 0;
  for (const auto& [name, times] : pymoe::ptx::launches()) {
    if (name.find(part) != std::string::npos) count += times;
  }
  return count;
}

PYMOE_EXPORT int64_t pymoe_ptx_executed() { return pymoe::ptx::executed(); }

// The text is valid until the next call.
PYMOE_EXPORT const char* pymoe_ptx_module(const char* part) {
  static std::string text;
  text = pymoe::ptx::module_with(part);
  return text.c_str();
}

PYMOE_EXPORT void pymoe_ptx_replace(const char* text, const char* other) { pymoe::ptx::replace_module(text, other); }

// "COUNT KERNEL" in a line for each kernel of the library; valid until the next call.
PYMOE_EXPORT const char* pymoe_ptx_counts() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : pymoe::ptx::launches()) text += std::to_string(count) + " " + name + "\n";
  return text.c_str();
}
