// TaskPool of pymoe._runtime: Python clients submit tensors here. submit_task uses CPython's own calling
// convention, because pybind11 would spend more time on the arguments than the queue takes.
#include <pybind11/typing.h>

#include <array>
#include <cmath>

#include "bindings/batch.h"
#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/future.h"
#include "bindings/parameter_lock.h"
#include "bindings/process.h"
#include "bindings/request.h"
#include "bindings/torch_calls.h"

namespace pymoe::bindings {
namespace {

using runtime::Help;

PyTypeObject* pool_type = nullptr;
PyObject* queue_full = nullptr;

SystemSync::Duration to_duration(double seconds, const char* name) {
  if (!(std::abs(seconds) <= 1e8)) {
    raise(PyExc_ValueError, "TaskPool: %s must be a number of seconds up to a hundred million", name);
  }
  return std::chrono::duration_cast<SystemSync::Duration>(std::chrono::duration<double>(seconds));
}

py::object require_callable(const py::object& function) {
  if (PyCallable_Check(function.ptr())) return function;
  raise(PyExc_TypeError, "TaskPool: process_func must be callable, got %s", Py_TYPE(function.ptr())->tp_name);
}

std::optional<std::vector<Position>> read_schema(const std::optional<py::sequence>& schema) {
  dlpack::load();
  if (!schema) return std::nullopt;
  std::vector<Position> positions;
  for (py::handle like : *schema) {
    dlpack::Tensor tensor;
    const auto place = static_cast<Py_ssize_t>(positions.size());
    const py::object kept = dlpack::read(like.ptr(), tensor, "TaskPool: schema", place);
    positions.emplace_back(tensor);
  }
  return positions;
}

// The native object behind a TaskPool.
class PyTaskPool {
 public:
  PyTaskPool(const py::object& process_func, const std::string& name, int64_t min_batch_size, int64_t max_batch_size,
             std::optional<double> timeout, int64_t capacity, double linger, double priority, bool isolate,
             bool raise_when_full, const py::object& exclusive_with, const std::optional<py::sequence>& schema,
             bool pin_memory, std::optional<double> request_timeout)
      : where("TaskPool '" + name + "'"),
        function(std::make_shared<PyBatchFunction>(name, require_callable(process_func), pin_memory)),
        signatures(name, read_schema(schema)),
        priority(priority),
        raise_when_full(raise_when_full),
        pin_memory(pin_memory),
        request_timeout(request_timeout) {
    torch_calls();
    runtime::BatchingOptions<SystemSync> options;
    options.min_batch_size = min_batch_size;
    options.max_batch_size = max_batch_size;
    options.capacity = capacity;
    options.linger = to_duration(linger, "linger");
    options.isolate = isolate;
    if (request_timeout && std::isnan(*request_timeout)) {
      raise(PyExc_ValueError, "TaskPool: request_timeout must be a number of seconds, got nan");
    }
    if (timeout) options.timeout = to_duration(*timeout, "timeout");
    to_duration(priority, "priority");
    auto strand = exclusive_with.is_none() ? std::make_shared<runtime::Strand<SystemSync>>()
                                           : pool_of(exclusive_with.ptr(), "TaskPool: exclusive_with")->strand();
    pool = Pool::create(name, options, function, std::move(strand));
  }

  // In a forked child, keep the parent's objects for ever: their locks may never be released.
  ~PyTaskPool() {
    if (created != generation()) {
      new std::pair(std::move(function), std::move(pool));
      return;
    }
    pool->close();
    pool->cancel_all("the request was cancelled: its pool has gone before it had started");
    function->clear();
  }
  PyTaskPool(const PyTaskPool&) = delete;
  PyTaskPool& operator=(const PyTaskPool&) = delete;

  // Returns true if a waiting client may run the batch: only if no GPU is involved, because the batch would use the
  // client's current device and stream.
  bool may_help(const Signature& signature) const { return !pin_memory && signature.on_cpu; }

  const std::string where;  // for errors
  std::shared_ptr<PyBatchFunction> function;
  std::shared_ptr<Pool> pool;
  Signatures signatures;
  const double priority;  // seconds
  const bool raise_when_full;
  const bool pin_memory;
  const std::optional<double> request_timeout;  // for requests without a timeout
  const int created = generation();
};

// Shows the pool's function, whose closure may refer to the pool, to the garbage collector.
void let_collector_in(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (py::detail::is_holder_constructed(self)) Py_VISIT(py::cast<PyTaskPool&>(py::handle(self)).function->function());
    return 0;
  };
  type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<PyTaskPool&>(py::handle(self)).function->clear();
    return 0;
  };
}

// Returns the native pool of a Python TaskPool. Throws a RuntimeError if __init__ was not called. (pybind11's own
// lookup takes longer, and does not check this.)
PyTaskPool& native(PyObject* object) {
  const py::detail::value_and_holder held = reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder();
  if (!held.holder_constructed()) raise(PyExc_RuntimeError, "TaskPool: __init__ was not called");
  return *held.value_ptr<PyTaskPool>();
}

// --- submitting ---

struct Options {
  std::optional<double> timeout;
  double priority = 0;
};

Options read_options(PyObject* const* values, PyObject* names) {
  Options options;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    const bool is_timeout = PyUnicode_CompareWithASCIIString(name, "timeout") == 0;
    if (!is_timeout && PyUnicode_CompareWithASCIIString(name, "priority") != 0) {
      raise(PyExc_TypeError, "TaskPool.submit_task: expected tensors, timeout and priority, got %R", name);
    }
    if (is_timeout && values[i] == Py_None) continue;
    const double value = PyFloat_AsDouble(values[i]);
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    if (is_timeout) {
      options.timeout = value;
    } else {
      options.priority = value;
    }
  }
  return options;
}

// Reads the tensors of one call, and keeps references to them.
class Arguments {
 public:
  Arguments(const PyTaskPool& state, PyObject* const* args, Py_ssize_t count) : count_(static_cast<size_t>(count)) {
    if (count == 0) raise(PyExc_ValueError, "%s: a request has at least one tensor", state.where.c_str());
    if (count_ > few_.size()) {
      many_ = std::make_unique<dlpack::Tensor[]>(count_);
      many_inputs_ = std::make_unique<TensorRequest::Input[]>(count_);
    }
    const char* where = state.where.c_str();
    for (; kept_ < count_; ++kept_) {
      dlpack::Tensor& tensor = tensors()[kept_];
      py::object owned = dlpack::read(args[kept_], tensor, where, static_cast<Py_ssize_t>(kept_));
      inputs()[kept_] = {owned.release().ptr(), tensor.begin()};
      if (tensor.ndim == 0 || tensor.shape[0] != tensors()[0].shape[0]) {
        ++kept_;
        refuse(where, kept_ - 1);
      }
    }
  }
  ~Arguments() {
    for (size_t i = 0; i < kept_; ++i) Py_XDECREF(inputs()[i].tensor);
  }

  dlpack::Tensor* tensors() { return many_ ? many_.get() : few_.data(); }
  TensorRequest::Input* inputs() { return many_ ? many_inputs_.get() : few_inputs_.data(); }
  size_t count() const { return count_; }

 private:
  [[noreturn]] void refuse(const char* where, size_t position) {
    if (tensors()[position].ndim == 0) {
      raise(PyExc_ValueError, "%s: tensor %zu has no dimension of rows", where, position);
    }
    raise(PyExc_ValueError,
          "%s: all tensors of a request must have as many rows as the first, %lld, got %lld in tensor %zu", where,
          static_cast<long long>(tensors()[0].shape[0]), static_cast<long long>(tensors()[position].shape[0]),
          position);
  }

  const size_t count_;
  size_t kept_ = 0;
  std::array<dlpack::Tensor, 4> few_;
  std::array<TensorRequest::Input, 4> few_inputs_;
  std::unique_ptr<dlpack::Tensor[]> many_;
  std::unique_ptr<TensorRequest::Input[]> many_inputs_;
};

// Submits a request for which the queue had no room. Waits for room or, with raise_when_full, throws. If the deadline
// passes before there is room, ends the request with DeadlineExceeded.
void submit_slowly(const PyTaskPool& state, const std::shared_ptr<TensorRequest>& request) {
  if (state.raise_when_full) {
    state.pool->reject();
    raise(queue_full, "%s: the queue is full (capacity %lld)", state.where.c_str(),
          static_cast<long long>(state.pool->options().capacity));
  }
  const auto pool = state.pool;
  const Help help = help_of_this_thread(state.may_help(*request->signature), request->deadline.has_value());
  try {
    const RegisteredWait registered(*pool, nullptr, request->deadline.has_value());
    const auto submitted = [&](Clock::time_point until) { return pool->submit(request, until, help); };
    if (wait_interruptibly(submitted, request->deadline)) return;
  } catch (const runtime::Interrupted&) {
    raise_interrupt();
  }
  pool->reject();
  request->claim();
  request->complete(std::make_exception_ptr(
      runtime::DeadlineExceeded(state.where + ": the queue had no room for the request in time")));
}

// Called for requests that are larger than a batch: rejects those without any bytes, because nothing would limit the
// number of their batches.
void require_elements(const PyTaskPool& state, const Signature& signature, int64_t rows) {
  for (const Position& position : signature.positions) {
    if (position.row_bytes > 0) return;
  }
  raise(PyExc_ValueError, "%s: a request of rows without elements has at most max_batch_size rows (%lld), got %lld",
        state.where.c_str(), static_cast<long long>(state.pool->options().max_batch_size),
        static_cast<long long>(rows));
}

// Queues a request and returns it. If the queue is full and the pool waits for room instead of raising, returns null
// unless `may_wait` is true.
std::shared_ptr<TensorRequest> submit(PyTaskPool& state, PyObject* const* args, Py_ssize_t count, PyObject* names,
                                      bool may_wait) {
  require_this_process(state.created, state.where.c_str(), "TaskPool");
  drop_deferred();
  const Options options = names != nullptr ? read_options(args + count, names) : Options();
  const auto deadline = deadline_after(options.timeout ? options.timeout : state.request_timeout);
  const double priority = state.priority + options.priority;
  Arguments arguments(state, args, count);
  auto signature = state.signatures.find(arguments.tensors(), arguments.count());
  const int64_t rows = arguments.tensors()[0].shape[0];
  if (rows > state.pool->options().max_batch_size) require_elements(state, *signature, rows);
  auto request =
      std::make_shared<TensorRequest>(std::move(signature), arguments.inputs(), rows, deadline,
                                      priority == 0 ? SystemSync::Duration::zero() : to_duration(priority, "priority"));
  // Keep the GIL: releasing and reacquiring it takes longer than this call, which waits only for the strand's lock. No
  // thread asks for the GIL while it holds that lock.
  if (state.pool->submit(request, SystemSync::Time::min())) return request;
  if (!may_wait && !state.raise_when_full) return nullptr;
  submit_slowly(state, request);
  return request;
}

template <bool kMayWait>
PyObject* submit_task(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&] {
    PyTaskPool& state = native(object);
    auto request = submit(state, args, count, names, kMayWait);
    if (!request) return Py_NewRef(Py_None);
    const bool may_help = state.may_help(*request->signature);
    return make_future(std::move(request), state.pool, may_help).release().ptr();
  });
}

PyMethodDef submit_methods[] = {
    {"_try_submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(submit_task<false>)),
     METH_FASTCALL | METH_KEYWORDS,
     "_try_submit(self: pymoe._runtime.TaskPool, *tensors: typing.Any, timeout: float | None = None, "
     "priority: float = 0.0) -> pymoe._runtime.RequestFuture | None\n\n"
     "submit_task, but None where that would wait for room."},
    {"submit_task", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(submit_task<true>)),
     METH_FASTCALL | METH_KEYWORDS,
     "submit_task(self: pymoe._runtime.TaskPool, *tensors: typing.Any, timeout: float | None = None, "
     "priority: float = 0.0) -> pymoe._runtime.RequestFuture\n\n"
     "Queue a request and return its future.\n\n"
     "The tensors must not change until the request is done. If the memory, shape or strides of one have changed\n"
     "when its batch starts (``x.data = y``, ``x.resize_()``), the batch fails with a RuntimeError, or with\n"
     "``isolate`` only this request. Changes while the batch is being gathered are not noticed.\n\n"
     "Args:\n"
     "    tensors: one for each argument of ``process_func``, all with the same number of rows (dimension 0).\n"
     "    timeout: seconds within which the request must start; if it does not, its future raises TimeoutError.\n"
     "    priority: head start in seconds, added to the priority of the pool.\n\n"
     "Raises:\n"
     "    ValueError: no tensor, rows that differ, a shape that the schema forbids, or more rows without an element "
     "than a\n"
     "        batch may have.\n"
     "    TypeError: something that cannot be part of a batch, or a dtype that the schema forbids.\n"
     "    QueueFull: the queue is full, in a pool that raises then instead of waiting.\n"
     "    RuntimeError: the runtime was shut down, or the pool belongs to the parent of this process."},
};

// --- statistics ---

py::tuple histogram(const runtime::Histogram& histogram) {
  const auto values = histogram.snapshot();
  return py::make_tuple(py::tuple(py::cast(values.counts)), values.sum, values.max);
}

// Returns the statistics by name: integers, and histograms as (counts of the buckets, sum, largest value).
py::typing::Dict<py::str, py::object> snapshot(const runtime::PoolStatistics& s) {
  const std::pair<const char*, const runtime::Counter*> counters[] = {
      {"submitted", &s.submitted}, {"completed", &s.completed}, {"failed", &s.failed}, {"cancelled", &s.cancelled},
      {"expired", &s.expired},     {"rejected", &s.rejected},   {"queued", &s.queued}, {"queued_rows", &s.queued_rows},
      {"running", &s.running},     {"batches", &s.batches},     {"rows", &s.rows}};
  py::dict found;
  for (const auto& [name, counter] : counters) found[name] = counter->value();
  found["batch_rows"] = histogram(s.batch_rows);
  found["wait_ns"] = histogram(s.wait_ns);
  found["latency_ns"] = histogram(s.latency_ns);
  found["process_ns"] = histogram(s.process_ns);
  return found;
}

}  // namespace

std::shared_ptr<Pool> pool_of(PyObject* object, const char* where) {
  if (!PyObject_TypeCheck(object, pool_type)) {
    raise(PyExc_TypeError, "%s must be a TaskPool, got %s", where, Py_TYPE(object)->tp_name);
  }
  const PyTaskPool& found = native(object);
  require_this_process(found.created, where, "TaskPool");
  return found.pool;
}

void bind_task_pool(py::module_& module) {
  queue_full = own(PyErr_NewExceptionWithDoc("pymoe._runtime.QueueFull", "A pool's queue has no room.",
                                             PyExc_RuntimeError, nullptr))
                   .release()
                   .ptr();
  module.attr("QueueFull") = py::handle(queue_full);

  py::class_<PyTaskPool> type(module, "TaskPool", "The native half of pymoe.runtime.TaskPool.",
                              py::custom_type_setup(let_collector_in));
  pool_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  using Seconds = std::optional<double>;
  type.def(py::init<const py::object&, const std::string&, int64_t, int64_t, Seconds, int64_t, double, double, bool,
                    bool, const py::object&, const std::optional<py::sequence>&, bool, Seconds>(),
           py::arg("process_func"), py::kw_only(), py::arg("name"), py::arg("min_batch_size"),
           py::arg("max_batch_size"), py::arg("timeout"), py::arg("capacity"), py::arg("linger"), py::arg("priority"),
           py::arg("isolate"), py::arg("raise_when_full"), py::arg("exclusive_with"), py::arg("schema"),
           py::arg("pin_memory"), py::arg("request_timeout"), "``schema``: tensors like those of a request.");
  for (PyMethodDef& method : submit_methods) type.attr(method.ml_name) = own(PyDescr_NewMethod(pool_type, &method));
  type.def(
          "_is_exclusive_with",
          [](const py::object& self, const py::object& other) {
            return pool_of(self.ptr(), "_is_exclusive_with")->strand() ==
                   pool_of(other.ptr(), "_is_exclusive_with")->strand();
          },
          py::arg("other"), "Return whether batches of the two pools never overlap; True for the pool itself.")
      .def(
          "_idle_is_known", [](const py::object& self) { native(self.ptr()).pool->tell_idle(); },
          "Record that a warning has said that no runtime serves the pool, so that it is not repeated.")
      .def(
          "_room",
          [](const py::object& self) {
            const auto wait = [pool = native(self.ptr()).pool] {
              wait_interruptibly([&](Clock::time_point until) { return pool->wait_for_room(until); });
            };
            return py::typing::Callable<void()>(py::cpp_function(wait));
          },
          "Return a function that waits until the queue has room, which another client may take, and raises\n"
          "RuntimeError once the pool is closed. It does not keep the pool.")
      .def(
          "_statistics", [](const py::object& self) { return snapshot(native(self.ptr()).pool->statistics()); },
          "Return the pool's counters, for pymoe.runtime.monitoring.statistics.");
}

}  // namespace pymoe::bindings
