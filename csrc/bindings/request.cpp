#include "bindings/request.h"

#include <algorithm>

#include "bindings/deferred.h"

namespace pymoe::bindings {

bool Position::matches(const dlpack::Tensor& tensor) const {
  return dtype == tensor.dtype && device == tensor.device && static_cast<size_t>(tensor.ndim) == row_shape.size() + 1 &&
         std::equal(row_shape.begin(), row_shape.end(), tensor.shape + 1);
}

TensorRequest::TensorRequest(std::shared_ptr<const Signature> of, Input* inputs, int64_t rows,
                             std::optional<Time> deadline, Duration head_start)
    : Request(std::max<int64_t>(rows, 1), of->kind, deadline, head_start), signature(std::move(of)), tensor_rows(rows) {
  const size_t count = signature->positions.size();
  if (count > few_.size()) many_ = std::make_unique<Input[]>(count);
  Input* own = many_ ? many_.get() : few_.data();
  for (size_t i = 0; i < count; ++i) own[i] = {std::exchange(inputs[i].tensor, nullptr), inputs[i].data};
}

TensorRequest::~TensorRequest() {
  for (int64_t i = 0; i < positions(); ++i) drop_later(inputs()[i].tensor);
  drop_later(outcome);
  drop_later(traceback);
  for (PyObject* part : parts) drop_later(part);
}

void TensorRequest::drop_inputs() {
  Input* own = many_ ? many_.get() : few_.data();
  for (int64_t i = 0; i < positions(); ++i) Py_CLEAR(own[i].tensor);
}

void TensorRequest::set_outcome(Ref value, bool has_raised) {
  if (dropped) return;
  Py_XSETREF(traceback, has_raised ? PyException_GetTraceback(value.get()) : nullptr);
  Py_XSETREF(outcome, value.release());
}

bool TensorRequest::unchanged() const {
  for (size_t i = 0; i < signature->positions.size(); ++i) {
    const Input& input = inputs()[i];
    dlpack::Tensor now;
    if (!dlpack::reread(input.tensor, now)) return false;
    if (!signature->positions[i].matches(now) || now.shape[0] != tensor_rows || now.begin() != input.data) return false;
    if (!now.dense()) return false;
  }
  return true;
}

std::shared_ptr<const Signature> Signatures::find(const dlpack::Tensor* tensors, size_t count) {
  const auto same = [&](const std::shared_ptr<const Signature>& signature) {
    if (signature->positions.size() != count) return false;
    for (size_t i = 0; i < count; ++i) {
      if (!signature->positions[i].matches(tensors[i])) return false;
    }
    return true;
  };
  if (last_ && same(last_)) return last_;
  const auto found = std::find_if(known_.begin(), known_.end(), same);
  if (found != known_.end()) return last_ = *found;
  if (schema_) check(tensors, count);  // runs Python only where it throws
  auto made = std::make_shared<Signature>(Signature{next_kind_++, {}});
  for (size_t i = 0; i < count; ++i) {
    const dlpack::Tensor& tensor = tensors[i];
    made->positions.push_back(
        {tensor.dtype, tensor.device, {tensor.shape + 1, tensor.shape + tensor.ndim}, tensor.row_bytes()});
  }
  // Ragged requests come in any number of shapes. One that was forgotten is a new kind when it comes back.
  constexpr size_t kMostKnown = 256;
  if (known_.size() >= kMostKnown) known_.clear();
  known_.push_back(made);
  return last_ = made;
}

void Signatures::check(const dlpack::Tensor* tensors, size_t count) const {
  const char* pool = pool_.c_str();
  if (count != schema_->size()) {
    raise(PyExc_ValueError, "TaskPool '%s': a request has %zu tensors by the schema, got %zu", pool, schema_->size(),
          count);
  }
  for (size_t i = 0; i < count; ++i) {
    const Position& expected = (*schema_)[i];
    const dlpack::Tensor& tensor = tensors[i];
    const std::vector<int64_t> row_shape(tensor.shape + 1, tensor.shape + tensor.ndim);
    if (row_shape != expected.row_shape) {
      raise(PyExc_ValueError, "TaskPool '%s': tensor %zu must have shape %s by the schema, got %s", pool, i,
            shown_shape(expected.row_shape.data(), expected.row_shape.size(), true).c_str(),
            shown_shape(tensor.shape, static_cast<size_t>(tensor.ndim)).c_str());
    }
    if (tensor.dtype != expected.dtype) {
      const auto name = [](dlpack::DataType dtype) {
        constexpr std::array<const char*, 7> kinds{"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
        return (dtype.code < kinds.size() ? kinds[dtype.code] : "float8 kind ") + std::to_string(dtype.bits);
      };
      raise(PyExc_TypeError, "TaskPool '%s': tensor %zu must have dtype %s by the schema, got %s", pool, i,
            name(expected.dtype).c_str(), name(tensor.dtype).c_str());
    }
  }
}

std::string shown_shape(const int64_t* shape, size_t dimensions, bool rows_first) {
  std::string text = rows_first ? "(rows" : "(";
  for (size_t i = 0; i < dimensions; ++i) {
    if (i > 0 || rows_first) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (dimensions + rows_first == 1 ? ",)" : ")");
}

}  // namespace pymoe::bindings
