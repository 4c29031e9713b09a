// How a kernel file reports what the launch of a kernel refused. Apart, because <string> and <stdexcept> alone take
// half of the time in which nvcc, which reads a file four times, compiles a small kernel file.
#pragma once

namespace pymoe::cuda {

// Throws std::runtime_error("OPERATOR: WHY").
[[noreturn]] void refuse_launch(const char* operator_name, const char* why);

}  // namespace pymoe::cuda
