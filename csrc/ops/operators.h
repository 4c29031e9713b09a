// The functions of operators of which another operator is made: each checks its arguments, allocates its result and
// runs the twin of its device, as the operator of the same name does. Those that take `used`, a tensor that nobody
// needs any more and that is none of the others, may put their result in its memory (empty_in).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace pymoe::ops {

using torch::stable::Tensor;

namespace build_routing_op {
// (slot, token, offsets)
std::tuple<Tensor, Tensor, Tensor> build_routing(const Tensor& experts, int64_t num_experts,
                                                 std::optional<int64_t> capacity, bool foreign);
}  // namespace build_routing_op

namespace dispatch_op {
// `rows`: S of the result; one for each choice if not given.
Tensor dispatch(const Tensor& x, const Tensor& slot, const Tensor& offsets, std::optional<int64_t> rows = std::nullopt);
}  // namespace dispatch_op

namespace grouped_linear_op {
Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& order = std::nullopt, const Tensor* used = nullptr,
                      bool whole = false);
}

namespace quantized_linear_op {
Tensor quantized_linear(const Tensor& x, const Tensor& packed, const Tensor& offsets, const std::optional<Tensor>& bias,
                        int64_t bits, int64_t output_features, const Tensor* used = nullptr);
}

namespace expert_activation_op {
Tensor expert_activation(const Tensor& h, int64_t kind, double limit, double alpha, double up_offset, bool interleaved,
                         const Tensor* used = nullptr);
}

namespace combine_op {
Tensor combine(const Tensor& y, const Tensor& slot, std::optional<Tensor> weights);
}

}  // namespace pymoe::ops
