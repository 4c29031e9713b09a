// pymoe::dispatch: see kernels/dispatch.h for what it computes and pymoe/reference/dispatch.py for its contract.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>

#include "kernels/dispatch.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/operators.h"
#include "ops/twins.h"

namespace pymoe::ops::dispatch_op {
namespace {

constexpr const char* kName = "dispatch";

void dispatch_out(const Tensor& x, const Tensor& slot, const Tensor& offsets, Tensor out) {
  floating_dtype(kName, "x", x);
  require_shape(kName, "x", x, {-1, -1});
  require_tensor(kName, "slot", slot, ScalarType::Int, {x.size(0), -1}, x);
  const int32_t* bounds = checked_offsets(kName, offsets, x);
  require_tensor(kName, "out", out, x.scalar_type(), {-1, x.size(1)}, x);
  require_apart(kName, "out", out, "x", x);
  require_apart(kName, "out", out, "slot", slot);
  require_apart(kName, "out", out, "offsets", offsets);
  const DispatchArguments arguments{
      x.const_data_ptr(),
      static_cast<const int32_t*>(slot.const_data_ptr()),
      bounds + offsets.size(0) - 1,
      out.mutable_data_ptr(),
      x.size(0),
      slot.size(1),
      out.size(0),
      x.size(1) * static_cast<int64_t>(x.element_size()),
  };
  run(PYMOE_TWINS(dispatch), arguments, x);
}

}  // namespace

Tensor dispatch(const Tensor& x, const Tensor& slot, const Tensor& offsets, std::optional<int64_t> rows) {
  require(x.dim() == 2, kName, "x must have shape (T, H), got ", x);
  constexpr int64_t kMostRows = INT32_MAX;  // slots are int32
  require(!rows || (*rows >= 0 && *rows <= kMostRows), kName, "rows must be at least 0 and at most ", kMostRows,
          ", got ", rows.value_or(0));
  Tensor out = empty({rows.value_or(slot.numel()), x.size(1)}, x.scalar_type(), x);
  dispatch_out(x, slot, offsets, out);
  return out;
}

PYMOE_OPERATOR("dispatch", dispatch, "(Tensor x, Tensor slot, Tensor offsets, SymInt? rows=None) -> Tensor")
PYMOE_OPERATOR("dispatch_out", dispatch_out, "(Tensor x, Tensor slot, Tensor offsets, Tensor(a!) out) -> ()")

}  // namespace pymoe::ops::dispatch_op
