// The CUDA runtime that the kernels' host code uses in the tests: it extracts the PTX from the fat binary that the
// compiler has added to that code, and every launch runs the PTX immediately. So grid, block, shared memory, arguments
// and stream are the library's own.
//
// A launch that a GPU would refuse is refused. An error of the interpreter becomes the launch's error:
// cudaGetErrorString returns its text, which kernels/cuda/launch.h throws.
#include "cuda_ptx/runtime.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "cuda_ptx/machine.h"
#include "cuda_ptx/streams.h"

namespace pymoe::ptx {
namespace {

struct Module {
  std::string text;
  std::map<std::string, Kernel> kernels;  // parsed at the first launch
  std::map<std::string, std::unique_ptr<Program>> programs;

  const Program& program(const std::string& name) {
    auto& found = programs[name];
    if (found == nullptr) {
      if (kernels.empty()) kernels = parse_module(text);
      if (!kernels.contains(name)) throw Error("the PTX has no kernel " + name);
      found = std::make_unique<Program>(decode(kernels.at(name)));
    }
    return *found;
  }
  void replace(std::string other) {
    text = std::move(other);
    kernels.clear();
    programs.clear();
  }
};

struct Function {
  Module* module;
  std::string name;
  int64_t most_shared = 0;  // dynamic, by its attribute; 0: never set
};

struct Runtime {
  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const void*, Function> functions;  // by the address of the host's stub
  std::map<std::string, int64_t> launches;
  int64_t executed = 0;
  uint64_t seed = 1;
  int64_t ends = 0;
};

Runtime& runtime() {
  static Runtime& one = *new Runtime;
  return one;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> pushed;
thread_local cudaError_t remembered = cudaSuccess;
thread_local std::string message;

cudaError_t refuse(cudaError_t error, std::string why) {
  message = std::move(why);
  return remembered = error;
}

cudaError_t ask(const std::string& what, void* stream, std::function<void()> work) {
  const std::string refusal = issue(what, stream, std::move(work));
  return refusal.empty() ? cudaSuccess : refuse(cudaErrorLaunchFailure, refusal);
}

// The format of nvcc's fat binaries: a header, then entries with a header each; kind 1 is PTX.
struct FatHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatEntry {
  uint16_t kind, unknown;
  uint32_t header_bytes;
  uint64_t bytes;
};
struct FatWrapper {
  int magic, version;
  const unsigned char* data;
  void* unused;
};

std::string ptx_of(const unsigned char* data) {
  FatHeader header;
  std::memcpy(&header, data, sizeof header);
  if (header.magic != 0xba55ed50) throw Error("not a fat binary");
  const unsigned char* at = data + header.header_bytes;
  const unsigned char* const end = at + header.bytes;
  while (at < end) {
    FatEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    const std::string_view text(reinterpret_cast<const char*>(at + entry.header_bytes), entry.bytes);
    if (entry.kind == 1 && text.find(".version") != std::string_view::npos)
      return std::string(text.substr(0, text.find('\0')));
    at += entry.header_bytes + entry.bytes;
  }
  throw Error("the fat binary has no PTX, or it is compressed (compile with -Xfatbin --compress=false)");
}

cudaError_t start(const void* stub, const Configuration& how, int64_t cluster, void** arguments) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  const auto found = all.functions.find(stub);
  if (found == all.functions.end()) return refuse(cudaErrorInvalidDeviceFunction, "unknown kernel");
  Function& function = found->second;
  const auto& [grid, block] = std::pair(how.grid, how.block);
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) {
    return refuse(cudaErrorInvalidConfiguration, "the interpreter knows grids and blocks of one dimension");
  }
  try {
    const Program& program = function.module->program(function.name);
    const auto dynamic = static_cast<int64_t>(how.shared);
    if (function.most_shared != 0 && dynamic > function.most_shared) {
      return refuse(cudaErrorInvalidValue, "more shared memory than the kernel's attribute allows");
    }
    std::vector<unsigned char> bytes(static_cast<size_t>(program.kernel.parameter_bytes));
    for (size_t i = 0; i < program.kernel.parameters.size(); ++i) {
      const Parameter& parameter = program.kernel.parameters[i];
      std::memcpy(bytes.data() + parameter.offset, arguments[i], static_cast<size_t>(parameter.bytes));
    }
    const LaunchShape shape{grid.x, static_cast<int>(block.x), dynamic, cluster, function.most_shared != 0, all.ends};
    return ask(function.name, how.stream, [&all, &function, &program, shape, bytes] {
      ++all.launches[function.name];
      all.seed = all.seed * 6364136223846793005u + 1442695040888963407u;
      all.executed += run(program, shape, bytes, all.seed);
    });
  } catch (const Error& error) {
    return refuse(cudaErrorLaunchFailure, error.what());
  }
}

}  // namespace

void set_seed(uint64_t seed) {
  const std::lock_guard lock(runtime().mutex);
  runtime().seed = seed;
}

void set_ends(int64_t blocks) {
  const std::lock_guard lock(runtime().mutex);
  runtime().ends = blocks;
}

std::map<std::string, int64_t> launches() {
  const std::lock_guard lock(runtime().mutex);
  return runtime().launches;
}

int64_t executed() {
  const std::lock_guard lock(runtime().mutex);
  return runtime().executed;
}

std::string module_with(const std::string& part) {
  const std::lock_guard lock(runtime().mutex);
  for (const auto& [stub, function] : runtime().functions) {
    if (function.name.find(part) != std::string::npos) return function.module->text;
  }
  return {};
}

void replace_module(const std::string& text, const std::string& other) {
  const std::lock_guard lock(runtime().mutex);
  for (auto& module : runtime().modules) {
    if (module->text == text) module->replace(other);
  }
}

}  // namespace pymoe::ptx

using namespace pymoe::ptx;

extern "C" {

// --- what the compiler calls ---

void** __cudaRegisterFatBinary(void* wrapper) {
  auto module = std::make_unique<Module>();
  module->text = ptx_of(static_cast<const FatWrapper*>(wrapper)->data);
  runtime().modules.push_back(std::move(module));
  return reinterpret_cast<void**>(runtime().modules.back().get());
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** module, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  runtime().functions[stub] = {reinterpret_cast<Module*>(module), name};
  runtime().launches[name] = 0;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 0; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration how = pushed.back();
  pushed.pop_back();
  *grid = how.grid, *block = how.block, *shared = how.shared;
  *static_cast<void**>(stream) = how.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return start(kernel, {grid, block, shared, stream}, 1, arguments);
}

// --- what the library calls ---

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
  return start(stub, {grid, block, shared, stream}, 1, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* stub, void** arguments) {
  int64_t cluster = 1;
  for (unsigned i = 0; i < how->numAttrs; ++i) {
    if (how->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = how->attrs[i].val.clusterDim.x;
  }
  return start(stub, {how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream}, cluster, arguments);
}
cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(runtime().mutex);
  const auto found = runtime().functions.find(stub);
  if (found == runtime().functions.end()) return refuse(cudaErrorInvalidDeviceFunction, "unknown kernel");
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    auto& function = found->second;
    if (value + function.module->program(function.name).static_shared > kMostShared) {
      return refuse(cudaErrorInvalidValue, "more shared memory than a block can have");
    }
    function.most_shared = value;
  }
  return cudaSuccess;
}
// Returns the compute capability for which the PTX was made.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool major = attribute == cudaDevAttrComputeCapabilityMajor;
  if (!major && attribute != cudaDevAttrComputeCapabilityMinor) {
    return refuse(cudaErrorInvalidValue, "unknown attribute");
  }
  const std::string& text = runtime().modules.front()->text;
  const size_t target = text.find(".target sm_") + std::strlen(".target sm_");
  const int capability = std::atoi(text.c_str() + target);
  *value = major ? capability / 10 : capability % 10;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = remembered;
  remembered = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return message.c_str(); }
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  if (bytes > 0 && find_memory(reinterpret_cast<uint64_t>(pointer), bytes).end == 0) {
    return refuse(cudaErrorInvalidValue, "cudaMemsetAsync: not within a tensor");
  }
  return ask("memset", stream, [=] { std::memset(pointer, value, bytes); });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
}
