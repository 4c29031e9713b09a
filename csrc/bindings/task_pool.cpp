#include "bindings/task_pool.h"

#include <array>
#include <cmath>
#include <new>

#include "bindings/batch.h"
#include "bindings/deferred.h"
#include "bindings/future.h"
#include "bindings/helping.h"
#include "bindings/outcome.h"
#include "bindings/parameter_lock.h"
#include "bindings/pool_statistics.h"
#include "bindings/process.h"
#include "bindings/torch_calls.h"
#include "bindings/types.h"

namespace pymoe::bindings {
namespace {

using runtime::Help;

// What is behind a TaskPool object.
struct State {
  std::string where;  // "TaskPool 'name'"
  std::shared_ptr<PyBatchFunction> function;
  std::shared_ptr<Pool> pool;
  Signatures signatures;
  double head_start;  // seconds
  bool raise_when_full;
  bool pin_memory;
  int created;

  // A thread that helps runs the batch on its own current device and stream.
  bool may_help(const Signature& signature) const {
    return !pin_memory && signature.positions[0].device.type == dlpack::kCpu;
  }
};

struct PoolObject {
  PyObject_HEAD PyObject* weak_references;
  State* state;  // null until _setup
};

PyTypeObject* pool_type = nullptr;
PyObject* queue_full = nullptr;

State& state_of(PyObject* object) {
  State* state = reinterpret_cast<PoolObject*>(object)->state;
  if (state == nullptr) raise(PyExc_RuntimeError, "TaskPool: __init__ was not called");
  return *state;
}

SystemSync::Duration to_duration(double seconds, const char* name) {
  if (!(std::abs(seconds) <= 1e8)) {
    raise(PyExc_ValueError, "TaskPool: %s must be a number of seconds up to a hundred million", name);
  }
  return std::chrono::duration_cast<SystemSync::Duration>(std::chrono::duration<double>(seconds));
}

std::vector<Position> read_schema(PyObject* schema) {
  std::vector<Position> positions;
  const Ref tensors = Ref::checked(PySequence_Fast(schema, "TaskPool: schema must be a sequence of tensors"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors.get()); ++i) {
    dlpack::Tensor tensor;
    const Ref kept = dlpack::read(PySequence_Fast_GET_ITEM(tensors.get(), i), tensor, "TaskPool: schema", i);
    positions.push_back(
        {tensor.dtype, tensor.device, {tensor.shape + 1, tensor.shape + tensor.ndim}, tensor.row_bytes()});
  }
  return positions;
}

PyObject* setup(PyObject* object, PyObject* args, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"process_func",   "name",   "min_batch_size", "max_batch_size", "timeout",
                                  "capacity",       "linger", "priority",       "isolate",        "raise_when_full",
                                  "exclusive_with", "schema", "pin_memory",     nullptr};
    PyObject *function, *timeout = Py_None, *exclusive_with = Py_None, *schema = Py_None;
    const char* name;
    long long min_batch_size = 1, max_batch_size = 4096, capacity = 65536;
    double linger = 0.005, priority = 0;
    int isolate = 0, raise_when_full = 0, pin_memory = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O$sLLOLddppOOp:_setup", const_cast<char**>(names), &function,
                                     &name, &min_batch_size, &max_batch_size, &timeout, &capacity, &linger, &priority,
                                     &isolate, &raise_when_full, &exclusive_with, &schema, &pin_memory)) {
      return nullptr;
    }
    auto* self = reinterpret_cast<PoolObject*>(object);
    if (self->state != nullptr) raise(PyExc_RuntimeError, "TaskPool: __init__ was called twice");
    if (!PyCallable_Check(function)) {
      raise(PyExc_TypeError, "TaskPool: process_func must be callable, got %s", Py_TYPE(function)->tp_name);
    }
    dlpack::load();
    torch_calls();
    runtime::BatchingOptions<SystemSync> options;
    options.min_batch_size = min_batch_size;
    options.max_batch_size = max_batch_size;
    options.capacity = capacity;
    options.linger = to_duration(linger, "linger");
    options.isolate = isolate;
    if (timeout != Py_None) {
      const double seconds = PyFloat_AsDouble(timeout);
      if (seconds == -1.0 && PyErr_Occurred()) return nullptr;
      options.timeout = to_duration(seconds, "timeout");
    }
    to_duration(priority, "priority");
    std::optional<std::vector<Position>> expected;
    if (schema != Py_None) expected = read_schema(schema);
    auto strand = exclusive_with == Py_None ? std::make_shared<runtime::Strand<SystemSync>>()
                                            : pool_of(exclusive_with, "TaskPool: exclusive_with")->strand();
    auto batches = std::make_shared<PyBatchFunction>(name, Ref::borrow(function), pin_memory);
    auto pool = Pool::create(name, options, batches, std::move(strand));
    self->state =
        new State{"TaskPool '" + std::string(name) + "'", std::move(batches), std::move(pool),
                  Signatures(name, std::move(expected)),  priority,           static_cast<bool>(raise_when_full),
                  static_cast<bool>(pin_memory),          generation()};
    Py_RETURN_NONE;
  });
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
      raise(PyExc_TypeError, "TaskPool.submit_task: tensors, timeout and priority are taken, got %R", name);
    }
    if (is_timeout && values[i] == Py_None) continue;
    const double value = PyFloat_AsDouble(values[i]);
    if (value == -1.0 && PyErr_Occurred()) throw ErrorSet();
    if (is_timeout) {
      options.timeout = value;
    } else {
      options.priority = value;
    }
  }
  return options;
}

// The tensors of one call, read and kept.
class Arguments {
 public:
  Arguments(const State& state, PyObject* const* args, Py_ssize_t count) : count_(static_cast<size_t>(count)) {
    if (count == 0) raise(PyExc_ValueError, "%s: a request has at least one tensor", state.where.c_str());
    if (count_ > few_.size()) {
      many_ = std::make_unique<dlpack::Tensor[]>(count_);
      many_inputs_ = std::make_unique<TensorRequest::Input[]>(count_);
    }
    const char* where = state.where.c_str();
    for (; kept_ < count_; ++kept_) {
      dlpack::Tensor& tensor = tensors()[kept_];
      Ref owned = dlpack::read(args[kept_], tensor, where, static_cast<Py_ssize_t>(kept_));
      inputs()[kept_] = {owned.release(), tensor.begin()};
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
    raise(PyExc_ValueError, "%s: the tensors of a request have equally many rows, got %lld and, in tensor %zu, %lld",
          where, static_cast<long long>(tensors()[0].shape[0]), position,
          static_cast<long long>(tensors()[position].shape[0]));
  }

  const size_t count_;
  size_t kept_ = 0;
  std::array<dlpack::Tensor, 4> few_;
  std::array<TensorRequest::Input, 4> few_inputs_;
  std::unique_ptr<dlpack::Tensor[]> many_;
  std::unique_ptr<TensorRequest::Input[]> many_inputs_;
};

// The queue is full: waits for room, or refuses.
void submit_slowly(const State& state, const std::shared_ptr<TensorRequest>& request) {
  if (state.raise_when_full) {
    state.pool->reject();
    raise(queue_full, "%s: the queue is full (capacity %lld)", state.where.c_str(),
          static_cast<long long>(state.pool->options().capacity));
  }
  const auto pool = state.pool;
  const Help help = help_of_this_thread(state.may_help(*request->signature), request->deadline.has_value());
  try {
    const RegisteredWait registered(*pool, nullptr, request->deadline.has_value());
    const auto submitted = [&](Clock::time_point until) { return pool->try_submit(request, until, help); };
    if (wait_interruptibly(submitted, request->deadline)) return;
  } catch (const runtime::Interrupted&) {
    set_error(take_interrupt().get());
    throw ErrorSet();
  }
  pool->reject();
  request->claim();
  request->complete(std::make_exception_ptr(
      runtime::DeadlineExceeded(state.where + ": the queue had no room for the request in time")));
}

// Memory bounds the number of batches that a request takes, but not where its rows take none.
void require_elements(const State& state, const Signature& signature, int64_t rows) {
  for (const Position& position : signature.positions) {
    if (position.row_bytes > 0) return;
  }
  raise(PyExc_ValueError, "%s: a request of rows without elements has at most max_batch_size rows (%lld), got %lld",
        state.where.c_str(), static_cast<long long>(state.pool->options().max_batch_size),
        static_cast<long long>(rows));
}

// Null if the queue is full and the pool waits for room, but not `may_wait`.
std::shared_ptr<TensorRequest> submit(State& state, PyObject* const* args, Py_ssize_t count, PyObject* names,
                                      bool may_wait) {
  require_this_process(state.created, state.where.c_str(), "TaskPool");
  drop_deferred();
  const Options options = names != nullptr ? read_options(args + count, names) : Options();
  const auto deadline = deadline_after(options.timeout);
  const double head_start = state.head_start + options.priority;
  Arguments arguments(state, args, count);
  auto signature = state.signatures.find(arguments.tensors(), arguments.count());
  const int64_t rows = arguments.tensors()[0].shape[0];
  if (rows > state.pool->options().max_batch_size) require_elements(state, *signature, rows);
  auto request = std::make_shared<TensorRequest>(
      std::move(signature), arguments.inputs(), rows, deadline,
      head_start == 0 ? SystemSync::Duration::zero() : to_duration(head_start, "priority"));
  // With the GIL: this takes no longer than to let go of it and to come back. It waits for nothing but the strand's
  // lock, under which nobody asks for the GIL.
  if (state.pool->try_submit(request, SystemSync::Time::min())) return request;
  if (!may_wait && !state.raise_when_full) return nullptr;
  submit_slowly(state, request);
  return request;
}

template <bool kMayWait>
PyObject* submit_task(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&] {
    State& state = state_of(object);
    auto request = submit(state, args, count, names, kMayWait);
    if (!request) return Py_NewRef(Py_None);
    const bool may_help = state.may_help(*request->signature);
    return make_future(std::move(request), state.pool, may_help).release();
  });
}

// --- the rest ---

PyObject* statistics(PyObject* object, PyObject*) {
  return guarded([&] { return snapshot(state_of(object).pool->statistics()).release(); });
}

PyObject* idle_is_known(PyObject* object, PyObject*) {
  return guarded([&] {
    state_of(object).pool->tell_idle();
    return Py_NewRef(Py_None);
  });
}

PyObject* is_exclusive_with(PyObject* object, PyObject* other) {
  return guarded([&] {
    return PyBool_FromLong(state_of(object).pool->strand() == pool_of(other, "_is_exclusive_with")->strand());
  });
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const auto* self = reinterpret_cast<PoolObject*>(object);
  Py_VISIT(Py_TYPE(object));
  if (self->state != nullptr) Py_VISIT(self->state->function->function());
  return 0;
}

int clear(PyObject* object) {
  const auto* self = reinterpret_cast<PoolObject*>(object);
  if (self->state != nullptr) self->state->function->clear();
  return 0;
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<PoolObject*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (self->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  // In the child of a fork nothing of the parent's is destroyed: its locks may be held for ever.
  if (self->state != nullptr && self->state->created == generation()) {
    PyObject *error_type, *error, *trace;
    PyErr_Fetch(&error_type, &error, &trace);
    self->state->pool->close();
    self->state->pool->cancel_all("the request was cancelled: its pool has gone before it had started");
    clear(object);
    delete self->state;
    PyErr_Restore(error_type, error, trace);
  }
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"_setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(setup)), METH_VARARGS | METH_KEYWORDS,
     "_setup(self: pymoe._runtime.TaskPool, process_func: collections.abc.Callable[..., typing.Any], *, name: str, "
     "min_batch_size: int, max_batch_size: int, timeout: float | None, capacity: int, linger: float, priority: float, "
     "isolate: bool, raise_when_full: bool, exclusive_with: pymoe._runtime.TaskPool | None, "
     "schema: collections.abc.Sequence[typing.Any] | None, pin_memory: bool) -> None\n\n"
     "Once, from the constructor. ``schema``: tensors like those of a request."},
    {"_is_exclusive_with", is_exclusive_with, METH_O,
     "_is_exclusive_with(self: pymoe._runtime.TaskPool, other: pymoe._runtime.TaskPool) -> bool\n\n"
     "True if batches of the two never overlap; so with itself."},
    {"_idle_is_known", idle_is_known, METH_NOARGS,
     "_idle_is_known(self: pymoe._runtime.TaskPool) -> None\n\n"
     "Who waits has been told that no runtime serves the pool."},
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
     "The tensors must not change until the request is done. One whose memory, shape or strides did (``x.data = y``,\n"
     "``x.resize_()``) when its batch starts fails that batch with a RuntimeError, or with ``isolate`` its request\n"
     "alone; a change while the batch is being gathered is not guarded against.\n\n"
     "Args:\n"
     "    tensors: one for each argument of ``process_func``; equally many rows each, in the first dimension.\n"
     "    timeout: seconds within which it must have started, or its future raises TimeoutError and it never runs.\n"
     "    priority: head start in seconds, beside the pool's own.\n\n"
     "Raises:\n"
     "    ValueError: no tensor, rows that differ, a shape that the schema forbids, or more rows without an element "
     "than a\n"
     "        batch may have.\n"
     "    TypeError: something that cannot be part of a batch, or a dtype that the schema forbids.\n"
     "    QueueFull: the queue is full, in a pool that raises then instead of waiting.\n"
     "    RuntimeError: the runtime was shut down, or the pool belongs to the parent of this process."},
    {"_statistics", statistics, METH_NOARGS,
     "_statistics(self: pymoe._runtime.TaskPool) -> dict[str, typing.Any]\n\n"
     "The pool's counters, for pymoe.runtime.monitoring.statistics."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

std::shared_ptr<Pool> pool_of(PyObject* object, const char* where) {
  if (!PyObject_TypeCheck(object, pool_type)) {
    raise(PyExc_TypeError, "%s must be a TaskPool, got %s", where, Py_TYPE(object)->tp_name);
  }
  const State& state = state_of(object);
  require_this_process(state.created, where, "TaskPool");
  return state.pool;
}

void add_task_pool_type(PyObject* module) {
  queue_full = Ref::checked(PyErr_NewExceptionWithDoc("pymoe._runtime.QueueFull", "A pool's queue has no room.",
                                                      PyExc_RuntimeError, nullptr))
                   .release();
  if (PyModule_AddObjectRef(module, "QueueFull", queue_full) != 0) throw ErrorSet();

  pool_type = add_type<PoolObject>(module, {.name = "pymoe._runtime.TaskPool",
                                            .doc = "The native half of pymoe.runtime.TaskPool.",
                                            .flags = Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
                                            .dealloc = dealloc,
                                            .traverse = traverse,
                                            .clear = clear,
                                            .methods = methods});
}

}  // namespace pymoe::bindings
