#include <stdexcept>
#include <string>

#include "kernels/cuda/refuse.h"

namespace pymoe::cuda {

void refuse_launch(const char* operator_name, const char* why) {
  throw std::runtime_error(std::string(operator_name) + ": " + why);
}

}  // namespace pymoe::cuda
