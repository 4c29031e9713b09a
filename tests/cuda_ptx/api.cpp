// The interpreter's interface for Python (ctypes): runs a kernel of a PTX text on memory that the caller has
// registered.
#include <cstring>

#include "cuda_ptx/machine.h"

using namespace pymoe::ptx;

extern "C" {

void ptx_add_memory(const void* begin, int64_t bytes) { add_memory(begin, bytes); }
void ptx_remove_memory(const void* begin) { remove_memory(begin); }

// Runs `kernel` of the module `text`; returns 0, or 1 with a message in `error`.
int ptx_run(const char* text, const char* kernel, int64_t blocks, int threads, int64_t shared_bytes, int64_t cluster,
            bool more_shared, const void* arguments, int64_t argument_bytes, uint64_t seed, char* error,
            int64_t error_bytes) {
  try {
    auto kernels = parse_module(text);
    if (!kernels.contains(kernel)) throw Error("no kernel " + std::string(kernel));
    const Program program = decode(std::move(kernels.at(kernel)));
    const auto* const bytes = static_cast<const unsigned char*>(arguments);
    if (argument_bytes != program.kernel.parameter_bytes) {
      throw Error("expected arguments of " + std::to_string(program.kernel.parameter_bytes) + " bytes, got " +
                  std::to_string(argument_bytes));
    }
    run(program, {blocks, threads, shared_bytes, cluster, more_shared}, {bytes, bytes + argument_bytes}, seed);
    return 0;
  } catch (const std::exception& caught) {
    std::strncpy(error, caught.what(), static_cast<size_t>(error_bytes) - 1);
    error[error_bytes - 1] = 0;
    return 1;
  }
}
}
