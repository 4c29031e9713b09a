// Two CUDA devices for a CPU build of torch. Their memory is host memory, registered with the interpreter: operators
// find tensors of class CUDA, a current device, and a current stream of each device, as on a machine with two GPUs.
//
// Load it before torch, so that torch finds it when it looks for its CUDA part. Only pymoe's operators can compute with
// such tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda_ptx/memory.h"

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kDevices = 2;

c10::DeviceIndex device_now = 0;
int64_t streams_now[kDevices] = {};  // 0 is the default stream

struct CUDAHooks : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
};
const at::RegistererCUDAHooksRegistry registered("CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(),
                                                 at::RegistererCUDAHooksRegistry::DefaultCreator<CUDAHooks>);

struct Guard : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kCuda, device_now);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kCuda, device_now}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "no such device");
    device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kCuda, device_now);
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, device};
    void* const block = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    std::memset(block, pymoe::ptx::kPoison, (bytes + 511) / 512 * 512);
    pymoe::ptx::add_memory(block, static_cast<int64_t>(bytes));
    return {block, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* block) {
    pymoe::ptx::remove_memory(block);
    std::free(block);
  }
};

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  static Memory memory;
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::ScalarType::Float));
}

// Returns a new tensor on a device; torch.empty would look for a CUDA build of torch.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, int64_t device) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  const c10::Device where(kCuda, static_cast<c10::DeviceIndex>(device));
  return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(where));
}

void use(int64_t device, at::IntArrayRef streams) {
  device_now = static_cast<c10::DeviceIndex>(device);
  std::copy_n(streams.begin(), kDevices, streams_now);
}

TORCH_LIBRARY(cuda_device, library) {
  library.def("empty(int[] sizes, ScalarType dtype, int device) -> Tensor", &empty);
  library.def("use(int device, int[] streams) -> ()", &use);
  library.def("current() -> int", [] { return static_cast<int64_t>(device_now); });
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", [](const at::Tensor& self, at::IntArrayRef sizes) { return at::native::view(self, sizes); });
}

}  // namespace

#define PYMOE_EXPORT extern "C" __attribute__((visibility("default")))

PYMOE_EXPORT void take_the_place_of_the_guard() {
  static const Guard guard;
  c10::impl::registerDeviceGuard(kCuda, &guard);
}

PYMOE_EXPORT int cuda_device_current() { return device_now; }

// The same as torch's function: a stream is a pointer, and the default stream is the null pointer on every device.
PYMOE_EXPORT int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const int64_t number = streams_now[device];
  *stream = number == 0 ? nullptr : reinterpret_cast<void*>((static_cast<int64_t>(device) + 1) << 16 | number);
  return 0;
}
