// Tests tensors of more than 2^31 elements, in memory that is used only at a few places: only the first and the last
// blocks of each grid run. The interpreter checks every address that these blocks use, and their values must equal
// those of the CPU twin, which gets only the last rows.
#include "cuda_on_cpu/harness.h"
#include "cuda_ptx/runtime.h"
#include "kernels/expert_activation.h"
#include "kernels/gate_topk.h"
#include "kernels/grouped_linear.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

constexpr int64_t kFar = int64_t{1} << 31;

// While such an object lives, launches run only this many blocks at each end of their grids.
struct EndsAlone {
  explicit EndsAlone(int64_t blocks) { ptx::set_ends(blocks); }
  ~EndsAlone() { ptx::set_ends(0); }
};

// A matrix of `rows` x `columns` that is zero except for its last rows, which are copied from and to a separate matrix.
template <typename T>
struct Far {
  int64_t rows, columns;
  SparseMemory memory;

  Far(int64_t rows_, int64_t columns_)
      : rows(rows_), columns(columns_), memory(rows_ * columns_ * static_cast<int64_t>(sizeof(T))) {}
  T* data() const { return static_cast<T*>(memory.data()); }
  T* last(int64_t count) const { return data() + (rows - count) * columns; }
  void end_with(Buffer<T>& near) { std::copy(near.begin(), near.end(), data() + rows * columns - near.size()); }
  bool ends_with(const Buffer<T>& near) const {
    return memcmp(data() + rows * columns - near.size(), near.data(), static_cast<size_t>(near.size()) * sizeof(T)) ==
           0;
  }
};

template <typename T>
void fill_small(Buffer<T>& buffer, Random& random) {
  for (T& value : buffer) value = round_to<T>(static_cast<float>(random.between(-2, 2)));
}

void check_gate(int64_t experts, bool biased) {
  constexpr int64_t kLast = 40, kChoices = 4;
  const int64_t tokens = kFar / experts + 77;
  Random random(1);
  Buffer<float> near(kLast * experts), bias(experts), near_weights(kLast * kChoices), near_grad(kLast * kChoices);
  Buffer<float> expected(near.size());
  Buffer<int32_t> near_experts(kLast * kChoices), load(experts), near_load(experts);
  fill(near, random);
  fill(bias, random);
  fill(near_grad, random);
  GateTopkArguments a{DType::kFloat32,
                      near.data(),
                      biased ? bias.data() : nullptr,
                      near_weights.data(),
                      near_experts.data(),
                      near_load.data(),
                      kLast,
                      experts,
                      kChoices,
                      0,
                      0,
                      {}};
  cpu::gate_topk(a);
  GateTopkBackwardArguments b{DType::kFloat32,
                              near.data(),
                              near_experts.data(),
                              near_grad.data(),
                              expected.data(),
                              kLast,
                              experts,
                              kChoices,
                              a.chooses_on_logits(),
                              {}};
  cpu::gate_topk_backward(b);

  Far<float> logits(tokens, experts), weights(tokens, kChoices), grad(tokens, kChoices), out(tokens, experts);
  Far<int32_t> chosen(tokens, kChoices);
  logits.end_with(near);
  grad.end_with(near_grad);
  a.logits = logits.data(), a.weights = weights.data(), a.experts = chosen.data(), a.load = load.data();
  a.tokens = tokens, a.most_blocks = tokens;
  cuda::gate_topk(a, nullptr);
  CHECK(chosen.ends_with(near_experts));
  CHECK(weights.ends_with(near_weights));
  b.logits = logits.data(), b.experts = chosen.data(), b.grad_weights = grad.data(), b.grad_logits = out.data();
  b.tokens = tokens;
  cuda::gate_topk_backward(b, nullptr);
  CHECK(out.ends_with(expected));
}

void check_activation(Activation kind) {
  constexpr int64_t kLast = 5, kFeatures = 1000;
  const int64_t width = is_gated(kind) ? 2 * kFeatures : kFeatures, rows = kFar / width + 77;
  Random random(2);
  Buffer<BFloat16> near(kLast * width), near_grad(kLast * kFeatures), out(near_grad.size()), out_grad(near.size());
  fill(near, random);
  fill(near_grad, random);
  ExpertActivationArguments a{nullptr, near.data(), out.data(), kLast, kFeatures, kind, DType::kBFloat16};
  cpu::expert_activation(a);
  ExpertActivationArguments b{near_grad.data(), near.data(), out_grad.data(), kLast, kFeatures, kind, DType::kBFloat16};
  cpu::expert_activation_backward(b);

  Far<BFloat16> h(rows, width), grad(rows, kFeatures), far_out(rows, kFeatures), far_grad(rows, width);
  h.end_with(near);
  grad.end_with(near_grad);
  a.h = b.h = h.data(), a.out = far_out.data(), b.grad = grad.data(), b.out = far_grad.data();
  a.rows = b.rows = rows;
  cuda::expert_activation(a, nullptr);
  CHECK(far_out.ends_with(out));
  cuda::expert_activation_backward(b, nullptr);
  CHECK(far_grad.ends_with(out_grad));
}

// First y has more than 2^31 elements, then the gradient of the weight.
template <typename T>
void check_products(bool by_order) {
  constexpr int64_t kLast = 5, kInput = 16, kOutput = 256;
  const int64_t rows = kFar / kOutput + 77;
  Random random(3);
  Buffer<T> near(kLast * kInput), weight(kOutput * kInput), expected(kLast * kOutput);
  fill_small(near, random);
  fill_small(weight, random);
  Buffer<int32_t> near_offsets(2), offsets(2), workspace(cuda::grouped_linear_workspace(1));
  near_offsets[0] = offsets[0] = 0, near_offsets[1] = kLast, offsets[1] = static_cast<int32_t>(rows);
  const auto view = [](const T* data, int64_t columns) { return MatrixView{data, columns, 1}; };
  GroupedLinearArguments a{
      {near_offsets.data(), expected.data(), kLast, kInput, kOutput, 1, dtype_of<T>(), workspace.data()},
      view(near.data(), kInput),
      view(weight.data(), kInput),
      kOutput * kInput,
      {}};
  cpu::grouped_linear(a);

  Far<T> x(rows, kInput), y(rows, kOutput);
  Far<int32_t> order(rows, 1);
  x.end_with(near);
  // Each row has its own place, if a block that runs reads it.
  for (int64_t row = 0; row < rows; row += row == 4096 ? rows - 8192 : 1) order.data()[row] = static_cast<int32_t>(row);
  a.offsets = offsets.data(), a.out = y.data(), a.rows = rows, a.order = by_order ? order.data() : nullptr;
  a.x = view(x.data(), kInput);
  cuda::grouped_linear(a, nullptr);
  CHECK(y.ends_with(expected));
}

template <typename T>
void check_weight_grad() {
  constexpr int64_t kRows = 3, kInput = 2048, kOutput = 2048, kTile = 64;
  const int64_t experts = kFar / (kInput * kOutput) + 3;
  Random random(4);
  Buffer<T> x(kRows * kInput), grad(kRows * kOutput);
  fill_small(x, random);
  fill_small(grad, random);
  Buffer<int32_t> offsets(experts + 1), workspace(cuda::grouped_linear_workspace(experts));
  for (int32_t& offset : offsets) offset = 0;
  offsets[experts] = kRows;
  Far<T> out(experts * kOutput, kInput);
  cuda::grouped_linear_weight_grad(
      {{offsets.data(), out.data(), kRows, kInput, kOutput, experts, dtype_of<T>(), workspace.data()},
       {grad.data(), kOutput, 1},
       {x.data(), kInput, 1}},
      nullptr);
  int64_t wrong = 0;
  for (int64_t row = kOutput - kTile; row < kOutput; ++row) {
    for (int64_t column = kInput - kTile; column < kInput; ++column) {
      float sum = 0;
      for (int64_t r = 0; r < kRows; ++r) {
        sum += to_accumulate(grad[r * kOutput + row]) * to_accumulate(x[r * kInput + column]);
      }
      wrong += to_accumulate(out.last(kOutput)[row * kInput + column]) != sum;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("far: gate_topk and its backward") {
  const EndsAlone ends(24);
  check_gate(64, false);
  check_gate(256, true);
}

TEST_CASE("far: expert_activation and its backward") {
  const EndsAlone ends(4);
  check_activation(Activation::kSwiglu);
  check_activation(Activation::kRelu);
}

// The last blocks have no tile, because there are more blocks than tiles.
TEST_CASE("far: grouped_linear") {
  const EndsAlone ends(16);
  for (const bool by_order : {false, true}) {
    check_products<BFloat16>(by_order);
    check_products<float>(by_order);
  }
}

TEST_CASE("far: grouped_linear_weight_grad") {
  const EndsAlone ends(4);
  check_weight_grad<BFloat16>();
  check_weight_grad<float>();
}
