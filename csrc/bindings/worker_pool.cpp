// WorkerPool and Future of pymoe._runtime, and parallel_for on such a pool.
#include "runtime/worker_pool.h"

#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bindings/process.h"
#include "runtime/parallel_for.h"
#include "runtime/sync.h"

namespace pymoe::bindings {
namespace {

using runtime::Stop;
using runtime::SystemSync;
using Threads = Stopping<runtime::WorkerPool<SystemSync>>;

Clock::duration seconds_up_to_a_year(double seconds, bool valid, const char* what) {
  if (!valid || !(seconds <= 366.0 * 86400)) {
    raise(PyExc_ValueError, "%s, a year at most, got %R", what, py::float_(seconds).ptr());
  }
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// A call that a pool makes: its job in the pool, and the future with its outcome. Its Python objects are used with the
// GIL held.
class Task final : public runtime::Job, public runtime::Completion<SystemSync> {
 public:
  Task(py::object function, py::object args, py::object kwargs)
      : function_(std::move(function)), args_(std::move(args)), kwargs_(std::move(kwargs)) {}

  void run() noexcept override {
    if (!claim()) return;
    with_gil([&] {
      const py::object function = function_.take(), args = args_.take(), kwargs = kwargs_.take();
      try {
        outcome_ = GilObject(own(or_stay([&] { return PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()); })));
      } catch (const py::error_already_set& error) {
        raised_ = true;
        outcome_ = GilObject(exception_of(error));
      }
    });
    complete();
  }

  void cancel() noexcept override {
    if (!claim()) return;
    with_gil([&] { function_.take(), args_.take(), kwargs_.take(); });
    complete(
        std::make_exception_ptr(runtime::Cancelled("the task was cancelled: its pool stopped before it had started")));
  }

  py::object result(std::optional<double> timeout) {
    if (!done()) {
      require_this_process(created_, "Future.result", "WorkerPool");
      if (!wait_interruptibly([&](Clock::time_point until) { return wait_until(until); }, deadline_after(timeout))) {
        raise(PyExc_TimeoutError, "Future.result: the task has not ended in time");
      }
    }
    if (error()) {
      set_python_error(error());
      throw py::error_already_set();
    }
    if (raised_) raise(outcome_.get());
    return outcome_.share();
  }

 private:
  GilObject function_, args_, kwargs_, outcome_;
  bool raised_ = false;  // true if the outcome is an exception
  const int created_ = generation();
};

// The threads of a Python WorkerPool. All members must be called with the GIL held.
class PyWorkerPool {
 public:
  PyWorkerPool(int workers, int most, double still, double idle) {
    const runtime::Growth<SystemSync> growth{
        most, seconds_up_to_a_year(still, still > 0, "WorkerPool: still must be a number of seconds above 0"),
        seconds_up_to_a_year(idle, idle > 0, "WorkerPool: idle must be a number of seconds above 0")};
    const WithoutGil released;  // outlives the local `threads`, which are joined here if the interpreter is exiting
    auto threads = std::make_shared<Threads>(workers, with_thread_state, growth);
    keep_until_stopped(threads);
    threads_ = std::move(threads);
  }

  // May run on any thread, even a worker of this pool, so it does not wait: the process keeps the threads.
  ~PyWorkerPool() {
    if (created_ == generation()) threads_->threads.request_stop(Stop::kDrain);
  }
  PyWorkerPool(const PyWorkerPool&) = delete;
  PyWorkerPool& operator=(const PyWorkerPool&) = delete;

  std::shared_ptr<Task> submit(py::object function, py::Args<py::object> args, py::KWArgs<py::object> kwargs) {
    const std::shared_ptr<Threads>& threads = of_this_process("WorkerPool.submit");
    if (!PyCallable_Check(function.ptr())) {
      raise(PyExc_TypeError, "WorkerPool.submit: the first argument must be callable, got %s",
            Py_TYPE(function.ptr())->tp_name);
    }
    auto task = std::make_shared<Task>(std::move(function), std::move(args), std::move(kwargs));
    const WithoutGil released;
    if (threads->threads.post(task, SystemSync::now())) return task;
    throw runtime::StoppedError("WorkerPool: submit after the pool was stopped");
  }

  void shutdown(bool drain) {
    const std::shared_ptr<Threads>& threads = of_this_process("WorkerPool.shutdown");
    if (threads->on_worker()) {
      raise(PyExc_RuntimeError, "WorkerPool.shutdown: a worker cannot wait for the end of its own pool");
    }
    stop(*threads, drain ? Stop::kDrain : Stop::kCancel);
  }

  int workers() const { return threads_->threads.workers(); }

  // Returns the threads. Throws std::runtime_error, which begins with `where`, if the pool was created before a fork.
  const std::shared_ptr<Threads>& of_this_process(const char* where) const {
    require_this_process(created_, where, "WorkerPool");
    return threads_;
  }

 private:
  std::shared_ptr<Threads> threads_;  // the threads outlive this object until they have stopped
  const int created_ = generation();
};

// --- parallel_for ---

using Calls = runtime::ParallelFor<runtime::SystemSync>;

// The exception of a call. Copies share the exception object; they may be made and destroyed without the GIL.
struct CallRaised : std::exception {
  explicit CallRaised(py::object error) : object(std::make_shared<GilObject>(std::move(error))) {}
  const char* what() const noexcept override { return "a call raised"; }
  std::shared_ptr<GilObject> object;
};

// State that a thread's innermost parallel_for shares with the calls that this thread makes.
struct Helped {
  Calls* run = nullptr;
  py::object interrupt;  // an interrupt that arrived in one of these calls
};
thread_local Helped* helped = nullptr;

// Marks, during its lifetime, that the thread makes calls of a run.
struct Helping {
  explicit Helping(Helped* now) : before(std::exchange(helped, now)) {}
  ~Helping() { helped = before; }
  Helping(const Helping&) = delete;
  Helping& operator=(const Helping&) = delete;
  Helped* before;
};

// Makes the remaining calls on this thread, and waits for those of other threads. An interrupt drops the calls that
// have not started; a second one also ends the wait for running calls.
void wait_for(Calls& run) {
  Helped shared{&run, {}};
  const Helping helping(&shared);
  try {
    wait_interruptibly([&](Clock::time_point until) { return run.help_until(until); });
  } catch (const py::error_already_set& error) {
    shared.interrupt = exception_of(error);
    {
      const WithoutGil released;
      run.cancel();
    }
    wait_interruptibly([&](Clock::time_point until) { return run.wait_until(until); });
  }
  if (shared.interrupt) raise(shared.interrupt);
}

void raise_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CallRaised& raised) {
    raise(raised.object->get());
  } catch (...) {
    set_python_error(error);
    throw py::error_already_set();
  }
}

void parallel_for(const PyWorkerPool& pool, int count, const py::typing::Callable<py::object(int)>& function,
                  double inline_limit) {
  if (count < 0) raise(PyExc_ValueError, "parallel_for: count must be at least 0, got %d", count);
  const auto limit = seconds_up_to_a_year(inline_limit, inline_limit >= 0,
                                          "parallel_for: inline_limit must be a number of seconds of at least 0");
  auto workers = pool.of_this_process("parallel_for");
  const auto kept = std::make_shared<GilObject>(borrow(function.ptr()));
  const auto call_one = [](PyObject* function, int number) {
    try {
      const py::int_ argument(number);
      own(or_stay([&] { return PyObject_CallOneArg(function, argument.ptr()); }));
    } catch (const py::error_already_set& raised) {
      py::object error = exception_of(raised);
      if (helped != nullptr && is_interrupt(error)) {
        helped->interrupt = error;
        const WithoutGil released;
        helped->run->cancel();
      }
      throw CallRaised(std::move(error));
    }
  };
  const auto call = [kept, call_one](int number) { with_gil([&] { call_one(kept->get(), number); }); };
  std::shared_ptr<Calls> run;
  {
    const WithoutGil released;
    run = Calls::start(workers->threads, count, call, limit);
  }
  // Drops the run and the pool without the GIL. The last thread to drop the run destroys the exceptions of its calls;
  // that may be a worker that has just made the last call.
  struct Released {
    ~Released() {
      const WithoutGil released;
      run.reset();
      workers.reset();
    }
    std::shared_ptr<Calls>& run;
    std::shared_ptr<Threads>& workers;
  };
  const Released at_end{run, workers};
  wait_for(*run);
  if (run->error()) raise_error(run->error());
}

}  // namespace

void bind_worker_pool(py::module_& module) {
  py::class_<Task, std::shared_ptr<Task>>(module, "Future",
                                          "The outcome of a task, to come. Made by :meth:`WorkerPool.submit`.")
      .def("done", &Task::done, "True once the task has ended.")
      .def("result", &Task::result, py::arg("timeout") = py::none(),
           "Wait for the task, ``timeout`` seconds at most, and return its value, or raise what it raised.\n\n"
           "Raises:\n"
           "    TimeoutError: the task has not ended in time.\n"
           "    concurrent.futures.CancelledError: the pool was shut down before the task had started.\n"
           "    RuntimeError: the process is a fork that has not got the pool's workers.");

  py::class_<PyWorkerPool>(
      module, "WorkerPool",
      "Threads that run submitted functions, first come, first served.\n\n"
      "When the last reference is dropped, queued tasks still run, and nothing waits for them. At\n"
      "interpreter exit queued tasks are cancelled, and running ones are waited for.")
      .def(
          py::init<int, int, double, double>(), py::arg("workers"), py::arg("most") = 0, py::arg("still") = 0.008,
          py::arg("idle") = 5.0,
          "Start ``workers`` threads, and more, up to ``most``, while functions are queued and threads wait: a thread\n"
          "waits if it has used no processor for ``still`` seconds. Threads beyond ``workers`` end after ``idle``\n"
          "seconds without work.")
      // The parameter for the function has no name, so that all keyword arguments are passed to the function.
      .def("submit", &PyWorkerPool::submit,
           "Queue ``arg0(*args, **kwargs)`` and return its :class:`Future`; RuntimeError after a shutdown.")
      .def("shutdown", &PyWorkerPool::shutdown, py::arg("drain") = true,
           "Refuse further tasks and wait for the workers to end; without ``drain``, cancel what has not started.")
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

  module.def(
      "parallel_for", &parallel_for, py::arg("pool"), py::arg("count"), py::arg("function"),
      py::arg("inline_limit") = 0.0,
      "Call ``function(i)`` for every ``i`` in ``range(count)``, on the workers of ``pool`` and on this thread.\n\n"
      "No worker is called as long as this thread ends a call within every ``inline_limit`` seconds. Calls may\n"
      "call this function, too, however few workers there are.\n\n"
      "Raises:\n"
      "    BaseException: the exception of the call with the lowest number, once all calls have ended. On Ctrl-C,\n"
      "        calls that have not started are left out, and the others are waited for, unless there is a second one.\n"
      "    concurrent.futures.CancelledError: the pool was stopped before all calls had started, and none raised.\n"
      "    RuntimeError: the pool was shut down, or belongs to the parent of this process.");
}

}  // namespace pymoe::bindings
