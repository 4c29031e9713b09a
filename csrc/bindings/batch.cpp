#include "bindings/batch.h"

#include <functional>
#include <memory>
#include <optional>

#include "bindings/buffers.h"
#include "bindings/deferred.h"
#include "bindings/own_state.h"
#include "bindings/process.h"
#include "bindings/structure.h"
#include "bindings/torch_calls.h"
#include "kernels/gather_batch.h"

namespace pymoe::bindings {
namespace {

using runtime::BufferPool;
using Slice = runtime::Slice<SystemSync>;

thread_local PyObject* interrupt = nullptr;
PyObject* plain_runner = nullptr;

TensorRequest& request_of(const Slice& slice) { return static_cast<TensorRequest&>(*slice.request); }

int64_t rows_of(const Slice& slice) { return slice.whole() ? request_of(slice).tensor_rows : slice.end - slice.begin; }

// The batch of one position.
class Column {
 public:
  Column(Batch batch, size_t position, int64_t rows)
      : batch_(batch), index_(position), position_(request_of(batch[0]).signature->positions[position]), shape_{rows} {
    shape_.insert(shape_.end(), position_.row_shape.begin(), position_.row_shape.end());
  }
  ~Column() {
    if (block_ != nullptr) BufferPool::give_back(block_);
  }
  Column(Column&& other) noexcept
      : batch_(other.batch_),
        index_(other.index_),
        position_(other.position_),
        shape_(std::move(other.shape_)),
        block_(std::exchange(other.block_, nullptr)) {}

  bool on_host() const { return position_.device.type != dlpack::kCuda; }  // nothing else is let in
  int64_t bytes() const { return shape_[0] * position_.row_bytes; }

  // With the GIL or without.
  void gather() {
    block_ = buffers().take(static_cast<size_t>(bytes()));
    gather_into(block_);
  }

  // Under the GIL; after gather.
  Ref tensor() {
    void* block = std::exchange(block_, nullptr);
    return dlpack::make(block, BufferPool::give_back, position_.dtype, shape_.data(),
                        static_cast<int32_t>(shape_.size()));
  }

  // Under the GIL, which is let go of for the copy.
  Ref pinned_tensor() const {
    const Ref sizes = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(shape_.size())));
    for (size_t i = 0; i < shape_.size(); ++i) {
      PyTuple_SET_ITEM(sizes.get(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape_[i]));
    }
    const Ref dtype = Ref::checked(PyObject_GetAttrString(request_of(batch_[0]).inputs()[index_].tensor, "dtype"));
    const Ref arguments = Ref::checked(PyTuple_Pack(1, sizes.get()));
    const Ref keywords = Ref::checked(Py_BuildValue("{s:O,s:O}", "dtype", dtype.get(), "pin_memory", Py_True));
    Ref made = Ref::checked(PyObject_Call(torch_calls().empty, arguments.get(), keywords.get()));
    dlpack::Tensor view;
    dlpack::read_plain(made.get(), view);
    const WithoutGil released;
    gather_into(view.data);
    return made;
  }

  // Under the GIL: on the tensors' own device, by the operator.
  Ref device_tensor() const {
    const TorchCalls& torch = torch_calls();
    if (torch.gather_batch == nullptr)
      raise(PyExc_RuntimeError, "torch.ops.pymoe.gather_batch is missing: import pymoe");
    const Ref list = Ref::checked(PyList_New(static_cast<Py_ssize_t>(batch_.size())));
    for (size_t i = 0; i < batch_.size(); ++i) {
      Ref tensor = Ref::borrow(request_of(batch_[i]).inputs()[index_].tensor);
      if (!batch_[i].whole()) {
        tensor =
            Ref::checked(PyObject_CallMethod(tensor.get(), "narrow", "iLL", 0, static_cast<long long>(batch_[i].begin),
                                             static_cast<long long>(rows_of(batch_[i]))));
      }
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), tensor.release());
    }
    const GradMode none(false);
    return Ref::checked(PyObject_CallOneArg(torch.gather_batch, list.get()));
  }

 private:
  void gather_into(void* out) const {
    std::vector<const void*> sources(batch_.size());
    std::vector<int64_t> starts(batch_.size() + 1);
    for (size_t i = 0; i < batch_.size(); ++i) {
      const Slice& slice = batch_[i];
      const int64_t skipped = slice.begin * position_.row_bytes;
      sources[i] = static_cast<const char*>(request_of(slice).inputs()[index_].data) + skipped;
      starts[i + 1] = starts[i] + rows_of(slice) * position_.row_bytes;
    }
    cpu::gather_batch({sources.data(), starts.data(), out, static_cast<int64_t>(batch_.size())});
  }

  Batch batch_;
  size_t index_;
  const Position& position_;
  std::vector<int64_t> shape_;
  void* block_ = nullptr;
};

// A range that torch.profiler shows, while it lives. A range that fails is not worth a batch.
class Range {
 public:
  explicit Range(PyObject* name) : range_(Ref::steal(PyObject_CallOneArg(torch_calls().record, name))) {
    if (range_) Ref::steal(PyObject_CallMethod(range_.get(), "__enter__", nullptr));
    PyErr_Clear();
  }
  ~Range() {
    const Ref error = PyErr_Occurred() ? take_error() : Ref();
    if (range_) Ref::steal(PyObject_CallMethod(range_.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
    PyErr_Clear();
    if (error) set_error(error.get());
  }

 private:
  const Ref range_;
};

// Gives every request of the batch what is its own; those that are complete need their inputs no more. All or nothing:
// what may raise comes first, since requests whose batch raised may run again.
void hand_out(Batch batch, std::vector<Ref> results) {
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].whole()) continue;
    std::vector<PyObject*>& parts = request_of(batch[i]).parts;
    const size_t before = batch[i].begin == 0 ? 0 : parts.size();
    if (!batch[i].last()) {
      if (before == parts.capacity()) parts.reserve(2 * before + 8);
      continue;
    }
    const Ref all = Ref::checked(PyList_New(static_cast<Py_ssize_t>(before) + 1));
    for (size_t part = 0; part < before; ++part) {
      PyList_SET_ITEM(all.get(), static_cast<Py_ssize_t>(part), Py_NewRef(parts[part]));
    }
    PyList_SET_ITEM(all.get(), static_cast<Py_ssize_t>(before), results[i].release());
    results[i] = cat_structures(all.get());
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    TensorRequest& request = request_of(batch[i]);
    if (!batch[i].last()) {
      request.parts.push_back(results[i].release());
      continue;
    }
    request.set_outcome(std::move(results[i]), false);
    for (PyObject* part : std::exchange(request.parts, {})) Py_DECREF(part);
    request.drop_inputs();
  }
}

// Memory that a client took away since it submitted would be read after it was freed.
void require_unchanged(Batch batch, const char* where) {
  for (const Slice& slice : batch) {
    if (request_of(slice).unchanged()) continue;
    raise(PyExc_RuntimeError,
          "%s: the tensor of a request changed its memory or its shape before its batch ran: no request of the batch "
          "was run",
          where);
  }
}

// Fewer bytes are gathered sooner than the GIL is back.
constexpr int64_t kGatheredUnderGil = 64 << 10;

void gather(std::vector<Column>& columns) {
  int64_t bytes = 0;
  for (const Column& column : columns) bytes += column.on_host() ? column.bytes() : 0;
  std::optional<WithoutGil> released;
  if (bytes > kGatheredUnderGil) released.emplace();
  for (Column& column : columns) {
    if (column.on_host()) column.gather();
  }
}

// Whether requests may run once more after this exception: unless it says itself, in an attribute, that they may not.
bool forgives(PyObject* error) {
  const Ref says = Ref::steal(PyObject_GetAttrString(error, "pymoe_may_retry"));
  PyErr_Clear();
  return says.get() != Py_False;
}

// Ends a batch with the Python exception that is set.
[[noreturn]] void fail(Batch batch) {
  const Ref error = take_error();
  // On the main thread it means whoever waits there, and has nothing to do with the batch.
  if (on_main_thread() && PyErr_GivenExceptionMatches(error.get(), PyExc_KeyboardInterrupt)) {
    Py_XSETREF(interrupt, error.share());
    throw runtime::Interrupted();
  }
  for (const Slice& slice : batch) request_of(slice).set_outcome(Ref::borrow(error.get()), true);
  throw BatchRaised(forgives(error.get()));
}

// Work for another thread, and how it ended.
struct Errand {
  const std::function<void()>& work;
  bool ended = false;
  std::exception_ptr error;
};

PyObject* run_errand(PyObject* capsule, PyObject*) {
  auto* errand = static_cast<Errand*>(PyCapsule_GetPointer(capsule, nullptr));
  try {
    errand->work();
  } catch (...) {
    errand->error = std::current_exception();
  }
  errand->ended = true;
  Py_RETURN_NONE;
}

PyMethodDef run_errand_method = {"run_batch", run_errand, METH_NOARGS, nullptr};

// Does the work where nothing is switched on. An interrupt that came meanwhile comes again.
void run_elsewhere(const std::function<void()>& work) {
  Errand errand{work, false, nullptr};
  const Ref capsule = Ref::checked(PyCapsule_New(&errand, nullptr, nullptr));
  const Ref function = Ref::checked(PyCFunction_New(&run_errand_method, capsule.get()));
  if (!Ref::steal(PyObject_CallOneArg(plain_runner, function.get()))) {
    if (!errand.ended) throw ErrorSet();
    PyErr_Clear();
    PyErr_SetInterrupt();
  }
  if (errand.error) std::rethrow_exception(errand.error);
}

}  // namespace

PyObject* set_plain_runner(PyObject*, PyObject* function) {
  Py_XSETREF(plain_runner, Py_NewRef(function));
  Py_RETURN_NONE;
}

Ref take_interrupt() { return Ref::steal(std::exchange(interrupt, nullptr)); }

PyBatchFunction::PyBatchFunction(std::string name, Ref function, bool pin_memory)
    : where_("TaskPool '" + name + "'"),
      function_(function.release()),
      range_(Ref::checked(PyUnicode_FromFormat("pymoe::%s batch", name.c_str())).release()),
      pin_memory_(pin_memory) {}

PyBatchFunction::~PyBatchFunction() {
  drop_later(function_);
  drop_later(range_);
}

void PyBatchFunction::run(Batch batch) {
  std::vector<int64_t> rows;
  rows.reserve(batch.size());
  int64_t total = 0;
  for (const Slice& slice : batch) {
    rows.push_back(rows_of(slice));
    total += rows.back();
  }
  std::vector<Column> columns;
  const auto positions = static_cast<size_t>(request_of(batch[0]).positions());
  columns.reserve(positions);
  for (size_t i = 0; i < positions; ++i) {
    columns.emplace_back(batch, i, total);
  }

  const WithGil gil;
  drop_deferred();
  const auto run_here = [&] {
    try {
      adopt_thread_count();
      require_unchanged(batch, where_.c_str());
      if (!pin_memory_) gather(columns);
      const Range range(range_);
      std::vector<Ref> tensors;
      for (Column& column : columns) {
        tensors.push_back(!column.on_host() ? column.device_tensor()
                          : pin_memory_     ? column.pinned_tensor()
                                            : column.tensor());
      }
      const Ref output = call(tensors);
      tensors.clear();
      hand_out(batch, split_structure(output.get(), rows, where_.c_str()));
    } catch (const ErrorSet&) {
      fail(batch);
    }
  };
  // Inside another batch, and on a worker of parallel calls, a thread must help, whatever is switched on there.
  const bool known_plain = SystemSync::batches_on_this_thread() == 1 && (on_server_thread() || !on_worker_thread());
  if (known_plain || plain_runner == nullptr || thread_is_plain()) {
    run_here();
    return;
  }
  try {
    run_elsewhere(run_here);
  } catch (const ErrorSet&) {
    fail(batch);
  }
}

bool PyBatchFunction::may_retry(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const BatchRaised& raised) {
    return raised.may_retry;
  } catch (...) {
    return true;
  }
}

Ref PyBatchFunction::call(const std::vector<Ref>& tensors) const {
  if (function_ == nullptr) raise(PyExc_RuntimeError, "%s: the pool was collected", where_.c_str());
  const Ref function = Ref::borrow(function_);
  std::vector<PyObject*> arguments(tensors.size() + 1);
  for (size_t i = 0; i < tensors.size(); ++i) arguments[i + 1] = tensors[i].get();
  const EmptyContext context;
  const WholeStack stack;
  const GradMode enabled(true);
  return Ref::checked(PyObject_Vectorcall(function.get(), arguments.data() + 1,
                                          tensors.size() | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

}  // namespace pymoe::bindings
