// pymoe::dispatch: see kernels/dispatch.h for what it computes and pymoe/reference/dispatch.py for its contract.
#include <torch/csrc/stable/library.h>

#include "kernels/dispatch.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/twins.h"

namespace pymoe::ops::dispatch_op {
namespace {

constexpr const char* kName = "dispatch";

DispatchArguments checked(const Tensor& x, const Tensor& slot, const Tensor& offsets, Tensor& out) {
  floating_dtype(kName, "x", x);
  require_shape(kName, "x", x, {-1, -1});
  require_dtype(kName, "slot", slot, ScalarType::Int);
  require_shape(kName, "slot", slot, {x.size(0), -1});
  require_dtype(kName, "offsets", offsets, ScalarType::Int);
  require_shape(kName, "offsets", offsets, {-1});
  require(offsets.size(0) >= 1, kName, "offsets must have E + 1 entries, got none");
  require_same_device(kName, "slot", slot, x);
  require_same_device(kName, "offsets", offsets, x);
  require_same_device(kName, "out", out, x);
  require_dtype(kName, "out", out, x.scalar_type());
  require_shape(kName, "out", out, {slot.numel(), x.size(1)});
  return {
      x.const_data_ptr(),
      static_cast<const int32_t*>(slot.const_data_ptr()),
      static_cast<const int32_t*>(offsets.const_data_ptr()) + offsets.size(0) - 1,
      out.mutable_data_ptr(),
      x.size(0),
      slot.size(1),
      x.size(1) * static_cast<int64_t>(x.element_size()),
  };
}

Tensor fresh_output(const Tensor& x, const Tensor& slot) {
  require(x.dim() == 2, kName, "x must have shape (T, H), got ", x);
  return empty({slot.numel(), x.size(1)}, x.scalar_type(), x);
}

void dispatch_out(const Tensor& x, const Tensor& slot, const Tensor& offsets, Tensor out) {
  run(PYMOE_TWINS(dispatch), checked(x, slot, offsets, out), x);
}

Tensor dispatch(const Tensor& x, const Tensor& slot, const Tensor& offsets) {
  Tensor out = fresh_output(x, slot);
  dispatch_out(x, slot, offsets, out);
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(pymoe, library) {
  library.def("dispatch(Tensor x, Tensor slot, Tensor offsets) -> Tensor");
  library.def("dispatch_out(Tensor x, Tensor slot, Tensor offsets, Tensor(a!) out) -> ()");
}

template <typename Library>
void implement(Library& library) {
  library.impl("dispatch", TORCH_BOX(&dispatch));
  library.impl("dispatch_out", TORCH_BOX(&dispatch_out));
}
PYMOE_IMPLEMENT_ON_EVERY_DEVICE(implement)

}  // namespace
}  // namespace pymoe::ops::dispatch_op
