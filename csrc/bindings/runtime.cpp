#include "bindings/runtime.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "bindings/outcome.h"
#include "bindings/process.h"
#include "bindings/task_pool.h"
#include "bindings/types.h"
#include "runtime/executor.h"

namespace pymoe::bindings {
namespace {

using runtime::Stop;

class StoppableExecutor final : public Stoppable {
 public:
  explicit StoppableExecutor(int workers) : executor(workers, serve_with_thread_state) {}
  void cancel() override { executor.request_stop(Stop::kCancel); }
  bool stopped_by(Clock::time_point until) override { return executor.wait_stopped_until(until); }
  bool on_worker() const override { return executor.on_worker(); }

  runtime::Executor<SystemSync> executor;
};

struct State {
  Ref pools;                                    // a tuple
  std::shared_ptr<StoppableExecutor> executor;  // null while it does not run
  int workers;
  int created;
};

struct RuntimeObject {
  PyObject_HEAD PyObject* weak_references;
  State* state;  // null until _setup
};

State* state_of(PyObject* object, const char* where) {
  State* state = reinterpret_cast<RuntimeObject*>(object)->state;
  if (state == nullptr) raise(PyExc_RuntimeError, "Runtime: __init__ was not called");
  require_this_process(state->created, where, "Runtime");
  return state;
}

PyObject* setup(PyObject* object, PyObject* args, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"pools", "workers", nullptr};
    PyObject* pools;
    int workers;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Oi:_setup", const_cast<char**>(names), &pools, &workers)) {
      return nullptr;
    }
    if (workers < 1) raise(PyExc_ValueError, "Runtime: num_workers must be at least 1, got %d", workers);
    auto* self = reinterpret_cast<RuntimeObject*>(object);
    if (self->state != nullptr) raise(PyExc_RuntimeError, "Runtime: __init__ was called twice");
    Ref tuple = Ref::checked(PySequence_Tuple(pools));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.get()); ++i) {
      pool_of(PyTuple_GET_ITEM(tuple.get(), i), "Runtime: a pool");
    }
    self->state = new State{std::move(tuple), nullptr, workers, generation()};
    Py_RETURN_NONE;
  });
}

using StrandPointer = std::shared_ptr<runtime::Strand<SystemSync>>;
using PoolPointers = std::vector<std::shared_ptr<Pool>>;

PoolPointers pools_in(PyObject* tuple) {
  PoolPointers pools;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    pools.push_back(pool_of(PyTuple_GET_ITEM(tuple, i), "Runtime: a pool"));
  }
  return pools;
}

// Each once.
std::vector<StrandPointer> strands_of(const PoolPointers& pools) {
  std::vector<StrandPointer> strands;
  for (const auto& pool : pools) {
    if (std::find(strands.begin(), strands.end(), pool->strand()) == strands.end()) strands.push_back(pool->strand());
  }
  return strands;
}

// Attaches the strands of the pools. False if one is served elsewhere: then all are as they were.
bool serve(runtime::Executor<SystemSync>& executor, const PoolPointers& pools) {
  const std::vector<StrandPointer> strands = strands_of(pools);
  PoolPointers closed;
  for (const auto& pool : pools) {
    if (pool->closed()) closed.push_back(pool);
  }
  size_t attached = 0;
  try {
    for (; attached < strands.size(); ++attached) executor.attach(strands[attached]);
    return true;
  } catch (const runtime::StoppedError&) {
  } catch (const std::logic_error&) {
  }
  const auto end = strands.begin() + static_cast<std::ptrdiff_t>(attached);
  for (auto strand = strands.begin(); strand != end; ++strand) executor.detach(*strand);
  for (const auto& pool : closed) {  // attaching had opened them
    if (std::find(strands.begin(), end, pool->strand()) == end) continue;
    pool->close();
    pool->cancel_all("the request was cancelled: the start of its runtime was refused");
  }
  return false;
}

PyObject* start(PyObject* object, PyObject*) {
  return guarded([&] {
    State* self = state_of(object, "Runtime.start");
    if (self->executor) return Py_NewRef(Py_None);
    const PoolPointers pools = pools_in(self->pools.get());
    const int workers = self->workers;
    std::shared_ptr<StoppableExecutor> executor;
    bool all = true;
    {
      const WithoutGil released;
      executor = std::make_shared<StoppableExecutor>(workers);
      keep_until_stopped(executor);
      all = serve(executor->executor, pools);
    }
    if (!all) {
      {
        const WithoutGil released;
        executor->cancel();
      }
      wait_interruptibly([&](Clock::time_point until) { return executor->stopped_by(until); });
      raise(PyExc_RuntimeError,
            "Runtime.start: one of its pools is served by another Runtime, which was not shut down");
    }
    self->executor = std::move(executor);
    return Py_NewRef(Py_None);
  });
}

PyObject* shutdown(PyObject* object, PyObject* args, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"drain", nullptr};
    int drain = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|p:shutdown", const_cast<char**>(names), &drain)) return nullptr;
    State* self = state_of(object, "Runtime.shutdown");
    const auto executor = self->executor;
    if (!executor) return Py_NewRef(Py_None);
    if (executor->on_worker()) {
      raise(PyExc_RuntimeError, "Runtime.shutdown: a worker cannot wait for the end of its own runtime");
    }
    {
      const WithoutGil released;
      executor->executor.request_stop(drain ? Stop::kDrain : Stop::kCancel);
    }
    wait_interruptibly([&](Clock::time_point until) { return executor->stopped_by(until); });
    if (self->executor == executor) self->executor.reset();
    return Py_NewRef(Py_None);
  });
}

// The pools of a tuple that is the only argument.
PoolPointers pools_argument(PyObject* tuple) {
  if (!PyTuple_Check(tuple)) raise(PyExc_TypeError, "Runtime: pools must be a tuple");
  return pools_in(tuple);
}

PyObject* replace_pools(PyObject* object, PyObject* tuple) {
  return guarded([&] {
    State* self = state_of(object, "Runtime");
    pools_argument(tuple);
    self->pools = Ref::borrow(tuple);
    return Py_NewRef(Py_None);
  });
}

PyObject* serve_too(PyObject* object, PyObject* tuple) {
  return guarded([&] {
    State* self = state_of(object, "Runtime.add");
    const PoolPointers pools = pools_argument(tuple);
    const auto executor = self->executor;
    if (!executor) return Py_NewRef(Py_None);
    bool all;
    {
      const WithoutGil released;
      all = serve(executor->executor, pools);
    }
    if (!all) {
      raise(PyExc_RuntimeError,
            "Runtime.add: one of the pools is served by another Runtime, or this one is being shut down");
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* take_back(PyObject* object, PyObject* tuple) {
  return guarded([&] {
    State* self = state_of(object, "Runtime.add");
    const std::vector<StrandPointer> strands = strands_of(pools_argument(tuple));
    const auto executor = self->executor;
    if (!executor) return Py_NewRef(Py_None);
    bool all = true;
    {
      const WithoutGil released;
      try {
        for (const auto& strand : strands) executor->executor.reopen(strand);
      } catch (const runtime::StoppedError&) {
        all = false;
      } catch (const std::logic_error&) {
        all = false;
      }
    }
    if (!all) {
      raise(PyExc_RuntimeError,
            "Runtime.add: one of the pools is served by another Runtime, or this one is being shut down");
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* release(PyObject* object, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *tuple, *seconds;
    int drain;
    if (!PyArg_ParseTuple(args, "OpO:_release", &tuple, &drain, &seconds)) return nullptr;
    std::optional<double> timeout;
    if (seconds != Py_None) {
      timeout = PyFloat_AsDouble(seconds);
      if (PyErr_Occurred()) return nullptr;
    }
    const auto deadline = deadline_after(timeout);
    State* self = state_of(object, "Runtime.remove");
    const std::vector<StrandPointer> strands = strands_of(pools_argument(tuple));
    const auto executor = self->executor;
    if (!executor) return Py_NewRef(Py_True);
    if (executor->on_worker()) {
      raise(PyExc_RuntimeError, "Runtime.remove: a worker cannot wait for the end of what its own runtime serves");
    }
    {
      const WithoutGil released;
      const Stop how = drain ? Stop::kDrain : Stop::kCancel;
      for (const auto& strand : strands) executor->executor.request_release(strand, how);
    }
    for (const auto& strand : strands) {
      const bool ended = wait_interruptibly(
          [&](Clock::time_point until) { return executor->executor.wait_released_until(strand, until); }, deadline);
      if (!ended) return Py_NewRef(Py_False);
    }
    return Py_NewRef(Py_True);
  });
}

PyObject* running(PyObject* object, PyObject*) {
  const State* state = reinterpret_cast<RuntimeObject*>(object)->state;
  return PyBool_FromLong(state != nullptr && state->executor != nullptr);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const State* state = reinterpret_cast<RuntimeObject*>(object)->state;
  Py_VISIT(Py_TYPE(object));
  if (state != nullptr) Py_VISIT(state->pools.get());
  return 0;
}

// Dropped without a shutdown. May run on any thread, a worker of its own included, so it does not wait: the process
// keeps the executor until it has stopped.
int clear(PyObject* object) {
  State* state = reinterpret_cast<RuntimeObject*>(object)->state;
  if (state == nullptr || state->created != generation()) return 0;  // a parent's locks may be held for ever
  if (const auto executor = std::exchange(state->executor, nullptr)) {
    const WithoutGil released;
    executor->cancel();
  }
  state->pools = Ref();
  return 0;
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<RuntimeObject*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (self->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  PyObject *error_type, *error, *trace;
  PyErr_Fetch(&error_type, &error, &trace);
  clear(object);
  if (self->state != nullptr && self->state->created == generation()) delete self->state;
  PyErr_Restore(error_type, error, trace);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"_setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(setup)), METH_VARARGS | METH_KEYWORDS,
     "_setup(self: pymoe._runtime.Runtime, pools: collections.abc.Sequence[pymoe._runtime.TaskPool], workers: int) "
     "-> None\n\nOnce, from the constructor."},
    {"_running", running, METH_NOARGS,
     "_running(self: pymoe._runtime.Runtime) -> bool\n\nTrue from start to the end of shutdown."},
    {"_replace_pools", replace_pools, METH_O,
     "_replace_pools(self: pymoe._runtime.Runtime, pools: tuple[pymoe._runtime.TaskPool, ...]) -> None\n\n"
     "What start serves from now on."},
    {"_serve_too", serve_too, METH_O,
     "_serve_too(self: pymoe._runtime.Runtime, pools: tuple[pymoe._runtime.TaskPool, ...]) -> None\n\n"
     "Serve these as well; nothing where the runtime does not run."},
    {"_release", release, METH_VARARGS,
     "_release(self: pymoe._runtime.Runtime, pools: tuple[pymoe._runtime.TaskPool, ...], drain: bool, "
     "timeout: float | None) -> bool\n\n"
     "Close these, wait until their requests are done, and serve them no longer; False if that takes longer."},
    {"_take_back", take_back, METH_O,
     "_take_back(self: pymoe._runtime.Runtime, pools: tuple[pymoe._runtime.TaskPool, ...]) -> None\n\n"
     "Open these again, of which _release has not seen the end; nothing where the runtime does not run."},
    {"start", start, METH_NOARGS,
     "start(self: pymoe._runtime.Runtime) -> None\n\n"
     "Start the workers; nothing if they run already.\n\n"
     "Raises:\n"
     "    RuntimeError: a pool is served by another Runtime, or the process is a fork."},
    {"shutdown", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(shutdown)), METH_VARARGS | METH_KEYWORDS,
     "shutdown(self: pymoe._runtime.Runtime, drain: bool = True) -> None\n\n"
     "Refuse further requests, and wait until every one is done and the workers have ended. May be called again.\n\n"
     "Args:\n"
     "    drain: run what is queued; otherwise requests that have not started are cancelled, and of those that take\n"
     "        several batches no further one is run.\n\n"
     "Raises:\n"
     "    RuntimeError: called from a batch of this runtime, or in a fork."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_runtime_type(PyObject* module) {
  add_type<RuntimeObject>(module, {.name = "pymoe._runtime.Runtime",
                                   .doc = "The native half of pymoe.runtime.Runtime.",
                                   .flags = Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
                                   .dealloc = dealloc,
                                   .traverse = traverse,
                                   .clear = clear,
                                   .methods = methods});
}

}  // namespace pymoe::bindings
