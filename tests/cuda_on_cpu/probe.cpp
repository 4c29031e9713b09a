// Operators that only the emulated library has: they return the kernels that the emulator has run and how often, and
// set the GPU and the version of torch that the library finds.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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

uint64_t torch_version = TORCH_ABI_VERSION;

// `compute_capability` is 90 for 9.0; 0, 0 means the version of the installed torch.
void pretend(int64_t compute_capability, int64_t torch_major, int64_t torch_minor) {
  pymoe::emulator::set_compute_capability(static_cast<int>(compute_capability));
  torch_version = torch_major == 0
                      ? TORCH_ABI_VERSION
                      : static_cast<uint64_t>(torch_major) << 56 | static_cast<uint64_t>(torch_minor) << 48;
}

STABLE_TORCH_LIBRARY(pymoe_emulator, library) {
  library.def("launches(str name) -> int");
  library.def("history(int first) -> str");
  library.def("pretend(int compute_capability, int torch_major, int torch_minor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pymoe_emulator, CompositeExplicitAutograd, library) {
  library.impl("launches", TORCH_BOX(&launches));
  library.impl("history", TORCH_BOX(&history));
  library.impl("pretend", TORCH_BOX(&pretend));
}

}  // namespace

// Replaces torch's own function, only in this library.
uint64_t aoti_torch_abi_version() { return torch_version; }
