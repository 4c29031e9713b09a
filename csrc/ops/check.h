// Guards of the operator layer. Python has already checked the caller's arguments against the contract
// (pymoe/_common/checks.py), with its own errors. These guards keep memory safe if someone calls a raw operator.
//
// In Python, std::invalid_argument becomes ValueError (ops/twins.h) and std::out_of_range becomes IndexError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/dtype.h"
#include "core/expert_of_row.h"
#include "core/score.h"
#include "kernels/quantized_weight.h"

namespace pymoe::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + ")";
}

// Returns the text of a part of an error message. A tensor is shown as its shape, which is formatted only on failure.
inline std::string printable(const Tensor& tensor) { return shape_of(tensor); }
template <typename Part>
const Part& printable(const Part& part) {
  return part;
}

template <typename... Parts>
[[noreturn]] void fail(const char* operator_name, const Parts&... parts) {
  std::ostringstream message;
  message << operator_name << ": ";
  (message << ... << printable(parts));
  throw std::invalid_argument(message.str());
}

template <typename... Parts>
void require(bool condition, const char* operator_name, const Parts&... parts) {
  if (!condition) fail(operator_name, parts...);
}

// Throws unless the tensor has exactly these sizes (-1 allows any size) and is contiguous.
inline void require_shape(const char* operator_name, const char* argument, const Tensor& tensor,
                          std::initializer_list<int64_t> sizes) {
  bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
  int64_t i = 0;
  if (same) {
    for (const int64_t size : sizes) {
      if (size != -1 && tensor.size(i) != size) same = false;
      ++i;
    }
  }
  if (!same) {
    std::string expected = "(";
    for (const int64_t size : sizes) {
      expected += (expected.size() > 1 ? ", " : "") + (size == -1 ? std::string("*") : std::to_string(size));
    }
    fail(operator_name, argument, " must have shape ", expected, "), got ", shape_of(tensor));
  }
  require(tensor.is_contiguous(), operator_name, argument, " must be contiguous");
}

inline void require_dtype(const char* operator_name, const char* argument, const Tensor& tensor, ScalarType expected) {
  require(tensor.scalar_type() == expected, operator_name, argument, " must have dtype ",
          torch::headeronly::toString(expected), ", got ", torch::headeronly::toString(tensor.scalar_type()));
}

inline void require_same_device(const char* operator_name, const char* argument, const Tensor& tensor,
                                const Tensor& other) {
  require(tensor.device() == other.device(), operator_name, argument, " is on another device");
}

// Throws unless `tensor` has this dtype and shape and is on the device of `like`.
inline void require_tensor(const char* operator_name, const char* argument, const Tensor& tensor, ScalarType dtype,
                           std::initializer_list<int64_t> sizes, const Tensor& like) {
  require_dtype(operator_name, argument, tensor, dtype);
  require_shape(operator_name, argument, tensor, sizes);
  require_same_device(operator_name, argument, tensor, like);
}

// Checks that two contiguous tensors do not overlap: otherwise a kernel's threads would read values that other threads
// have overwritten.
inline void require_apart(const char* operator_name, const char* written_name, const Tensor& written,
                          const char* read_name, const Tensor& read) {
  const auto range = [](const Tensor& tensor) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return std::pair(begin, begin + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size());
  };
  if (written.numel() == 0 || read.numel() == 0) return;
  const auto [begin, end] = range(written);
  const auto [read_begin, read_end] = range(read);
  require(end <= read_begin || read_end <= begin, operator_name, written_name, " must not overlap ", read_name,
          " in memory");
}

// Returns the E + 1 offsets of experts' rows, after checking their tensor.
inline const int32_t* checked_offsets(const char* operator_name, const Tensor& offsets, const Tensor& like) {
  require_tensor(operator_name, "offsets", offsets, ScalarType::Int, {-1}, like);
  require(offsets.size(0) >= 1, operator_name, "offsets must have E + 1 entries, got none");
  return static_cast<const int32_t*>(offsets.const_data_ptr());
}

// Checks `bias` and `offsets`, and returns both for an operator that adds biases to rows of N = `features` elements;
// returns an ExpertBiases without data if there is no `bias`. `bias` must be (E, N), in the dtype of `like`.
inline ExpertBiases checked_biases(const char* operator_name, const std::optional<Tensor>& bias,
                                   const std::optional<Tensor>& offsets, int64_t features, const Tensor& like) {
  if (!bias) return {};
  require(offsets.has_value(), operator_name, "offsets must be given with bias");
  const int32_t* bounds = checked_offsets(operator_name, *offsets, like);
  const int64_t experts = offsets->size(0) - 1;
  require_tensor(operator_name, "bias", *bias, like.scalar_type(), {experts, features}, like);
  return {bias->const_data_ptr(), bounds, experts};
}

inline DType floating_dtype(const char* operator_name, const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default: break;
  }
  fail(operator_name, argument, " must have dtype float32, float64, bfloat16 or float16, got ",
       torch::headeronly::toString(tensor.scalar_type()));
}

inline WeightFormat weight_format(const char* operator_name, int64_t number) {
  require(number == 8 || number == 4 || number == 14 || number == 18 || number == 28 || number == 24 || number == 22 ||
              number == 38,
          operator_name, "format must be 8, 4, 14, 18, 28, 24, 22 or 38, got ", number);
  return static_cast<WeightFormat>(number);
}

inline Score score_named(const char* operator_name, const std::string& name) {
  require(name == "softmax" || name == "sigmoid", operator_name, "score must be one of 'softmax', 'sigmoid', got '",
          name, "'");
  return name == "softmax" ? Score::kSoftmax : Score::kSigmoid;
}

// Returns the dtype in which sums over `dtype` are kept and returned: float64 for float64, else float32.
inline ScalarType accumulate_scalar_type(DType dtype) {
  return dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

}  // namespace pymoe::ops
