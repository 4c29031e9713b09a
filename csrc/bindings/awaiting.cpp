#include "bindings/awaiting.h"

#include <pybind11/typing.h>

#include <memory>
#include <mutex>
#include <vector>

#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/future.h"
#include "bindings/process.h"

namespace pymoe::bindings {
namespace {

PyObject* get_running_loop = nullptr;                        // asyncio's
PyObject* cancelled_error = nullptr;                         // asyncio's, which is not that of concurrent.futures
PyObject* mailboxes = nullptr;                               // a WeakKeyDictionary: loop -> Mailbox
PyObject *create_future_name, *done_name, *set_result_name;  // an await asks for each of them

// Has the task that sleeps on `waiter` go on. In its loop.
void wake(const py::object& waiter) {
  try {
    if (own(PyObject_CallMethodNoArgs(waiter.ptr(), done_name)).ptr() != Py_False) return;
    own(PyObject_CallMethodOneArg(waiter.ptr(), set_result_name, Py_None));
  } catch (const py::error_already_set& error) {
    log_error("an event loop's future could not be told that a request is done", exception_of(error));
  }
}

// The same as a function that Python can call: the collector sees what it is bound to, but not what a lambda holds.
PyObject* wake_bound(PyObject* waiter, PyObject*) {
  return guarded([&] {
    wake(borrow(waiter));
    return Py_NewRef(Py_None);
  });
}
PyMethodDef wake_method = {"wake", wake_bound, METH_NOARGS, nullptr};

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(const py::object& loop) : loop_(py::weakref(loop).release().ptr()) {}
  ~Mailbox() {
    for (PyObject* waiter : waiters_) drop_later(waiter);
    drop_later(loop_);
  }

  bool is_of(const py::object& loop) const { return own(PyObject_CallNoArgs(loop_)).is(loop); }

  // Takes over a reference to a future of the loop, to be set in the loop. Any thread, without the GIL.
  void put(PyObject* waiter) {
    {
      const std::lock_guard lock(mutex_);
      waiters_.push_back(waiter);
      if (std::exchange(called_, true)) return;
    }
    const WithGil gil;
    bool interrupted = false;
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Told told = call_loop();
      interrupted = interrupted || told == Told::kInterrupted;
      if (told == Told::kReached) break;
      if (told == Told::kGone) {
        take_all();
        break;
      }
      if (attempt == 1) {
        // They stay, and come with whatever is put next.
        const std::lock_guard lock(mutex_);
        called_ = false;
      }
    }
    if (interrupted) PyErr_SetInterrupt();
  }

 private:
  enum class Told {
    kReached,
    kGone,         // the loop is closed, or has been collected: nobody waits any more
    kInterrupted,  // by Ctrl-C, which the caller must pass on
    kFailed        // and may be tried again
  };

  Told call_loop() {
    const auto loop = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(loop_));
    if (!loop || loop.is_none()) {
      PyErr_Clear();
      return Told::kGone;
    }
    py::object error;
    try {
      loop.attr("call_soon_threadsafe")(py::cpp_function([self = shared_from_this()] { self->deliver(); }));
      return Told::kReached;
#ifdef PYMOE_FORCED_UNWIND
    } catch (const PYMOE_FORCED_UNWIND&) {
      stay();
#endif
    } catch (...) {
      set_python_error(std::current_exception());
      error = take_error();
    }
    try {
      if (loop.attr("is_closed")().cast<bool>()) return Told::kGone;
    } catch (const std::exception&) {  // then it is there, as far as one knows
    }
    // Ctrl-C is for the main thread's own code: what must be told is told first.
    if (is_interrupt(error)) return Told::kInterrupted;
    log_error("an event loop could not be told that requests are done", error);
    return Told::kFailed;
  }

  // In the loop.
  void deliver() {
    for (const py::object& waiter : take_all()) wake(waiter);
  }

  std::vector<py::object> take_all() {
    std::vector<PyObject*> waiters;
    {
      const std::lock_guard lock(mutex_);
      waiters.swap(waiters_);
      called_ = false;
    }
    std::vector<py::object> taken;
    for (PyObject* waiter : waiters) taken.push_back(py::reinterpret_steal<py::object>(waiter));
    return taken;
  }

  PyObject* const loop_;  // a weak reference
  std::mutex mutex_;      // guards the rest
  std::vector<PyObject*> waiters_;
  bool called_ = false;  // the loop will come and look
};

std::shared_ptr<Mailbox> mailbox_of(const py::object& loop) {
  static auto& last = *new std::shared_ptr<Mailbox>;  // most programs have one loop
  if (last && last->is_of(loop)) return last;
  const py::handle known(mailboxes);
  const py::object found = known.attr("get")(loop);
  auto mailbox = found.is_none() ? std::make_shared<Mailbox>(loop) : found.cast<std::shared_ptr<Mailbox>>();
  if (found.is_none()) known[loop] = mailbox;
  last = mailbox;
  return mailbox;
}

class Awaiting {
 public:
  Awaiting(py::object future, std::optional<double> seconds) : future_(std::move(future)), limited_(seconds) {
    const std::shared_ptr<TensorRequest>& request = request_of(future_.ptr());
    if (request->done()) return;
    const py::object loop = own(PyObject_CallNoArgs(get_running_loop));
    waiter_ = own(PyObject_CallMethodNoArgs(loop.ptr(), create_future_name));
    steps_ = own(PyObject_GetIter(waiter_.ptr()));
    auto mailbox = mailbox_of(loop);
    if (seconds) timer_ = loop.attr("call_later")(*seconds, own(PyCFunction_New(&wake_method, waiter_.ptr())));
    auto told = std::make_shared<GilObject>(waiter_);
    const WithoutGil released;
    request->on_done([mailbox = std::move(mailbox), told = std::move(told)] { mailbox->put(told->release()); });
  }

  // One turn of the coroutine: what it yields, or returns if `ended`.
  py::object step(bool& ended) {
    if (steps_) {
      if (PyObject* yielded = PyIter_Next(steps_.ptr())) return own(yielded);
      if (PyErr_Occurred()) give_up(py::error_already_set());
    }
    end();
    ended = true;
    if (limited_ && !request_of(future_.ptr())->done()) {
      cancel_future(future_.ptr());
      raise(PyExc_TimeoutError, "the request is not done in time");
    }
    try {
      return result_of(future_.ptr());
    } catch (py::error_already_set& error) {
      // Whoever drives an iterator would take it for a return (PEP 479).
      if (!error.matches(PyExc_StopIteration)) throw;
      py::raise_from(error, PyExc_RuntimeError, "the batch raised StopIteration");
      throw py::error_already_set();
    }
  }

  py::object throw_in(const py::Args<py::object>& error) {
    if (error.empty()) raise(PyExc_TypeError, "throw: expected an exception");
    if (!steps_) {
      const py::object thrown = error[error.size() > 1 && !error[1].is_none() ? 1 : 0];
      raise(PyExceptionClass_Check(thrown.ptr()) ? thrown() : thrown);
    }
    try {
      return steps_.attr("throw")(*error);
    } catch (const py::error_already_set& raised) {
      give_up(raised);
    }
  }

  void close() {
    end();
    if (steps_) steps_.attr("close")();
  }

  int visit(visitproc visit, void* arg) {
    Py_VISIT(future_.ptr());
    Py_VISIT(waiter_.ptr());
    Py_VISIT(steps_.ptr());
    Py_VISIT(timer_.ptr());
    return 0;
  }
  void clear() {
    timer_ = py::object();
    steps_ = py::object();
    waiter_ = py::object();
  }

 private:
  // The task was cancelled, or whatever else was thrown into it.
  [[noreturn]] void give_up(const py::error_already_set& error) {
    end();
    if (error.matches(cancelled_error)) cancel_future(future_.ptr());
    throw error;
  }

  void end() {
    if (timer_) std::exchange(timer_, py::object()).attr("cancel")();
  }

  py::object future_;
  py::object waiter_, steps_;  // none where the request was done already
  py::object timer_;
  const bool limited_;
};

PySendResult send(PyObject* self, PyObject*, PyObject** result) {
  bool ended = false;
  // Without pybind11's look for the type, which is known here.
  const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  *result = guarded([&] {
    if (!held.holder_constructed()) raise(PyExc_RuntimeError, "Awaiting: only await makes one");
    return held.value_ptr<Awaiting>()->step(ended).release().ptr();
  });
  return *result == nullptr ? PYGEN_ERROR : ended ? PYGEN_RETURN : PYGEN_NEXT;
}

PyObject* next(PyObject* self) {
  PyObject* result;
  if (send(self, Py_None, &result) != PYGEN_RETURN) return result;
  const auto value = py::reinterpret_steal<py::object>(result);
  // Made here: a tuple would be taken for the exception's arguments.
  const auto stop = py::reinterpret_steal<py::object>(PyObject_CallOneArg(PyExc_StopIteration, value.ptr()));
  if (stop) PyErr_SetObject(PyExc_StopIteration, stop.ptr());
  return nullptr;
}

}  // namespace

py::object make_awaiting(py::object future, std::optional<double> seconds) {
  return py::cast(std::make_unique<Awaiting>(std::move(future), seconds));
}

void bind_awaiting(py::module_& module) {
  const auto asyncio = py::module_::import("asyncio");
  get_running_loop = forever(asyncio.attr("get_running_loop"));
  cancelled_error = forever(asyncio.attr("CancelledError"));
  create_future_name = forever(own(PyUnicode_InternFromString("create_future")));
  done_name = forever(own(PyUnicode_InternFromString("done")));
  set_result_name = forever(own(PyUnicode_InternFromString("set_result")));
  mailboxes = forever(py::module_::import("weakref").attr("WeakKeyDictionary")());

  py::class_<Mailbox, std::shared_ptr<Mailbox>>(module, "Mailbox", "Tells an event loop that requests are done.");
  // The slots are set in place of bound methods: a value that is returned needs no exception then.
  const auto slots = [](PyHeapTypeObject* type) {
    collected<Awaiting>().value(type);
    type->ht_type.tp_iter = PyObject_SelfIter;
    type->ht_type.tp_iternext = next;
    type->as_async.am_send = send;
  };
  py::class_<Awaiting>(module, "Awaiting", "What ``await`` of a :class:`RequestFuture` iterates over.",
                       py::custom_type_setup(slots))
      .def(
          "send", [](const py::object& self, const py::object&) { return own(next(self.ptr())); }, py::arg("value"),
          "Go on until the request is done.")
      .def("throw", &Awaiting::throw_in,
           "Raise an exception where the coroutine waits; asyncio's CancelledError cancels.")
      .def("close", &Awaiting::close, "Wait no longer.");
}

}  // namespace pymoe::bindings
