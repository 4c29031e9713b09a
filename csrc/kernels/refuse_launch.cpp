#include <stdexcept>
#include <string>

namespace pymoe::cuda {

// Declared in kernels/cuda/launch.h, which needs CUDA's headers.
[[noreturn]] void refuse_launch(const char* operator_name, const char* why) {
  throw std::runtime_error(std::string(operator_name) + ": " + why);
}

}  // namespace pymoe::cuda
