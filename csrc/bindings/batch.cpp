#include "bindings/batch.h"

#include <pybind11/typing.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>

#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/process.h"
#include "bindings/structure.h"
#include "bindings/torch_calls.h"
#include "kernels/gather_batch.h"

namespace pymoe::bindings {
namespace {

using Slice = runtime::Slice<SystemSync>;

thread_local PyObject* interrupt = nullptr;
thread_local Batch running;  // the innermost batch that this thread runs
PyObject* plain_runner = nullptr;

TensorRequest& request_of(const Slice& slice) { return static_cast<TensorRequest&>(*slice.request); }

int64_t rows_of(const Slice& slice) { return slice.whole() ? request_of(slice).tensor_rows : slice.end - slice.begin; }

void give_back(void* block) noexcept { buffers().give_back(block); }
using Block = std::unique_ptr<void, decltype(&give_back)>;

// The tensors of a batch at one argument position. Its functions gather them into one tensor.
class Column {
 public:
  Column(Batch batch, size_t position, int64_t rows)
      : batch_(batch), index_(position), position_(request_of(batch[0]).signature->positions[position]), shape_{rows} {
    shape_.insert(shape_.end(), position_.row_shape.begin(), position_.row_shape.end());
  }
  bool on_host() const { return position_.device.type != dlpack::kCuda; }  // tensors on other devices are refused
  int64_t bytes() const { return shape_[0] * position_.row_bytes; }

  // Copies the tensors into a block of memory from buffers(). May be called with or without the GIL.
  void gather() {
    block_.reset(buffers().take(static_cast<size_t>(bytes())));
    gather_into(block_.get());
  }

  // Returns the gathered tensor, which owns its memory. Call with the GIL held, after gather.
  py::object tensor() {
    return dlpack::make(block_.release(), give_back, position_.dtype, shape_.data(),
                        static_cast<int32_t>(shape_.size()));
  }

  // Returns the gathered tensor, in page-locked memory. Call with the GIL held; it is released for the copy.
  py::object pinned_tensor() const {
    py::tuple sizes(shape_.size());
    for (size_t i = 0; i < shape_.size(); ++i) sizes[i] = shape_[i];
    const py::handle like = request_of(batch_[0]).inputs()[index_].tensor;
    py::object made =
        py::handle(torch_calls().empty)(sizes, py::arg("dtype") = like.attr("dtype"), py::arg("pin_memory") = true);
    dlpack::Tensor view;
    dlpack::read_plain(made.ptr(), view);
    const WithoutGil released;
    gather_into(view.data);
    return made;
  }

  // Returns the tensor that torch.ops.pymoe.gather_batch gathers on the inputs' device. Call with the GIL held.
  py::object device_tensor() const {
    const TorchCalls& torch = torch_calls();
    if (torch.gather_batch == nullptr) {
      raise(PyExc_RuntimeError, "torch.ops.pymoe.gather_batch is missing: import pymoe");
    }
    // The client's request ends when this work is queued on the stream, and the client may then release its tensors.
    // record_stream prevents reuse of their memory before the stream has read it.
    const py::object stream = py::handle(torch.cuda).attr("current_stream")(position_.device.index);
    const GradMode none(false);
    py::list tensors;
    for (const Slice& slice : batch_) {
      const py::handle tensor = request_of(slice).inputs()[index_].tensor;
      tensor.attr("record_stream")(stream);
      tensors.append(slice.whole() ? borrow(tensor.ptr()) : tensor.attr("narrow")(0, slice.begin, rows_of(slice)));
    }
    return own(PyObject_CallOneArg(torch.gather_batch, tensors.ptr()));
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
  Block block_{nullptr, give_back};
};

// Shows a range in torch.profiler during the object's lifetime. Errors of the profiler are ignored, so the batch runs
// in any case.
class Range {
 public:
  explicit Range(PyObject* name)
      : range_(py::reinterpret_steal<py::object>(PyObject_CallOneArg(torch_calls().record, name))) {
    if (range_) call("__enter__");
    PyErr_Clear();
  }
  ~Range() {
    if (range_) call("__exit__", py::none(), py::none(), py::none());
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  template <typename... Arguments>
  void call(const char* method, const Arguments&... arguments) {
    try {
      range_.attr(method)(arguments...);
    } catch (const py::error_already_set&) {
    }
  }

  const py::object range_;
};

// Gives a batch its own context on any thread: during the object's lifetime, context variables (decimal's precision,
// numpy's error state, web frameworks' variables) have the values of a new thread. The client's values are hidden, and
// values that the batch sets are discarded.
class EmptyContext {
 public:
  EmptyContext() : context_(own(PyContext_New())) {
    if (PyContext_Enter(context_.ptr()) != 0) throw py::error_already_set();
  }
  ~EmptyContext() {
    if (PyContext_Exit(context_.ptr()) != 0) PyErr_Clear();
  }
  EmptyContext(const EmptyContext&) = delete;
  EmptyContext& operator=(const EmptyContext&) = delete;

 private:
  const py::object context_;
};

// Restarts the recursion count: during the object's lifetime the thread's current calls do not count towards the
// recursion limit, so that a client that waits near its limit can run other clients' requests as a worker would. The
// limit may change meanwhile.
class WholeStack {
 public:
  WholeStack() : state_(PyThreadState_Get()), used_(depth()) { add(-used_); }
  ~WholeStack() { add(used_); }
  WholeStack(const WholeStack&) = delete;
  WholeStack& operator=(const WholeStack&) = delete;

 private:
#if PY_VERSION_HEX >= 0x030C0000
  int depth() const { return state_->py_recursion_limit - state_->py_recursion_remaining; }
  void add(int calls) { state_->py_recursion_remaining -= calls; }
#elif PY_VERSION_HEX >= 0x030B0000
  int depth() const { return state_->recursion_limit - state_->recursion_remaining; }
  void add(int calls) { state_->recursion_remaining -= calls; }
#else
  int depth() const { return state_->recursion_depth; }
  void add(int calls) { state_->recursion_depth += calls; }
#endif

  PyThreadState* const state_;
  const int used_;
};

// Marks the batch as the one that this thread runs, during the object's lifetime.
class Running {
 public:
  explicit Running(Batch batch) : outer_(std::exchange(running, batch)) {}
  ~Running() { running = outer_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  const Batch outer_;
};

// Returns the seconds until the latest deadline among the running batch's requests whose outcome may still be read (see
// bind_batches); infinity if one of these has no deadline. Returns none if there are no such requests, as outside a
// batch. Call with the GIL held, like all code that reads `dropped`.
std::optional<double> patience_of_batch() {
  std::optional<Clock::time_point> latest;
  for (const Slice& slice : running) {
    const TensorRequest& request = request_of(slice);
    if (request.dropped) continue;
    if (!request.deadline) return std::numeric_limits<double>::infinity();
    latest = latest ? std::max(*latest, *request.deadline) : *request.deadline;
  }
  if (!latest) return std::nullopt;
  return std::chrono::duration<double>(*latest - Clock::now()).count();
}

// Gives every request of the batch its part of the results, and releases the inputs of requests that are complete.
// Steps that may raise come first, so that all parts are given out or none: a batch that raised may run again.
void hand_out(Batch batch, std::vector<py::object> results) {
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].whole()) continue;
    std::vector<PyObject*>& parts = request_of(batch[i]).parts;
    const size_t before = batch[i].begin == 0 ? 0 : parts.size();
    if (!batch[i].last()) {
      if (before == parts.capacity()) parts.reserve(2 * before + 8);
      continue;
    }
    py::list all;
    for (size_t part = 0; part < before; ++part) all.append(py::handle(parts[part]));
    all.append(results[i]);
    results[i] = cat_structures(all);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    TensorRequest& request = request_of(batch[i]);
    if (!batch[i].last()) {
      request.parts.push_back(results[i].release().ptr());
      continue;
    }
    request.set_outcome(std::move(results[i]), false);
    for (PyObject* part : std::exchange(request.parts, {})) Py_DECREF(part);
    request.drop_inputs();
  }
}

// Raises if the memory, shape, strides or dtype of a tensor has changed since it was submitted: freed memory would be
// read.
void require_unchanged(Batch batch, const char* where) {
  for (const Slice& slice : batch) {
    if (request_of(slice).unchanged()) continue;
    raise(PyExc_RuntimeError,
          "%s: the tensor of a request changed its memory or its shape before its batch ran: no request of the batch "
          "was run",
          where);
  }
}

// Gathering fewer bytes than this takes less time than reacquiring the GIL.
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

// Fails the batch with a Python exception. For an interrupt, throws Interrupted instead.
[[noreturn]] void fail(Batch batch, const py::error_already_set& raised) {
  const py::object error = exception_of(raised);
  // An interrupt on the main thread is meant for the code that waits there, not for the batch.
  if (is_interrupt(error)) {
    Py_XSETREF(interrupt, error.inc_ref().ptr());
    throw runtime::Interrupted();
  }
  for (const Slice& slice : batch) request_of(slice).set_outcome(error, true);
  // Requests may run once more unless an attribute of the exception says that they may not.
  const auto says = py::reinterpret_steal<py::object>(PyObject_GetAttrString(error.ptr(), "pymoe_may_retry"));
  PyErr_Clear();
  throw BatchRaised(says.ptr() != Py_False);
}

// Calls work() through plain_runner, in a plain state. An interrupt that arrives meanwhile is raised afterwards.
void run_elsewhere(const std::function<void()>& work) {
  bool ended = false;
  std::exception_ptr error;
  const py::cpp_function errand([&] {
    try {
      or_stay(work);
    } catch (...) {
      error = std::current_exception();
    }
    ended = true;
  });
  try {
    py::handle runner(plain_runner);
    runner(errand);
  } catch (const py::error_already_set&) {
    if (!ended) throw;
    PyErr_SetInterrupt();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

runtime::BufferPool& buffers() {
  // Never destroyed: a tensor may release its memory after everything else is gone.
  static auto& pool = *new runtime::BufferPool(size_t{256} << 20);
  return pool;
}

void raise_interrupt() { raise(py::reinterpret_steal<py::object>(std::exchange(interrupt, nullptr))); }

PyBatchFunction::PyBatchFunction(std::string name, py::object function, bool pin_memory)
    : where_("TaskPool '" + name + "'"),
      function_(function.release().ptr()),
      range_(py::str("pymoe::" + name + " batch").release().ptr()),
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

  with_gil([&] {
    drop_deferred();
    const auto run_here = [&] {
      try {
        adopt_thread_count();
        require_unchanged(batch, where_.c_str());
        if (!pin_memory_) gather(columns);
        const Range range(range_);
        std::vector<py::object> tensors;
        for (Column& column : columns) {
          tensors.push_back(!column.on_host() ? column.device_tensor()
                            : pin_memory_     ? column.pinned_tensor()
                                              : column.tensor());
        }
        const py::object output = call(batch, tensors);
        tensors.clear();
        hand_out(batch, split_structure(output, rows, where_.c_str()));
      } catch (const py::error_already_set& error) {
        fail(batch, error);
      }
    };
    // Skip the check of this thread's torch state if the result is known: a server's worker is always in a plain state,
    // and a client has already checked its own state. Inside another batch, and on a worker of parallel calls, the
    // state is unknown.
    const bool known_plain = SystemSync::batches_on_this_thread() == 1 && (on_server_thread() || !on_worker_thread());
    try {
      if (known_plain || plain_runner == nullptr || thread_is_plain()) {
        run_here();
      } else {
        run_elsewhere(run_here);
      }
    } catch (const py::error_already_set& error) {
      fail(batch, error);
    }
  });
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

py::object PyBatchFunction::call(Batch batch, const std::vector<py::object>& tensors) const {
  if (function_ == nullptr) raise(PyExc_RuntimeError, "%s: the pool was collected", where_.c_str());
  const py::object function = borrow(function_);
  std::vector<PyObject*> arguments(tensors.size() + 1);
  for (size_t i = 0; i < tensors.size(); ++i) arguments[i + 1] = tensors[i].ptr();
  const Running now(batch);
  const EmptyContext context;
  const WholeStack stack;
  const GradMode enabled(true);
  return own(or_stay([&] {
    return PyObject_Vectorcall(function.ptr(), arguments.data() + 1, tensors.size() | PY_VECTORCALL_ARGUMENTS_OFFSET,
                               nullptr);
  }));
}

void bind_batches(py::module_& module) {
  module.def(
      "set_plain_runner",
      [](const py::typing::Callable<py::object(py::ellipsis)>& function) {
        Py_XSETREF(plain_runner, Py_NewRef(function.ptr()));
      },
      py::arg("function"),
      "Set the function that calls its first argument on a thread in the initial state of threads, for calls from a\n"
      "thread in another state.");
  module.def("patience_of_batch", patience_of_batch,
             "Return the seconds until the latest deadline among the requests of the batch that this thread runs;\n"
             "infinity if one has no deadline. Requests whose futures are gone do not count. None: no request counts,\n"
             "or the thread runs no batch.");
  module.def(
      "buffer_statistics",
      [] {
        const auto now = buffers().statistics();
        return std::pair<int64_t, int64_t>(now.live_blocks, now.cached_bytes);
      },
      "Return the number of memory blocks that batches use now, and the bytes kept for later batches.");
}

}  // namespace pymoe::bindings
