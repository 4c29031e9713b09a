#include "bindings/worker_pool.h"

#include "runtime/worker_pool.h"

#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/process.h"

namespace pymoe::bindings {

using runtime::Future;
using runtime::Stop;

// What a call ended with: its value, or the exception that it raised.
struct CallOutcome {
  GilObject object;
  bool raised;
};

namespace {

class Call {
 public:
  Call(py::object function, py::object args, py::object kwargs)
      : function_(std::move(function)), args_(std::move(args)), kwargs_(std::move(kwargs)) {}

  CallOutcome operator()() {
    const WithGil gil;
    const py::object function = function_.take(), args = args_.take(), kwargs = kwargs_.take();
    try {
      return {GilObject(own(PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()))), false};
    } catch (const py::error_already_set& error) {
      return {GilObject(exception_of(error)), true};
    }
  }

 private:
  GilObject function_, args_, kwargs_;
};

}  // namespace

class PyFuture {
 public:
  PyFuture(Future<CallOutcome> future, std::weak_ptr<StoppablePool> pool, int created)
      : future_(std::move(future)), pool_(std::move(pool)), created_(created) {}

  bool done() const { return future_.done(); }

  py::object result(std::optional<double> timeout) const {
    const CallOutcome& outcome = wait("Future.result", timeout);
    if (outcome.raised) raise(outcome.object.get());
    return outcome.object.share();
  }

  py::object exception(std::optional<double> timeout) const {
    const CallOutcome& outcome = wait("Future.exception", timeout);
    return outcome.raised ? outcome.object.share() : py::none();
  }

 private:
  const CallOutcome& wait(const char* where, std::optional<double> timeout) const {
    if (!future_.done()) {
      require_this_process(created_, where, "WorkerPool");
      if (!timeout) help_as_worker();
      const auto ended = [&](Clock::time_point until) { return future_.wait_until(until); };
      if (!wait_interruptibly(ended, deadline_after(timeout))) {
        raise(PyExc_TimeoutError, "%s: the task has not ended in time", where);
      }
    }
    try {
      return future_.get();
    } catch (const runtime::Cancelled& error) {
      const py::object type = py::module_::import("concurrent.futures").attr("CancelledError");
      raise(type.ptr(), "%s", error.what());
    }
  }

  // Runs the task if it has not started and this is a worker of its pool, maybe the only one who could. Other threads
  // leave it to the workers, so that no more tasks run at a time than there are workers.
  void help_as_worker() const {
    const WithoutGil released;
    const auto pool = pool_.lock();
    if (pool && pool->on_worker()) future_.help();
  }

  Future<CallOutcome> future_;
  std::weak_ptr<StoppablePool> pool_;
  int created_;
};

PyWorkerPool::PyWorkerPool(int workers, int most, double still, double idle) : created_(generation()) {
  const auto in_seconds = [](double seconds, const char* name) {
    constexpr double kYear = 366.0 * 86400;
    if (!(seconds > 0 && seconds <= kYear)) {
      raise(PyExc_ValueError, "WorkerPool: %s must be a number of seconds above 0, a year at most", name);
    }
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const StoppablePool::Growth growth{most, in_seconds(still, "still"), in_seconds(idle, "idle")};
  const WithoutGil released;  // also while a pool that came too late joins its workers
  auto pool = std::make_shared<StoppablePool>(workers, growth);
  keep_until_stopped(pool);
  kept_ = std::move(pool);
}

// May run on any thread, a worker of this very pool included, so it does not wait: the process keeps the pool.
PyWorkerPool::~PyWorkerPool() {
  if (created_ == generation()) kept_->pool.request_stop(Stop::kDrain);
}

PyFuture PyWorkerPool::submit(py::object function, py::Args<py::object> args, py::KWArgs<py::object> kwargs) {
  require_this_process(created_, "WorkerPool.submit", "WorkerPool");
  if (!PyCallable_Check(function.ptr())) {
    raise(PyExc_TypeError, "WorkerPool.submit: the first argument must be callable, got %s",
          Py_TYPE(function.ptr())->tp_name);
  }
  Call call(std::move(function), std::move(args), std::move(kwargs));
  const WithoutGil released;
  return {kept_->pool.submit(std::move(call)), kept_, created_};
}

void PyWorkerPool::shutdown(bool drain) {
  require_this_process(created_, "WorkerPool.shutdown", "WorkerPool");
  if (kept_->on_worker()) {
    raise(PyExc_RuntimeError, "WorkerPool.shutdown: a worker cannot wait for the end of its own pool");
  }
  {
    const WithoutGil released;
    kept_->pool.request_stop(drain ? Stop::kDrain : Stop::kCancel);
  }
  wait_interruptibly([&](Clock::time_point until) { return kept_->stopped_by(until); });
}

std::shared_ptr<StoppablePool> PyWorkerPool::kept(const char* where) const {
  require_this_process(created_, where, "WorkerPool");
  return kept_;
}

void bind_worker_pool(py::module_& module) {
  py::class_<PyFuture>(module, "Future", "The outcome of a task, to come. Made by :meth:`WorkerPool.submit`.")
      .def("done", &PyFuture::done, "True once the task has ended.")
      .def("result", &PyFuture::result, py::arg("timeout") = py::none(),
           "Wait for the task and return its value, or raise what it raised.\n\n"
           "A worker that waits without a timeout for a task of its own pool runs it itself if nobody has\n"
           "started it, so tasks may wait for tasks.\n\n"
           "Args:\n"
           "    timeout: seconds to wait at most; None waits as long as it takes.\n\n"
           "Raises:\n"
           "    TimeoutError: the task has not ended in time.\n"
           "    concurrent.futures.CancelledError: the pool was shut down before the task had started.\n"
           "    RuntimeError: the process is a fork that has not got the pool's workers.")
      .def("exception", &PyFuture::exception, py::arg("timeout") = py::none(),
           "Wait for the task and return the exception that it raised, or None.\n\n"
           "Takes and raises what :meth:`result` does, the task's own exception excepted.");

  py::class_<PyWorkerPool>(module, "WorkerPool",
                           "Threads that run submitted functions, first come, first served.\n\n"
                           "Dropping the last reference lets queued tasks run and does not wait for them; at\n"
                           "interpreter exit queued tasks are cancelled and running ones waited for.")
      .def(py::init<int, int, double, double>(), py::arg("workers"), py::arg("most") = 0, py::arg("still") = 0.008,
           py::arg("idle") = 5.0,
           "Start ``workers`` threads, and more while functions are queued and threads wait.\n\n"
           "Args:\n"
           "    workers: how many threads are to do something at a time.\n"
           "    most: how many there may be with those that wait; there is always ``workers`` if it is no more.\n"
           "    still: seconds; a thread that uses no processor for so long waits. Longer than the interpreter's\n"
           "        switch interval, so that those that wait for its lock do not count.\n"
           "    idle: seconds; threads beyond ``workers`` that have had nothing to run for so long end.\n\n"
           "Raises:\n"
           "    ValueError: ``workers`` is less than 1, or a number of seconds is not above 0.")
      // The function's parameter has no name, so that every keyword is the function's own.
      .def("submit", &PyWorkerPool::submit,
           "Queue ``arg0(*args, **kwargs)`` and return its :class:`Future`.\n\n"
           "Raises:\n"
           "    TypeError: ``arg0`` is not callable.\n"
           "    RuntimeError: the pool was shut down, or belongs to the parent of this process.")
      .def("shutdown", &PyWorkerPool::shutdown, py::arg("drain") = true,
           "Refuse further tasks and wait for the workers to end. May be called again.\n\n"
           "Args:\n"
           "    drain: run what is queued; otherwise tasks that have not started are cancelled.\n\n"
           "Raises:\n"
           "    RuntimeError: called from a worker of this pool, or in a fork.")
      .def_property_readonly("workers", &PyWorkerPool::workers, "The number of threads now.")
      .def(
          "__enter__", [](PyWorkerPool& self) -> PyWorkerPool& { return self; }, py::return_value_policy::reference)
      .def(
          "__exit__",
          [](PyWorkerPool& self, const py::object& type, const py::object&, const py::object&) {
            self.shutdown(type.is_none());
          },
          py::arg("type"), py::arg("value"), py::arg("traceback"),
          "Shut down: draining, or cancelling what is queued if the block raised.");
}

}  // namespace pymoe::bindings
