#include "bindings/request.h"

#include <algorithm>

#include "bindings/errors.h"

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

void TensorRequest::set_outcome(py::object value, bool has_raised) {
  if (dropped) return;
  Py_XSETREF(traceback, has_raised ? PyException_GetTraceback(value.ptr()) : nullptr);
  Py_XSETREF(outcome, value.release().ptr());
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

py::object TensorRequest::exception() const {
  try {
    std::rethrow_exception(error());
  } catch (const BatchRaised&) {
    if (outcome != nullptr && PyExceptionInstance_Check(outcome)) {
      // Every request of a batch raises the same exception, in several threads. Without a reset, its traceback would
      // grow by each thread's frames.
      PyException_SetTraceback(outcome, traceback != nullptr ? traceback : Py_None);
      return borrow(outcome);
    }
  } catch (...) {
    // Errors of other types are converted below.
  }
  set_python_error(error());
  return take_error();
}

bool TensorRequest::was_cancelled() const {
  if (!done() || !error()) return false;
  try {
    std::rethrow_exception(error());
  } catch (const runtime::Cancelled&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::shared_ptr<const Signature> Signatures::find(const dlpack::Tensor* tensors, size_t count) {
  const auto matches = [](const Position& position, const dlpack::Tensor& tensor) { return position.matches(tensor); };
  if (last_ && std::equal(last_->positions.begin(), last_->positions.end(), tensors, tensors + count, matches)) {
    return last_;
  }
  std::vector<Position> positions(tensors, tensors + count);
  if (const auto found = known_.find(positions); found != known_.end()) return last_ = found->second;
  if (schema_) check(tensors, count);  // runs Python code only if it throws
  if (known_.size() >= most_known_) forget_unused();
  last_ = std::make_shared<Signature>(next_kind_++, positions);
  known_.emplace(std::move(positions), last_);
  return last_;
}

// Forgets the signatures that no request uses, because ragged requests come in any number of shapes. Signatures of
// queued requests are kept: a forgotten one would become a new kind, whose requests cannot share a batch with them.
void Signatures::forget_unused() {
  std::erase_if(known_, [](const auto& entry) { return entry.second.use_count() == 1; });
  most_known_ = std::max(kKept, 2 * known_.size());
}

// Returns a shape as text: "(2, 3)", or "(rows, 2, 3)" with `rows_first`.
static std::string shown_shape(const int64_t* shape, size_t dimensions, bool rows_first = false) {
  std::string text = rows_first ? "(rows" : "(";
  for (size_t i = 0; i < dimensions; ++i) {
    if (i > 0 || rows_first) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (dimensions + rows_first == 1 ? ",)" : ")");
}

void Signatures::check(const dlpack::Tensor* tensors, size_t count) const {
  const char* pool = pool_.c_str();
  if (count != schema_->size()) {
    raise(PyExc_ValueError, "TaskPool '%s': schema expects %zu tensors, got %zu", pool, schema_->size(), count);
  }
  for (size_t i = 0; i < count; ++i) {
    const Position& expected = (*schema_)[i];
    const dlpack::Tensor& tensor = tensors[i];
    const std::vector<int64_t> row_shape(tensor.shape + 1, tensor.shape + tensor.ndim);
    if (row_shape != expected.row_shape) {
      const bool is_row =
          std::equal(expected.row_shape.begin(), expected.row_shape.end(), tensor.shape, tensor.shape + tensor.ndim);
      raise(PyExc_ValueError, "TaskPool '%s': tensor %zu: expected shape %s by the schema, got %s%s", pool, i,
            shown_shape(expected.row_shape.data(), expected.row_shape.size(), true).c_str(),
            shown_shape(tensor.shape, static_cast<size_t>(tensor.ndim)).c_str(),
            is_row ? ": a BatchTensorProto has the shape of one row, without the number of rows" : "");
    }
    if (tensor.dtype != expected.dtype) {
      const auto name = [](dlpack::DataType dtype) {
        constexpr std::array<const char*, 7> kinds{"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
        return (dtype.code < kinds.size() ? kinds[dtype.code] : "float8 kind ") + std::to_string(dtype.bits);
      };
      raise(PyExc_TypeError, "TaskPool '%s': tensor %zu: expected dtype %s by the schema, got %s", pool, i,
            name(expected.dtype).c_str(), name(tensor.dtype).c_str());
    }
  }
}

}  // namespace pymoe::bindings
