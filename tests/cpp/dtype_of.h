// Maps an element type to its dtype tag: the inverse of visit_dtype in core/dtype.h.
#pragma once

#include <type_traits>

#include "core/dtype.h"

namespace pymoe::test {

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<T, BFloat16>) return DType::kBFloat16;
  if constexpr (std::is_same_v<T, Float16>) return DType::kFloat16;
  return DType::kFloat32;
}

}  // namespace pymoe::test
