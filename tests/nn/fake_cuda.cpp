// A CUDA device that does not exist: this library answers the questions of torch's autograd engine about a device. With
// it, torch runs fake CUDA tensors (FakeTensorMode) forward and backward without a GPU, in a CPU build and in a CUDA
// build. Nothing can be computed on it.
//
// Load it before torch, so that torch finds it when it looks for its CUDA part; call take_the_place_of_the_guard after.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct CUDAHooks : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

struct Guard : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return {kCuda, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCuda, 0));
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// These hooks take precedence over the hooks of a CUDA build of torch, which find no device on a machine without a GPU.
const at::RegistererCUDAHooksRegistry registered("CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(),
                                                 at::RegistererCUDAHooksRegistry::DefaultCreator<CUDAHooks>);

}  // namespace

extern "C" __attribute__((visibility("default"))) void take_the_place_of_the_guard() {
  static const Guard guard;
  c10::impl::registerDeviceGuard(kCuda, &guard);
}
