#include <stdexcept>
#include <string>

namespace pymoe::cuda {

// As kernels/cuda/launch.h declares it, which needs CUDA's headers.
[[noreturn]] void refuse_launch(const char* operator_name, const char* why) {
  throw std::runtime_error(std::string(operator_name) + ": " + why);
}

}  // namespace pymoe::cuda
