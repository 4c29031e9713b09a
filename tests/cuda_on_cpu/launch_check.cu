// Calls kernels/cuda/launch.h, compiled by nvcc, on the stub of the CUDA runtime (pretended_runtime.h).
#include <cstdio>
#include <stdexcept>
#include <string>

#include "kernels/cuda/launch.h"
#include "pretended_runtime.h"

namespace {

__global__ void kernel(int) {}

// Returns "started", or the message of the exception from launch().
std::string launch_with(int64_t shared_bytes) {
  const int before = pretended::launched;
  try {
    pymoe::cuda::launch("kernel", kernel, {1, 32, shared_bytes}, nullptr, 1);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return pretended::launched > before ? "started" : "lost";
}

}  // namespace

int main() {
  pretended::other_thread = [] { launch_with(60 << 10); };
  std::printf("beside a smaller launch: %s\n", launch_with(90 << 10).c_str());
  std::printf("launches: %d\n", pretended::launched);
  pretended::refuse_attribute = true;
  std::printf("refused: %s\n", launch_with(90 << 10).c_str());
  std::printf("after it: %s\n", launch_with(0).c_str());
  try {
    int counter;
    pymoe::cuda::clear("kernel", &counter, sizeof(counter), nullptr);
  } catch (const std::runtime_error&) {
  }
  std::printf("after a refused clear: %s\n", launch_with(0).c_str());
}
