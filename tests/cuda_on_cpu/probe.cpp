// Operators that only the emulated library has: they return the kernels that the emulator has run, and how often.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>

#include "cuda_on_cpu/emulator.h"

namespace {

// Returns the number of launches of the kernel `name`, or of all kernels for "".
int64_t launches(std::string name) {
  int64_t count = 0;
  for (const auto& [launched, times] : pymoe::emulator::launches()) {
    if (name.empty() || launched == name) count += times;
  }
  return count;
}

// Returns the names of all launches and memsets from number `first` on, one per line, in order.
std::string history(int64_t first) {
  std::string lines;
  const auto& names = pymoe::emulator::history();
  for (size_t i = static_cast<size_t>(first); i < names.size(); ++i) lines += names[i] + "\n";
  return lines;
}

STABLE_TORCH_LIBRARY(pymoe_emulator, library) {
  library.def("launches(str name) -> int");
  library.def("history(int first) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(pymoe_emulator, CompositeExplicitAutograd, library) {
  library.impl("launches", TORCH_BOX(&launches));
  library.impl("history", TORCH_BOX(&history));
}

}  // namespace
