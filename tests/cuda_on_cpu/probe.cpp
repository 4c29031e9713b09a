// An operator of the emulated library alone: how often the emulator has run a kernel.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>

#include "cuda_on_cpu/emulator.h"

namespace {

// Of the kernel that was launched under `name`; of all for "".
int64_t launches(std::string name) {
  int64_t count = 0;
  for (const auto& [launched, times] : pymoe::emulator::launches()) {
    if (name.empty() || launched == name) count += times;
  }
  return count;
}

STABLE_TORCH_LIBRARY(pymoe_emulator, library) { library.def("launches(str name) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(pymoe_emulator, CompositeExplicitAutograd, library) {
  library.impl("launches", TORCH_BOX(&launches));
}

}  // namespace
