#include "runtime/fingerprint.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"

namespace pymoe::bindings {
namespace {

constexpr size_t kLongBytes = 1 << 20;  // reading more takes longer than releasing the GIL

struct Span {
  const unsigned char* memory;
  size_t bytes;
};

// Clips a range of memory to the tensor's allocation, since another thread may have replaced the allocation meanwhile.
Span within(uintptr_t begin, size_t bytes, uintptr_t allocation, size_t allocated) {
  if (allocation == 0 || begin < allocation || begin - allocation >= allocated) return {nullptr, 0};
  return {reinterpret_cast<const unsigned char*>(begin), std::min(bytes, allocated - (begin - allocation))};
}

std::vector<uint64_t> fingerprints(const std::vector<uintptr_t>& addresses, const std::vector<size_t>& bytes,
                                   const std::vector<uintptr_t>& allocations, const std::vector<size_t>& allocated,
                                   uint64_t round, bool whole) {
  const size_t count = addresses.size();
  if (bytes.size() != count || allocations.size() != count || allocated.size() != count) {
    throw std::invalid_argument("memory_fingerprints: expected four lists of one length");
  }
  std::vector<uint64_t> found(count);
  size_t total = 0;
  const auto read = [&] {
    for (size_t i = 0; i < count; ++i) {
      const Span span = within(addresses[i], bytes[i], allocations[i], allocated[i]);
      found[i] = runtime::fingerprint(span.memory, span.bytes, round, whole);
    }
  };
  for (const size_t size : bytes) total += size;
  if (whole && total > kLongBytes) {
    const WithoutGil released;
    read();
  } else {
    read();
  }
  return found;
}

}  // namespace

void bind_fingerprints(py::module_& module) {
  module.def(
      "memory_fingerprints", fingerprints, py::arg("addresses"), py::arg("bytes"), py::arg("allocations"),
      py::arg("allocated"), py::arg("round"), py::arg("whole"),
      R"(Return for each piece of memory a number that differs if it was written to: see csrc/runtime/fingerprint.h.

A piece that is not within its allocation (an address and a size) counts as empty. Allocations must not be freed
meanwhile. Calls of one ``round`` read the same lines; ``whole``: read everything.)");
}

}  // namespace pymoe::bindings
