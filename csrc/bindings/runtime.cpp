// The Python module pymoe._runtime: the only file that includes pybind11. No torch header comes here.
//
// Rules of this file:
//   - The GIL is released around everything that may wait, join or queue, and no lock of the runtime is held while the
//     GIL is taken. Python objects that live inside tasks are destroyed under the GIL (GilObject).
//   - Waits run in slices of at most kSlice, between which signals are served: Ctrl-C ends any of them.
//   - Importing starts no thread. At interpreter exit an atexit hook cancels what is queued and joins all workers: a
//     thread that asks for the GIL of an interpreter that is gone ends the process in an abort.
//   - After a fork the child has none of the parent's workers. It gets an error where it would wait for them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/worker_pool.h"

namespace py = pybind11;

namespace pymoe::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using Pool = WorkerPool<SystemSync>;
constexpr std::chrono::milliseconds kSlice{50};

// Calls ended(slice), which waits for at most `slice`, until it returns true or `timeout` seconds have passed.
template <typename Ended>
bool wait_interruptibly(const Ended& ended, std::optional<double> timeout = std::nullopt) {
  if (timeout && std::isnan(*timeout)) throw py::value_error("timeout must be a number of seconds, got nan");
  const auto start = Clock::now();
  for (;;) {
    std::chrono::milliseconds slice = kSlice;
    if (timeout) {
      const double left = *timeout - std::chrono::duration<double>(Clock::now() - start).count();
      slice = std::chrono::milliseconds(static_cast<int64_t>(std::clamp(left * 1e3 + 1, 0.0, 50.0)));
    }
    bool reached;
    {
      const py::gil_scoped_release released;
      reached = ended(slice);
    }
    if (reached) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout && std::chrono::duration<double>(Clock::now() - start).count() >= *timeout) return false;
  }
}

// A Python object that may be moved and destroyed without the GIL.
class GilObject {
 public:
  GilObject() = default;
  explicit GilObject(py::object object) : pointer_(object.release().ptr()) {}
  GilObject(GilObject&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  GilObject& operator=(GilObject&&) = delete;
  ~GilObject() {
    if (pointer_ == nullptr) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(pointer_);
  }

  // Both under the GIL.
  py::object get() const { return py::reinterpret_borrow<py::object>(pointer_); }
  py::object take() { return py::reinterpret_steal<py::object>(std::exchange(pointer_, nullptr)); }

 private:
  PyObject* pointer_ = nullptr;
};

// What a call ended with: its value, or the exception that it raised.
struct Outcome {
  GilObject object;
  bool raised;
};

class Call {
 public:
  Call(py::object function, py::object args, py::object kwargs)
      : function_(std::move(function)), args_(std::move(args)), kwargs_(std::move(kwargs)) {}

  Outcome operator()() {
    const py::gil_scoped_acquire gil;
    const py::object function = function_.take(), args = args_.take(), kwargs = kwargs_.take();
    PyObject* value = PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr());
    if (value != nullptr) return {GilObject(py::reinterpret_steal<py::object>(value)), false};
    const py::error_already_set error;
    PyException_SetTraceback(error.value().ptr(), error.trace() ? error.trace().ptr() : Py_None);
    return {GilObject(error.value()), true};
  }

 private:
  GilObject function_, args_, kwargs_;
};

// --- process-wide state ---

// Every pool that may have workers; the pool of a collected Python object stays until its workers have ended.
// Never destroyed: static destruction would come while threads may still look at it.
struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Pool>> pools;
};

Registry* registry = new Registry;
std::atomic<int> generation{0};  // counts forks: a pool of another generation has no workers in this process
std::atomic<bool> exiting{false};

// In the child of a fork. The parent's registry is left behind, since another thread may have held its lock.
void start_generation() {
  registry = new Registry;
  generation.fetch_add(1);
}

void require_this_process(int created, const char* what) {
  if (created == generation.load()) return;
  throw std::runtime_error(std::string(what) +
                           ": this pool was created before a fork, and its workers exist only in the parent process; "
                           "create a new WorkerPool in the child");
}

// Drops the pools whose Python object has gone and whose workers have ended.
void reap() {
  std::vector<std::shared_ptr<Pool>> ended;
  const std::lock_guard lock(registry->mutex);
  std::erase_if(registry->pools, [&](std::shared_ptr<Pool>& pool) {
    if (pool.use_count() > 1 || pool->on_worker() || !pool->wait_stopped_until(Clock::now())) return false;
    ended.push_back(std::move(pool));
    return true;
  });
}

// Gives a worker one Python thread state for its whole life, so that thread-local data outlives a task.
void with_thread_state(const std::function<void()>& work) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyThreadState* saved = PyEval_SaveThread();
  work();
  PyEval_RestoreThread(saved);
  PyGILState_Release(state);
}

void stop_all() {
  std::vector<std::shared_ptr<Pool>> pools;
  {
    const py::gil_scoped_release released;
    {
      const std::lock_guard lock(registry->mutex);
      exiting = true;  // under the lock: a pool is registered before this copy, or not at all
      pools = registry->pools;
    }
    for (const auto& pool : pools) pool->request_stop(Stop::kCancel);
  }
  for (const auto& pool : pools) {
    wait_interruptibly([&](std::chrono::milliseconds slice) { return pool->wait_stopped_until(Clock::now() + slice); });
  }
}

// --- the bound classes ---

class PyFuture {
 public:
  PyFuture(Future<Outcome> future, int created) : future_(std::move(future)), created_(created) {}

  bool done() const { return future_.done(); }

  py::object result(std::optional<double> timeout) const {
    const Outcome& outcome = wait("Future.result", timeout);
    if (!outcome.raised) return outcome.object.get();
    const py::object error = outcome.object.get();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw py::error_already_set();
  }

  py::object exception(std::optional<double> timeout) const {
    const Outcome& outcome = wait("Future.exception", timeout);
    return outcome.raised ? outcome.object.get() : py::none();
  }

 private:
  const Outcome& wait(const char* what, std::optional<double> timeout) const {
    if (!future_.done()) {
      require_this_process(created_, what);
      if (!wait_interruptibly([&](std::chrono::milliseconds slice) { return future_.wait_for(slice); }, timeout)) {
        PyErr_SetString(PyExc_TimeoutError, (std::string(what) + ": the task has not ended in time").c_str());
        throw py::error_already_set();
      }
    }
    try {
      return future_.get();
    } catch (const Cancelled& error) {
      const py::object type = py::module_::import("concurrent.futures").attr("CancelledError");
      PyErr_SetString(type.ptr(), error.what());
      throw py::error_already_set();
    }
  }

  Future<Outcome> future_;
  int created_;
};

class PyWorkerPool {
 public:
  explicit PyWorkerPool(int workers) : created_(generation.load()) {
    const py::gil_scoped_release released;  // also while a pool that came too late joins its workers
    reap();
    auto pool = std::make_shared<Pool>(workers, with_thread_state);
    bool registered = false;
    {
      const std::lock_guard lock(registry->mutex);
      if (!exiting) {
        registry->pools.push_back(pool);
        registered = true;
      }
    }
    if (!registered) {
      pool.reset();
      throw std::runtime_error("WorkerPool: the interpreter is exiting");
    }
    pool_ = std::move(pool);
  }

  // May run on any thread, a worker of this very pool included, so it does not wait: the registry keeps the pool.
  ~PyWorkerPool() {
    if (created_ == generation.load()) pool_->request_stop(Stop::kDrain);
  }

  PyWorkerPool(const PyWorkerPool&) = delete;
  PyWorkerPool& operator=(const PyWorkerPool&) = delete;

  PyFuture submit(py::object function, py::Args<py::object> args, py::KWArgs<py::object> kwargs) {
    require_this_process(created_, "WorkerPool.submit");
    if (!PyCallable_Check(function.ptr())) {
      throw py::type_error("WorkerPool.submit: the first argument must be callable, got " +
                           std::string(Py_TYPE(function.ptr())->tp_name));
    }
    Call call(std::move(function), std::move(args), std::move(kwargs));
    const py::gil_scoped_release released;
    return {pool_->submit(std::move(call)), created_};
  }

  void shutdown(bool drain) {
    require_this_process(created_, "WorkerPool.shutdown");
    if (pool_->on_worker()) {
      throw std::runtime_error("WorkerPool.shutdown: a worker cannot wait for the end of its own pool");
    }
    {
      const py::gil_scoped_release released;
      pool_->request_stop(drain ? Stop::kDrain : Stop::kCancel);
    }
    wait_interruptibly(
        [&](std::chrono::milliseconds slice) { return pool_->wait_stopped_until(Clock::now() + slice); });
  }

  int workers() const { return pool_->workers(); }

 private:
  std::shared_ptr<Pool> pool_;
  int created_;
};

}  // namespace
}  // namespace pymoe::runtime

PYBIND11_MODULE(_runtime, module, py::mod_gil_not_used()) {
  using namespace pymoe::runtime;
  module.doc() = "The native runtime of pymoe.";
  module.attr("compiler") = __VERSION__;

  py::class_<PyFuture>(module, "Future", "The outcome of a task, to come. Made by :meth:`WorkerPool.submit`.")
      .def("done", &PyFuture::done, "True once the task has ended.")
      .def("result", &PyFuture::result, py::arg("timeout") = py::none(),
           "Wait for the task and return its value, or raise what it raised.\n\n"
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
                           "A fixed number of threads that run submitted functions, first come, first served.\n\n"
                           "Dropping the last reference lets queued tasks run and does not wait for them; at\n"
                           "interpreter exit queued tasks are cancelled and running ones waited for.")
      .def(py::init<int>(), py::arg("workers"),
           "Start ``workers`` threads.\n\n"
           "Raises:\n"
           "    ValueError: ``workers`` is less than 1.")
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
      .def_property_readonly("workers", &PyWorkerPool::workers, "The number of threads.")
      .def(
          "__enter__", [](PyWorkerPool& self) -> PyWorkerPool& { return self; }, py::return_value_policy::reference)
      .def(
          "__exit__",
          [](PyWorkerPool& self, const py::object& type, const py::object&, const py::object&) {
            self.shutdown(type.is_none());
          },
          py::arg("type"), py::arg("value"), py::arg("traceback"),
          "Shut down: draining, or cancelling what is queued if the block raised.");

#if !defined(_WIN32)
  pthread_atfork(nullptr, nullptr, start_generation);
#endif
  py::module_::import("atexit").attr("register")(py::cpp_function(&stop_all));
}
