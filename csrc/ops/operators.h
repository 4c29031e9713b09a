// Functions of operators, for use by other operators: each checks its arguments, allocates its result and runs the twin
// for the device of its tensors, as operators do. Functions with an argument `used`, a tensor that is no longer needed
// and is not one of the other arguments, may put their result in its memory (empty_in).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "kernels/choice_counts.h"

namespace pymoe::ops {

using torch::stable::Tensor;

namespace gate_topk_op {
// The gate's choice. If `counts` has tiles, `memory` contains the counts, and `load` is not written before
// build_routing_of.
struct Chosen {
  Tensor weights, experts, load;
  ChoiceCounts counts{};
  std::optional<Tensor> memory{};
};

// Returns the gate's choice. With `counted`, the twin also counts the choices for build_routing, if it can.
Chosen choose(const Tensor& logits, const std::optional<Tensor>& bias, int64_t k, const std::string& score,
              bool renormalize, int64_t num_groups, int64_t topk_groups, double scale, bool counted);
}  // namespace gate_topk_op

namespace build_routing_op {
// Returns (slot, token, offsets).
std::tuple<Tensor, Tensor, Tensor> build_routing(const Tensor& experts, int64_t num_experts,
                                                 std::optional<int64_t> capacity, bool foreign);
// Returns (slot, token, offsets) for the gate's choice. Also computes the load, if the gate did not.
std::tuple<Tensor, Tensor, Tensor> build_routing_of(const gate_topk_op::Chosen& chosen,
                                                    std::optional<int64_t> capacity);
}  // namespace build_routing_op

namespace dispatch_op {
// `rows`: the number of rows of the result, S; one per choice by default.
Tensor dispatch(const Tensor& x, const Tensor& slot, const Tensor& offsets, std::optional<int64_t> rows = std::nullopt);
}  // namespace dispatch_op

namespace grouped_linear_op {
Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& order = std::nullopt, const Tensor* used = nullptr,
                      bool whole = false);

// Returns true if torch's grouped product multiplies bf16 rows on this CUDA device. Layers then leave the biases, which
// that product does not add, to expert_activation and combine. False if there is no such device.
bool torch_multiplies(int64_t device);
}  // namespace grouped_linear_op

namespace quantized_linear_op {
// Without offsets, all rows go to a single expert, and x is (..., H).
Tensor quantized_linear(const Tensor& x, const Tensor& packed, const Tensor* offsets, const std::optional<Tensor>& bias,
                        int64_t format, int64_t output_features, const Tensor* used = nullptr);
}  // namespace quantized_linear_op

namespace expert_activation_op {
Tensor expert_activation(const Tensor& h, int64_t kind, double limit, double alpha, double up_offset, bool interleaved,
                         const std::optional<Tensor>& bias = std::nullopt,
                         const std::optional<Tensor>& offsets = std::nullopt, const Tensor* used = nullptr);
}

namespace combine_op {
Tensor combine(const Tensor& y, const Tensor& slot, std::optional<Tensor> weights,
               const std::optional<Tensor>& bias = std::nullopt, const std::optional<Tensor>& offsets = std::nullopt);
}

}  // namespace pymoe::ops
