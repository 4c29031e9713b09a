// Mailbox of pymoe._runtime: tells an event loop that requests are done. See pymoe/runtime/awaiting.py.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/future.h"

namespace pymoe::bindings {
namespace {

// Wakes the task that awaits `waiter`, unless the waiter is done. Runs in the task's event loop.
void wake(const py::object& waiter) {
  try {
    if (!waiter.attr("done")().cast<bool>()) waiter.attr("set_result")(py::none());
  } catch (const py::error_already_set& error) {
    log_error("an event loop's future could not be told that a request is done", exception_of(error));
  }
}

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(const py::object& call_loop) : call_loop_(call_loop.inc_ref().ptr()) {}
  ~Mailbox() {
    for (PyObject* waiter : waiters_) drop_later(waiter);
    drop_later(call_loop_);
  }

  void expect(const py::object& future, const py::object& waiter) {
    const auto request = waitable_request_of(future, "await");
    auto told = std::make_shared<GilObject>(waiter);
    const WithoutGil released;
    request->on_done([mailbox = shared_from_this(), told = std::move(told)] { mailbox->put(told->release()); });
  }

  // Completes the waiters of requests that are done. Runs in the event loop.
  void deliver() {
    for (const py::object& waiter : take_all()) wake(waiter);
  }

  void discard() { take_all(); }

 private:
  // Takes over the reference to `waiter`, an asyncio future of the event loop, which deliver() will complete. May be
  // called on any thread, without the GIL.
  void put(PyObject* waiter) {
    {
      const std::lock_guard lock(mutex_);
      waiters_.push_back(waiter);
      if (std::exchange(called_, true)) return;
    }
    with_gil([&] {
      bool interrupted = false;
      if (!call_loop(interrupted) && !call_loop(interrupted)) {
        // The second attempt failed, too. The waiters stay in the mailbox, and the next put() calls the loop again.
        const std::lock_guard lock(mutex_);
        called_ = false;
      }
      if (interrupted) PyErr_SetInterrupt();
    });
  }

  // Calls call_loop_, which makes the loop run deliver(); returns false if it raised. Ctrl-C must interrupt only the
  // main thread's own code, so an interrupt only sets `interrupted`, and the caller raises it again afterwards.
  bool call_loop(bool& interrupted) {
    try {
      const py::object self = py::cast(shared_from_this());
      own(or_stay([&] { return PyObject_CallOneArg(call_loop_, self.ptr()); }));
      return true;
    } catch (...) {
      set_python_error(std::current_exception());
      const py::object error = take_error();
      if (is_interrupt(error)) {
        interrupted = true;
      } else {
        log_error("an event loop could not be told that requests are done", error);
      }
      return false;
    }
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

  PyObject* const call_loop_;
  std::mutex mutex_;  // guards the rest
  std::vector<PyObject*> waiters_;
  bool called_ = false;  // the loop was called, and has not yet taken the waiters
};

}  // namespace

void bind_awaiting(py::module_& module) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(module, "Mailbox",
                                                "Tells an event loop that requests are done, by ``call_loop(self)``.")
      .def(py::init<const py::object&>(), py::arg("call_loop"))
      .def("expect", &Mailbox::expect, py::arg("future"), py::arg("waiter"),
           "Let the loop wake ``waiter``, one of its futures, once the request is done.")
      .def("deliver", &Mailbox::deliver, "Wake the waiters of requests that are done. Called in the loop.")
      .def("discard", &Mailbox::discard, "Drop all waiters: the loop is gone.")
      .def_static("wake", &wake, py::arg("waiter"),
                  "Complete a future of the loop, unless it is done. Called in the loop.");
}

}  // namespace pymoe::bindings
