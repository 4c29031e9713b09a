// Which launches do the kernels' host functions make? This program calls them on shapes of the design, on a CUDA
// runtime that starts nothing and prints every launch: kernel, grid, block, shared memory, and the bytes of its
// arguments. Those who read the machine code (launches.py) run it with exactly these.
//
//     record SIZES     # SIZES: a line a kernel, its name and the size of each of its parameters in bytes
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
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

std::map<std::string, std::vector<size_t>> sizes;  // of the parameters
std::map<const void*, std::string> names;          // by the host's stub

struct {
  dim3 grid, block;
  size_t shared;
} pushed;

cudaError_t print_launch(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared, unsigned cluster) {
  const std::string& name = names.at(stub);
  std::printf("launch %s %u %u %zu %u", name.c_str(), grid.x, block.x, shared, cluster);
  size_t i = 0;
  for (const size_t size : sizes.at(name)) {
    std::printf(" ");
    const auto* const bytes = static_cast<const unsigned char*>(arguments[i++]);
    for (size_t at = 0; at < size; ++at) std::printf("%02x", bytes[at]);
  }
  std::printf("\n");
  return cudaSuccess;
}

// An address that no host memory has, aligned as an allocation is.
uint64_t next_address = uint64_t{1} << 40;

template <typename T = void>
T* buffer(const char* name, int64_t bytes) {
  const uint64_t address = next_address;
  next_address += (static_cast<uint64_t>(bytes) + (2 << 20)) & ~uint64_t{(1 << 20) - 1};
  std::printf("buffer %s %llu %lld\n", name, static_cast<unsigned long long>(address), static_cast<long long>(bytes));
  return reinterpret_cast<T*>(address);
}

using pymoe::DType;

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat64 ? 8 : 2; }

struct Shape {
  int64_t tokens, choices, hidden, experts;
};

// `counted`: for build_routing, as in a layer.
void gate(const char* name, Shape s, DType dtype, pymoe::Score score, bool biased, bool counted) {
  std::printf("case %s\n", name);
  pymoe::GateTopkArguments a{};
  a.dtype = dtype;
  a.logits = buffer("logits", s.tokens * s.experts * bytes_of(dtype));
  if (biased) a.bias = buffer("bias", s.experts * 4);
  a.weights = buffer("weights", s.tokens * s.choices * 4);
  a.experts = buffer<int32_t>("experts", s.tokens * s.choices * 4);
  a.tokens = s.tokens;
  a.num_experts = s.experts;
  a.choices = s.choices;
  a.options = {score, true, 1.0};
  if (counted) {
    a.counts = pymoe::cuda::gate_topk_counts(a);
    a.counts.values = buffer<uint16_t>("counts", a.counts.size() * 2);
  } else {
    a.load = buffer<int32_t>("load", s.experts * 4);
  }
  if (const int64_t bytes = pymoe::cuda::gate_topk_workspace(a)) a.workspace = buffer("workspace", bytes);
  pymoe::cuda::gate_topk(a, nullptr);
}

// `counted`: behind the gate, as in a layer.
void routing(const char* name, Shape s, bool counted) {
  std::printf("case %s\n", name);
  const int64_t rows = s.tokens * s.choices;
  pymoe::CountedRoutingArguments a{};
  a.experts = buffer("experts", rows * 4);
  a.slot = buffer<int32_t>("slot", rows * 4);
  a.token = buffer<int32_t>("token", rows * 4);
  a.offsets = buffer<int32_t>("offsets", (s.experts + 1) * 4);
  const int64_t words = counted ? 0 : pymoe::cuda::build_routing_workspace(rows, s.experts);
  if (words > 0) a.workspace = buffer<int32_t>("workspace", words * 4);
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
  a.counts.values = buffer<uint16_t>("counts", a.counts.size() * 2);
  a.load = buffer<int32_t>("load", s.experts * 4);
  pymoe::cuda::build_routing_counted(a, nullptr);
}

void dispatch(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  const int64_t row = s.hidden * bytes_of(dtype), rows = s.tokens * s.choices;
  pymoe::DispatchArguments a{};
  a.x = buffer("x", s.tokens * row);
  a.slot = buffer<int32_t>("slot", rows * 4);
  a.used = buffer<int32_t>("used", 4);
  a.out = buffer("out", rows * row);
  a.tokens = s.tokens;
  a.choices = s.choices;
  a.rows = rows;
  a.row_bytes = row;
  pymoe::cuda::dispatch(a, nullptr);
}

void fill(pymoe::CombineInput& a, Shape s, DType dtype) {
  const int64_t row = s.hidden * bytes_of(dtype), rows = s.tokens * s.choices;
  a.y = buffer("y", rows * row);
  a.slot = buffer<int32_t>("slot", rows * 4);
  a.weights = buffer("weights", rows * 4);
  a.tokens = s.tokens;
  a.choices = s.choices;
  a.rows = rows;
  a.hidden = s.hidden;
  a.dtype = dtype;
}

void combine(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::CombineArguments a{};
  fill(a, s, dtype);
  a.out = buffer("out", s.tokens * s.hidden * bytes_of(dtype));
  pymoe::cuda::combine(a, nullptr);
}

void combine_backward(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::CombineBackwardArguments a{};
  fill(a, s, dtype);
  a.grad = buffer("grad", s.tokens * s.hidden * bytes_of(dtype));
  a.used = buffer<int32_t>("used", 4);
  a.dy = buffer("dy", a.rows * s.hidden * bytes_of(dtype));
  a.dweights = buffer("dweights", a.rows * 4);
  pymoe::cuda::combine_backward(a, nullptr);
}

void activation(const char* name, int64_t rows, int64_t features, pymoe::Activation kind, DType dtype, bool backward) {
  std::printf("case %s\n", name);
  pymoe::ExpertActivationArguments a{};
  const int64_t bytes = rows * features * bytes_of(dtype), of_h = pymoe::is_gated(kind) ? 2 * bytes : bytes;
  a.h = buffer("h", of_h);
  if (backward) a.grad = buffer("grad", bytes);
  a.out = buffer("out", backward ? of_h : bytes);
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
  a.offsets = buffer<int32_t>("offsets", (p.experts + 1) * 4);
  a.workspace = buffer<int32_t>("workspace", pymoe::cuda::grouped_linear_workspace(p.experts) * 4);
  a.rows = p.rows;
  a.input_features = p.inputs;
  a.output_features = p.outputs;
  a.experts = p.experts;
  a.dtype = dtype;
}

void grouped_linear(const char* name, Product p, DType dtype, bool transposed) {
  std::printf("case %s\n", name);
  const int64_t bytes = bytes_of(dtype);
  pymoe::GroupedLinearArguments a{};
  fill(a, p, dtype);
  a.out = buffer("y", p.rows * p.outputs * bytes);
  a.x = {buffer("x", p.rows * p.inputs * bytes), p.inputs, 1};
  const void* const weight = buffer("weight", p.experts * p.inputs * p.outputs * bytes);
  a.weight = transposed ? pymoe::MatrixView{weight, 1, p.outputs} : pymoe::MatrixView{weight, p.inputs, 1};
  a.weight_stride = p.inputs * p.outputs;
  pymoe::cuda::grouped_linear(a, nullptr);
}

void weight_grad(const char* name, Product p, DType dtype) {
  std::printf("case %s\n", name);
  const int64_t bytes = bytes_of(dtype);
  pymoe::GroupedWeightGradArguments a{};
  fill(a, p, dtype);
  a.out = buffer("dweight", p.experts * p.inputs * p.outputs * bytes);
  a.grad = {buffer("grad", p.rows * p.outputs * bytes), p.outputs, 1};
  a.x = {buffer("x", p.rows * p.inputs * bytes), p.inputs, 1};
  pymoe::cuda::grouped_linear_weight_grad(a, nullptr);
}

void bias_grad(const char* name, Product p, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::GroupedBiasGradArguments a{};
  fill(a, p, dtype);
  a.out = buffer("dbias", p.experts * p.outputs * bytes_of(dtype));
  a.grad = {buffer("grad", p.rows * p.outputs * bytes_of(dtype)), p.outputs, 1};
  pymoe::cuda::grouped_linear_bias_grad(a, nullptr);
}

void gate_backward(const char* name, Shape s, DType dtype) {
  std::printf("case %s\n", name);
  pymoe::GateTopkBackwardArguments a{};
  a.dtype = dtype;
  a.logits = buffer("logits", s.tokens * s.experts * bytes_of(dtype));
  a.experts = buffer<int32_t>("experts", s.tokens * s.choices * 4);
  a.grad_weights = buffer("grad_weights", s.tokens * s.choices * 4);
  a.grad_logits = buffer("grad_logits", s.tokens * s.experts * 2);
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
  a.logits = buffer("logits", s.tokens * s.experts * 4);
  a.tokens = s.tokens;
  a.num_experts = s.experts;
  a.load = buffer("load", s.experts * 4);
  a.with_z = true;
  a.score = pymoe::Score::kSoftmax;
}

void losses(const char* name, Shape s) {
  std::printf("case %s\n", name);
  pymoe::RouterLossesArguments a{};
  fill(a, s);
  a.balance = buffer("balance", 4);
  a.z = buffer("z", 4);
  a.workspace = buffer<double>("workspace", pymoe::router_losses_workspace(s.tokens) * 8);
  pymoe::cuda::router_losses(a, nullptr);
}

void losses_backward(const char* name, Shape s) {
  std::printf("case %s\n", name);
  pymoe::RouterLossesBackwardArguments a{};
  fill(a, s);
  a.grad_balance = buffer("grad_balance", 4);
  a.grad_z = buffer("grad_z", 4);
  a.grad_logits = buffer("grad_logits", s.tokens * s.experts * 4);
  pymoe::cuda::router_losses_backward(a, nullptr);
}

void gather(const char* name, int64_t requests, int64_t row_bytes) {
  std::printf("case %s\n", name);
  std::vector<const void*> sources;
  std::vector<int64_t> starts{0};
  const auto* const rows = static_cast<const char*>(buffer("sources", requests * row_bytes));
  for (int64_t i = 0; i < requests; ++i) {
    sources.push_back(rows + (requests - 1 - i) * row_bytes);
    starts.push_back((i + 1) * row_bytes);
  }
  pymoe::cuda::gather_batch({sources.data(), starts.data(), buffer("out", requests * row_bytes), requests}, nullptr);
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
cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t) {
  std::printf("memset %zu\n", bytes);
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st*) {
  pushed = {grid, block, shared};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void*) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return print_launch(kernel, grid, block, arguments, shared, 1);
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return print_launch(stub, grid, block, arguments, shared, 1);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* stub, void** arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < how->numAttrs; ++i) {
    if (how->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = how->attrs[i].val.clusterDim.x;
  }
  return print_launch(stub, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, cluster);
}
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

int main(int, char** arguments) {
  std::ifstream file(arguments[1]);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    auto& of_kernel = sizes[name];
    for (size_t size; words >> size;) of_kernel.push_back(size);
  }
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
