#include "bindings/future.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <new>

#include "bindings/batch.h"
#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/parameter_lock.h"
#include "bindings/process.h"
#include "bindings/torch_calls.h"
#include "bindings/turnstile.h"

namespace pymoe::bindings {
namespace {

struct FutureObject {
  PyObject_HEAD PyObject* weak_references;
  std::shared_ptr<TensorRequest> request;
  std::shared_ptr<Pool> pool;
  PyObject* standard;  // the view for concurrent.futures' functions; null until used
  int created;
  bool may_help;
};

// These types only give the arguments readable names in signatures.
struct MaybeException : py::object {
  explicit MaybeException(py::object object) : py::object(std::move(object)) {}
};
struct DoneCallback : py::object {
  PYBIND11_OBJECT_DEFAULT(DoneCallback, object, any)
  static bool any(PyObject*) { return true; }  // accepts anything: the code that uses the value checks it
};

PyTypeObject* future_type = nullptr;
PyObject* standard_type = nullptr;  // concurrent.futures.Future

}  // namespace
}  // namespace pymoe::bindings

template <>
struct pybind11::detail::handle_type_name<pymoe::bindings::MaybeException> {
  static constexpr auto name = const_name("BaseException | None");
};
template <>
struct pybind11::detail::handle_type_name<pymoe::bindings::DoneCallback> {
  static constexpr auto name = const_name("collections.abc.Callable[[pymoe._runtime.RequestFuture], object]");
};
// Converts Python futures into FutureObject& when they are passed to bound functions.
template <>
struct pybind11::detail::type_caster<pymoe::bindings::FutureObject> {
  static constexpr auto name = const_name("pymoe._runtime.RequestFuture");
  template <typename>
  using cast_op_type = pymoe::bindings::FutureObject&;

  bool load(handle source, bool) {
    value = reinterpret_cast<pymoe::bindings::FutureObject*>(source.ptr());
    return PyObject_TypeCheck(source.ptr(), pymoe::bindings::future_type);
  }
  operator pymoe::bindings::FutureObject&() { return *value; }

  pymoe::bindings::FutureObject* value;
};

namespace pymoe::bindings {
namespace {

FutureObject* self_of(PyObject* object) { return reinterpret_cast<FutureObject*>(object); }

// Makes the garbage collector track a future. Called only once the future can be part of a cycle: tracking every future
// is costly.
void track(PyObject* object) {
  if (!PyObject_GC_IsTracked(object)) PyObject_GC_Track(object);
}

// Returns true if `outcome` could refer to its future, now or later. A plain tensor could do so only through added
// attributes, which are ignored.
bool may_refer(PyObject* outcome) {
  return PyObject_IS_GC(outcome) && Py_TYPE(outcome) != reinterpret_cast<PyTypeObject*>(torch_calls().tensor);
}

// The time after which a thread that waits for a pool without a Runtime is warned.
constexpr std::chrono::seconds kUnservedWarningDelay{2};

// If no Runtime serves the pool, and the deadline is more than kUnservedWarningDelay away, waits for that delay and
// then warns, once per pool. Returns true if the request ended meanwhile.
template <typename Ended>
bool ended_soon_or_served(Pool& pool, const Ended& ended, std::optional<Clock::time_point> deadline) {
  if (pool.strand()->attached()) return false;
  const auto soon = Clock::now() + kUnservedWarningDelay;
  if (deadline && *deadline <= soon) return false;
  if (wait_interruptibly(ended, soon)) return true;
  if (pool.strand()->attached() || !pool.tell_idle()) return false;
  if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                       "a result of TaskPool '%s' is waited for, but no Runtime serves the pool: start one with "
                       "Runtime([pool]), or with the backend that the pool is of",
                       pool.name().c_str()) != 0) {
    throw py::error_already_set();
  }
  return false;
}

void wait_until_done(FutureObject* self, const char* where, std::optional<Clock::time_point> deadline) {
  require_this_process(self->created, where, "TaskPool");
  const py::object keep = borrow(reinterpret_cast<PyObject*>(self));
  drop_deferred();
  const auto help = help_of_this_thread(self->may_help, deadline.has_value());
  try {
    const RegisteredWait registered(*self->pool, self->request.get(), deadline.has_value());
    std::optional<Place> place;
    const auto ended = [&](Clock::time_point until) {
      leave_turnstile();
      // Only a client that may help waits in a Place. All others wait in the pool; there, a thread that must help runs
      // batches as long as it waits, since it may be the only thread that can continue.
      if (help != runtime::Help::kYes) return self->pool->wait(self->request, until, help);
      if (!place) {
        if (self->pool->help(self->request)) return true;
        place.emplace(*self->request);
      }
      return self->pool->wait(self->request, until, [&](Clock::time_point at) { place->wait_until(at); });
    };
    if (ended_soon_or_served(*self->pool, ended, deadline)) return;
    if (!wait_interruptibly(ended, deadline)) {
      const char* name = self->pool->name().c_str();
      if (!self->pool->strand()->attached()) {
        raise(PyExc_TimeoutError, "%s: the request is not done in time: no Runtime serves the pool '%s'", where, name);
      }
      raise(PyExc_TimeoutError, "%s: the request of pool '%s' is not done in time", where, name);
    }
  } catch (const runtime::Interrupted&) {
    raise_interrupt();
  }
}

// Parses the arguments of a future's method that takes only `timeout`. Returns the seconds, or none without a timeout.
std::optional<double> timeout_of(const char* where, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t keywords = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  if (count + keywords == 0) return std::nullopt;
  if (count + keywords > 1 ||
      (keywords == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout"))) {
    raise(PyExc_TypeError, "%s: expected timeout alone", where);
  }
  if (args[0] == Py_None) return std::nullopt;
  const double seconds = PyFloat_AsDouble(args[0]);
  if (seconds == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return seconds;
}

// Returns the outcome of a request that is done, as CPython's functions do: a new reference, or null with the exception
// set.
PyObject* outcome_of(FutureObject* self) {
  const TensorRequest& request = *self->request;
  PyObject* object = reinterpret_cast<PyObject*>(self);
  if (!request.error()) {
    if (may_refer(request.outcome)) track(object);
    return Py_NewRef(request.outcome);
  }
  track(object);
  const py::object error = request.exception();
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  return nullptr;
}

PyObject* result(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&] {
    FutureObject* self = self_of(object);
    const auto timeout = timeout_of("RequestFuture.result", args, count, names);
    if (!self->request->done()) wait_until_done(self, "RequestFuture.result", deadline_after(timeout));
    return outcome_of(self);
  });
}

MaybeException exception(FutureObject& self, std::optional<double> timeout) {
  if (!self.request->done()) wait_until_done(&self, "RequestFuture.exception", deadline_after(timeout));
  if (!self.request->error()) return MaybeException(py::none());
  if (self.request->was_cancelled()) return MaybeException(own(outcome_of(&self)));
  track(reinterpret_cast<PyObject*>(&self));
  return MaybeException(self.request->exception());
}

// Cancels the request. Returns true if it is cancelled now, was so before, or will be so when its running batch ends;
// false if its only or last batch has started, or if it has ended in another way.
bool cancel(FutureObject& self) {
  const auto request = self.request;
  if (request->done()) return request->was_cancelled();
  require_this_process(self.created, "RequestFuture.cancel", "TaskPool");
  const auto pool = self.pool;
  const WithoutGil released;
  return pool->cancel(request) || request->was_cancelled();
}

// A callback for the thread that completes the future. It may be called with or without the GIL.
struct Callback {
  GilObject function, future;

  void operator()() {
    with_gil([&] {
      const py::object called = function.take(), argument = future.take();
      try {
        own(or_stay([&] { return PyObject_CallOneArg(called.ptr(), argument.ptr()); }));
      } catch (const py::error_already_set& error) {
        log_error("a callback of a request's future raised", exception_of(error));
      }
    });
  }
};

void add_done_callback(FutureObject& self, const DoneCallback& function) {
  if (!PyCallable_Check(function.ptr())) {
    raise(PyExc_TypeError, "RequestFuture.add_done_callback: expected a function, got %s",
          Py_TYPE(function.ptr())->tp_name);
  }
  PyObject* object = reinterpret_cast<PyObject*>(&self);
  track(object);
  const auto request = self.request;
  auto callback = std::make_shared<Callback>(Callback{GilObject(function), GilObject(borrow(object))});
  const WithoutGil released;
  request->on_done([callback = std::move(callback)] { (*callback)(); }, function.ptr());
}

size_t remove_done_callback(FutureObject& self, const py::object& function) {
  if (!self.request->done()) require_this_process(self.created, "RequestFuture.remove_done_callback", "TaskPool");
  return self.request->remove(function.ptr()).size();
}

PyObject* await(PyObject* object) {
  return guarded([&] {
    static PyObject* outcome = nullptr;
    if (outcome == nullptr) outcome = forever(py::module_::import("pymoe.runtime.awaiting").attr("outcome"));
    return PyObject_CallOneArg(outcome, object);
  });
}

const char* state_of(FutureObject* self) {
  if (self->request->pending()) return "pending";
  if (!self->request->done()) return "running";
  if (!self->request->error()) return "finished";
  return self->request->was_cancelled() ? "cancelled" : "failed";
}

PyObject* repr(PyObject* object) {
  FutureObject* self = self_of(object);
  return PyUnicode_FromFormat("<RequestFuture of pool '%s': %s>", self->pool->name().c_str(), state_of(self));
}

// Makes isinstance() accept a RequestFuture as a concurrent.futures.Future: isinstance() also looks at __class__.
PyObject* get_class(PyObject*, void*) { return Py_NewRef(standard_type); }

// Returns _condition, _waiters or _state: attributes that wait() and as_completed() of concurrent.futures use.
PyObject* get_standard(PyObject* object, void* name) {
  return guarded([&] {
    FutureObject* self = self_of(object);
    if (self->standard == nullptr) {
      py::object made = py::module_::import("pymoe.runtime.future").attr("Standard")(py::handle(object));
      if (self->standard == nullptr) self->standard = made.release().ptr();
      track(object);
    }
    return py::handle(self->standard).attr(static_cast<const char*>(name)).cast<py::object>().release().ptr();
  });
}

PyGetSetDef attributes[] = {
    {"__class__", get_class, nullptr, "``concurrent.futures.Future``, for ``isinstance``.", nullptr},
    {"_condition", get_standard, nullptr, nullptr, const_cast<char*>("condition")},
    {"_waiters", get_standard, nullptr, nullptr, const_cast<char*>("waiters")},
    {"_state", get_standard, nullptr, nullptr, const_cast<char*>("state")},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

int traverse(PyObject* object, visitproc visit, void* arg) {
  const FutureObject* self = self_of(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->standard);
  if (self->request && self->request->done()) {
    Py_VISIT(self->request->outcome);
    Py_VISIT(self->request->traceback);
  }
  return 0;
}

int clear(PyObject* object) {
  FutureObject* self = self_of(object);
  Py_CLEAR(self->standard);
  if (self->request && self->request->done()) {
    // Replace the outcome with None instead of removing it: a finaliser may still read the finished future.
    PyObject* outcome = std::exchange(self->request->outcome, nullptr);
    if (outcome != nullptr) self->request->outcome = Py_NewRef(Py_None);
    Py_XDECREF(outcome);
    Py_CLEAR(self->request->traceback);
  }
  return 0;
}

// Freed futures are kept for reuse, at most kMostFree of them.
#ifdef Py_GIL_DISABLED
constexpr size_t kMostFree = 0;
#else
constexpr size_t kMostFree = 256;
#endif
std::array<FutureObject*, kMostFree + 1> free_objects;
size_t free_count = 0;

void dealloc(PyObject* object) {
  FutureObject* self = self_of(object);
  if (PyObject_GC_IsTracked(object)) PyObject_GC_UnTrack(object);
  if (self->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  Py_CLEAR(self->standard);
  {
    const std::shared_ptr<TensorRequest> request = std::move(self->request);
    const std::shared_ptr<Pool> pool = std::move(self->pool);
    self->request.~shared_ptr();
    self->pool.~shared_ptr();
    if (request) {
      request->dropped = true;
      Py_CLEAR(request->outcome);
      Py_CLEAR(request->traceback);
      if (request->done()) request->drop_inputs();
    }
    // In a forked child, keep the parent's objects for ever by copying their pointers: their destructors might wait for
    // locks that are never released.
    if (self->created != generation()) new std::pair(request, pool);
  }
  PyTypeObject* type = Py_TYPE(object);
  if (free_count < kMostFree) {
    free_objects[free_count++] = self;
  } else {
    PyObject_GC_Del(object);
  }
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"result", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(result)), METH_FASTCALL | METH_KEYWORDS,
     "result(self: pymoe._runtime.RequestFuture, timeout: float | None = None) -> typing.Any\n\n"
     "Wait for the request and return its result, or raise what its batch raised.\n\n"
     "Without a timeout, the waiting thread may run the batch itself, if no other thread does.\n\n"
     "Args:\n"
     "    timeout: seconds to wait at most; None waits as long as it takes.\n\n"
     "Raises:\n"
     "    TimeoutError: the request is not done in time, or had not started within its own timeout.\n"
     "    concurrent.futures.CancelledError: it was cancelled, or its runtime or pool went before it had started.\n"
     "    RuntimeError: the process is a fork, or a batch waits for its own expert."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

py::object make_future(std::shared_ptr<TensorRequest> request, std::shared_ptr<Pool> pool, bool may_help) {
  FutureObject* self;
  if (free_count > 0) {
    self = free_objects[--free_count];
    PyObject_Init(reinterpret_cast<PyObject*>(self), future_type);
  } else {
    self = PyObject_GC_New(FutureObject, future_type);
    if (self == nullptr) throw py::error_already_set();
  }
  self->weak_references = nullptr;
  self->standard = nullptr;
  new (&self->request) std::shared_ptr<TensorRequest>(std::move(request));
  new (&self->pool) std::shared_ptr<Pool>(std::move(pool));
  self->created = generation();
  self->may_help = may_help;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

std::shared_ptr<TensorRequest> waitable_request_of(const py::object& future, const char* where) {
  if (!PyObject_TypeCheck(future.ptr(), future_type)) raise(PyExc_TypeError, "%s: expected a RequestFuture", where);
  const FutureObject* self = self_of(future.ptr());
  if (!self->request->done()) require_this_process(self->created, where, "TaskPool");
  return self->request;
}

runtime::Help help_of_this_thread(bool may, bool limited) {
  const bool in_batch = runtime::SystemSync::batches_on_this_thread() > 0 || on_server_thread();
  if (in_batch || (on_worker_thread() && !limited)) return runtime::Help::kInBatch;
  return may && !limited && thread_is_plain() ? runtime::Help::kYes : runtime::Help::kNo;
}

void bind_request_future(py::module_& module) {
  standard_type = forever(py::module_::import("concurrent.futures").attr("Future"));
  constexpr const char* kDoc =
      "The outcome of a request, to come. Made by :meth:`TaskPool.submit_task`.\n\n"
      "Serves wherever a ``concurrent.futures.Future`` does: ``isinstance``, ``asyncio.wrap_future``, and\n"
      "``wait`` and ``as_completed`` of ``concurrent.futures``. It can be awaited in any event loop: cancelling\n"
      "the task that awaits cancels the request. Awaiting a request that was cancelled in\n"
      "another way (``cancel()``, a shutdown) raises ``concurrent.futures.CancelledError``, as ``result()`` does;\n"
      "the error of ``asyncio`` would mean that the task itself was cancelled.";
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, offsetof(FutureObject, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  const auto slot = [](int name, auto* function) { return PyType_Slot{name, reinterpret_cast<void*>(function)}; };
  PyType_Slot slots[] = {slot(Py_tp_doc, const_cast<char*>(kDoc)),
                         slot(Py_tp_dealloc, dealloc),
                         slot(Py_tp_traverse, traverse),
                         slot(Py_tp_clear, clear),
                         slot(Py_tp_methods, methods),
                         slot(Py_tp_repr, repr),
                         slot(Py_tp_getset, attributes),
                         slot(Py_tp_members, members),
                         slot(Py_am_await, await),
                         {0, nullptr}};
  PyType_Spec spec = {"pymoe._runtime.RequestFuture", sizeof(FutureObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  py::object type = own(PyType_FromSpec(&spec));
  module.attr("RequestFuture") = type;
  future_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());  // kept until the process ends

  const auto def = [&](const char* name, auto function, const auto&... extra) {
    type.attr(name) = py::cpp_function(function, py::name(name), py::is_method(type), extra...);
  };
  def("exception", exception, py::arg("timeout") = py::none(),
      "Wait for the request and return what its batch raised, or None.\n\n"
      "Requests of one batch share the exception. Takes and raises what :meth:`result` does otherwise.");
  def(
      "done", [](const FutureObject& self) { return self.request->done(); },
      "True once there is a result, an exception or a cancellation.");
  def(
      "running", [](const FutureObject& self) { return !self.request->pending() && !self.request->done(); },
      "True while its batch runs: it cannot be cancelled.");
  def(
      "cancelled", [](const FutureObject& self) { return self.request->was_cancelled(); },
      "True if it was cancelled before it had started, or before all of its batches had run.");
  def("cancel", cancel,
      "Take the request out of its queue; False if its only or last batch has started, or it is done.\n\n"
      "A request with more rows than a batch runs no further batch, and is done when its running batch has ended.");
  def("add_done_callback", add_done_callback, py::arg("function"),
      "Call ``function(future)`` once the request is done, on the thread that completes it; at once if it is done.\n\n"
      "What the function raises is logged by the logger ``pymoe.runtime``.");
  def("remove_done_callback", remove_done_callback, py::arg("function"),
      "Remove this object from the callbacks, and return how many times :meth:`add_done_callback` had added it.\n\n"
      "Callbacks that were called already, or are being called, are no longer among them.");

  module.def(
      "must_help", [](bool limited) { return help_of_this_thread(false, limited) == runtime::Help::kInBatch; },
      py::arg("limited"),
      "Return whether this thread must run batches while it waits in a future's result(): inside a batch and on a\n"
      "worker, because no other thread may be able to run what it waits for. Workers of parallel calls need not if\n"
      "their wait is ``limited``.");
}

}  // namespace pymoe::bindings
