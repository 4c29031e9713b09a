// Calls the kernels' host functions on the shapes of the design, with a stub of the CUDA runtime that runs nothing, and
// prints every call (case), every kernel that it launches, and every memset.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/build_routing.h"
#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/expert_activation.h"
#include "kernels/gate_topk.h"
#include "kernels/gather_batch.h"
#include "kernels/grouped_linear.h"
#include "kernels/router_losses.h"

namespace {

std::map<const void*, std::string> names;  // names of the kernels by the address of their host stubs

cudaError_t print_launch(const void* stub) {
  std::printf("launch %s\n", names.at(stub).c_str());
  return cudaSuccess;
}

// Returns an address outside host memory, aligned like an allocation. Nothing is read or written there.
template <typename T = void>
T* buffer() {
  static uint64_t next = uint64_t{1} << 40;
  return reinterpret_cast<T*>(next += uint64_t{1} << 36);
}

using pymoe::DType;

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Shape {
  int64_t tokens, choices, hidden, experts;
};

// `counted`: whether the gate counts choices for build_routing, as in a layer.
void gate(const char* name, Shape s, DType dtype, pymoe::Score score, bool biased, bool counted) {
  std::printf("case %s\n", name);
  pymoe::GateTopkArguments a{};
  a.dtype = dtype;
  a.logits = buffer();
  if (biased) a.bias = buffer();
  a.weights = buffer();
  a.experts = buffer<int32_t>();
  a.tokens = s.tokens;
  a.num_experts = s.experts;
  a.choices = s.choices;
  a.options = {score, true, 1.0};
  if (counted) {
    a.counts = pymoe::cuda::gate_topk_counts(a);
    a.counts.values = buffer<uint16_t>();
  } else {
    a.load = buffer<int32_t>();
  }
  if (pymoe::cuda::gate_topk_workspace(a) > 0) a.workspace = buffer();
  pymoe::cuda::gate_topk(a, nullptr);
}

// `counted`: whether the gate has counted the choices, as in a layer.
void routing(const char* name, Shape s, bool counted) {
  std::printf("case %s\n", name);
  const int64_t rows = s.tokens * s.choices;
  pymoe::CountedRoutingArguments a{};
  a.experts = buffer();
  a.slot = buffer<int32_t>();
  a.token = buffer<int32_t>();
  a.offsets = buffer<int32_t>();
  if (!counted && pymoe::cuda::build_routing_workspace(rows, s.experts) > 0) a.workspace = buffer<int32_t>();
  a.tokens = s.tokens;
  a.choices = s.choices;
  a.num_experts = s.experts;
  a.capacity = rows;
  if (!counted) return pymoe::cuda::build_routing(a, nullptr);
  pymoe::GateTopkArguments gate{};
  gate.dtype = DType::kFloat32;
  gate.tokens = s.tokens;
  gate.num_experts = s.experts;
  gate.choices = s.choices;
  gate.options = {pymoe::Score::kSoftmax, true, 1.0};
  a.counts = pymoe::cuda::gate_topk_counts(gate);
  a.counts.values = buffer<uint16_t>();
  a.load = buffer<int32_t>();
  pymoe::cuda::build_routing_counted(a, nullptr);
}

void dispatch(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  const int64_t rows = s.tokens * s.choices;
  pymoe::DispatchArguments a{};
  a.x = buffer();
  a.slot = buffer<int32_t>();
  a.used = buffer<int32_t>();
  a.out = buffer();
  a.tokens = s.tokens;
  a.choices = s.choices;
  a.rows = rows;
  a.row_bytes = s.hidden * bytes_of(dtype);
  pymoe::cuda::dispatch(a, nullptr);
}

void fill(pymoe::CombineInput& a, Shape s, DType dtype) {
  a.y = buffer();
  a.slot = buffer<int32_t>();
  a.weights = buffer();
  a.tokens = s.tokens;
  a.choices = s.choices;
  a.rows = s.tokens * s.choices;
  a.hidden = s.hidden;
  a.dtype = dtype;
}

void combine(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::CombineArguments a{};
  fill(a, s, dtype);
  a.out = buffer();
  pymoe::cuda::combine(a, nullptr);
}

void combine_backward(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::CombineBackwardArguments a{};
  fill(a, s, dtype);
  a.grad = buffer();
  a.used = buffer<int32_t>();
  a.dy = buffer();
  a.dweights = buffer();
  pymoe::cuda::combine_backward(a, nullptr);
}

void activation(const char* name, int64_t rows, int64_t features, pymoe::Activation kind, DType dtype, bool backward) {
  std::printf("case %s\n", name);
  pymoe::ExpertActivationArguments a{};
  a.h = buffer();
  if (backward) a.grad = buffer();
  a.out = buffer();
  a.rows = rows;
  a.features = features;
  a.kind = kind;
  a.dtype = dtype;
  backward ? pymoe::cuda::expert_activation_backward(a, nullptr) : pymoe::cuda::expert_activation(a, nullptr);
}

// One of grouped_linear's products, or one of its gradients, over `rows` rows.
struct Product {
  int64_t rows, inputs, outputs, experts;
};

void fill(pymoe::GroupedArguments& a, Product p, DType dtype) {
  a.offsets = buffer<int32_t>();
  a.workspace = buffer<int32_t>();
  a.rows = p.rows;
  a.input_features = p.inputs;
  a.output_features = p.outputs;
  a.experts = p.experts;
  a.dtype = dtype;
}

void grouped_linear(const char* name, Product p, DType dtype, bool transposed) {
  std::printf("case %s\n", name);
  pymoe::GroupedLinearArguments a{};
  fill(a, p, dtype);
  a.out = buffer();
  a.x = {buffer(), p.inputs, 1};
  const void* const weight = buffer();
  a.weight = transposed ? pymoe::MatrixView{weight, 1, p.outputs} : pymoe::MatrixView{weight, p.inputs, 1};
  a.weight_stride = p.inputs * p.outputs;
  pymoe::cuda::grouped_linear(a, nullptr);
}

void weight_grad(const char* name, Product p, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::GroupedWeightGradArguments a{};
  fill(a, p, dtype);
  a.out = buffer();
  a.grad = {buffer(), p.outputs, 1};
  a.x = {buffer(), p.inputs, 1};
  pymoe::cuda::grouped_linear_weight_grad(a, nullptr);
}

void bias_grad(const char* name, Product p, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::GroupedBiasGradArguments a{};
  fill(a, p, dtype);
  a.out = buffer();
  a.grad = {buffer(), p.outputs, 1};
  pymoe::cuda::grouped_linear_bias_grad(a, nullptr);
}

void gate_backward(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::GateTopkBackwardArguments a{};
  a.dtype = dtype;
  a.logits = buffer();
  a.experts = buffer<int32_t>();
  a.grad_weights = buffer();
  a.grad_logits = buffer();
  a.tokens = s.tokens;
  a.num_experts = s.experts;
  a.choices = s.choices;
  a.chosen_on_logits = true;
  a.options = {pymoe::Score::kSoftmax, true, 1.0};
  a.narrow = true;
  pymoe::cuda::gate_topk_backward(a, nullptr);
}

void fill(pymoe::RouterLossesInput& a, Shape s) {
  a.dtype = DType::kFloat32;
  a.logits = buffer();
  a.tokens = s.tokens;
  a.num_experts = s.experts;
  a.load = buffer();
  a.with_z = true;
  a.score = pymoe::Score::kSoftmax;
}

void losses(const char* name, Shape s) {
  std::printf("case %s\n", name);
  pymoe::RouterLossesArguments a{};
  fill(a, s);
  a.balance = buffer();
  a.z = buffer();
  a.workspace = buffer<double>();
  pymoe::cuda::router_losses(a, nullptr);
}

void losses_backward(const char* name, Shape s) {
  std::printf("case %s\n", name);
  pymoe::RouterLossesBackwardArguments a{};
  fill(a, s);
  a.grad_balance = buffer();
  a.grad_z = buffer();
  a.grad_logits = buffer();
  pymoe::cuda::router_losses_backward(a, nullptr);
}

void gather(const char* name, int64_t requests, int64_t row_bytes) {
  std::printf("case %s\n", name);
  std::vector<const void*> sources;
  std::vector<int64_t> starts{0};
  const auto* const rows = static_cast<const char*>(buffer());
  for (int64_t i = 0; i < requests; ++i) {
    sources.push_back(rows + (requests - 1 - i) * row_bytes);
    starts.push_back((i + 1) * row_bytes);
  }
  pymoe::cuda::gather_batch({sources.data(), starts.data(), buffer(), requests}, nullptr);
}

// Every kind of activation in bf16, and swiglu in the other dtypes that train: "geglu", "geglu_backward", ...
void activations(int64_t rows, int64_t features) {
  using pymoe::Activation;
  const std::pair<const char*, Activation> kinds[] = {
      {"swiglu", Activation::kSwiglu}, {"clamped_swiglu", Activation::kClampedSwiglu},
      {"geglu", Activation::kGeglu},   {"geglu_tanh", Activation::kGegluTanh},
      {"gelu", Activation::kGelu},     {"gelu_tanh", Activation::kGeluTanh},
      {"relu", Activation::kRelu},     {"relu_squared", Activation::kReluSquared},
  };
  const auto both = [&](std::string name, const char* dtype_name, Activation kind, DType dtype) {
    activation((name + dtype_name).c_str(), rows, features, kind, dtype, false);
    activation((name + "_backward" + dtype_name).c_str(), rows, features, kind, dtype, true);
  };
  for (const auto& [name, kind] : kinds) both(name, "", kind, DType::kBFloat16);
  both("swiglu", ", fp16", Activation::kSwiglu, DType::kFloat16);
  both("swiglu", ", fp32", Activation::kSwiglu, DType::kFloat32);
}

}  // namespace

extern "C" {
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) {
  std::printf("memset\n");
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void*) {
  *grid = *block = dim3{}, *shared = 0;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return print_launch(kernel);
}
cudaError_t cudaLaunchKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t) { return print_launch(stub); }
// The GPU for which launches are recorded: an H200.
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  names[stub] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 0; }
}

int main() {
  const Shape design{4096, 8, 7168, 256}, router{4096, 8, 0, 128};
  gate("gate", router, DType::kFloat32, pymoe::Score::kSoftmax, false, true);
  gate("gate, bf16 logits", router, DType::kBFloat16, pymoe::Score::kSoftmax, false, true);
  gate("gate, sigmoid and bias", router, DType::kFloat32, pymoe::Score::kSigmoid, true, true);
  gate("gate alone", router, DType::kFloat32, pymoe::Score::kSoftmax, false, false);
  routing("build_routing", router, true);
  routing("build_routing alone", router, false);
  dispatch("dispatch", design, DType::kBFloat16);
  combine("combine", design, DType::kBFloat16);
  combine("combine, float32", design, DType::kFloat32);
  combine_backward("combine_backward", design, DType::kBFloat16);
  activations(32768, 2048);
  gate_backward("gate_backward", router, DType::kFloat32);
  losses("router_losses", router);
  losses_backward("router_losses_backward", router);
  const Product in{32768, 7168, 4096, 256};
  grouped_linear("grouped_linear", in, DType::kFloat16, false);
  grouped_linear("grouped_linear, gradient of x", {in.rows, in.outputs, in.inputs, in.experts}, DType::kFloat16, true);
  weight_grad("grouped_linear, gradient of the weight", in, DType::kFloat16);
  bias_grad("grouped_linear, gradient of the bias", in, DType::kFloat16);
  gather("gather_batch", 64, 4096);
}
