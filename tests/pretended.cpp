// Gives torch the device guard that autograd asks for on a device that no build of torch has: one that does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(MAIA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MAIA>);
}  // namespace
