// Executor of pymoe._runtime: the threads that serve the pools of a pymoe.runtime.Runtime. (The Runtime keeps the
// pools.)
#include "runtime/executor.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/process.h"
#include "bindings/request.h"

namespace pymoe::bindings {
namespace {

using runtime::Stop;
using ServerThreads = Stopping<runtime::Executor<SystemSync>>;
using Strands = std::vector<std::shared_ptr<runtime::Strand<SystemSync>>>;

// Returns the strands of the pools, each once.
Strands strands_of(const py::iterable& pools) {
  Strands strands;
  for (py::handle pool : pools) {
    const auto strand = pool_of(pool.ptr(), "Runtime: a pool")->strand();
    if (std::find(strands.begin(), strands.end(), strand) == strands.end()) strands.push_back(strand);
  }
  return strands;
}

// Attaches all strands and returns true; or attaches none and returns false, if some strand is already attached. Call
// with the GIL held, which keeps other threads from attaching.
bool attach(ServerThreads& threads, const Strands& strands) {
  if (std::any_of(strands.begin(), strands.end(), [](const auto& strand) { return strand->attached(); })) return false;
  threads.threads.attach(strands);
  return true;
}

class PyExecutor {
 public:
  // Checks the pools already here, although they are not served before start().
  PyExecutor(int workers, const py::iterable& pools) : workers_(workers) {
    strands_of(pools);
    if (workers < 1) raise(PyExc_ValueError, "Runtime: num_workers must be at least 1, got %d", workers);
  }

  // Runs if the executor was dropped without a shutdown. May run on any thread, even one of its workers, so it does not
  // wait: the process keeps the threads until they have stopped. In a forked child it keeps the executor for ever,
  // because the parent's locks may never be released.
  ~PyExecutor() {
    if (!running_) return;
    if (created_ != generation()) {
      new std::shared_ptr(std::move(running_));
      return;
    }
    const WithoutGil released;
    running_->request_stop(Stop::kCancel);
    running_.reset();
  }
  PyExecutor(const PyExecutor&) = delete;
  PyExecutor& operator=(const PyExecutor&) = delete;

  bool running() const { return running_ != nullptr; }

  void start(const py::iterable& pools) {
    require_this_process(created_, "Runtime.start", "Runtime");
    if (running_) return;
    const Strands strands = strands_of(pools);
    std::shared_ptr<ServerThreads> threads;
    {
      const WithoutGil released;  // outlives `made`, whose threads are joined here if the interpreter is exiting
      auto made = std::make_shared<ServerThreads>(workers_, serve_with_thread_state);
      keep_until_stopped(made);
      threads = std::move(made);
    }
    if (attach(*threads, strands)) {
      running_ = std::move(threads);
      return;
    }
    stop(*threads, Stop::kCancel);
    std::string taken = "one of its pools";  // one that was served a moment ago
    for (py::handle pool : pools) {
      const auto core = pool_of(pool.ptr(), "Runtime: a pool");
      if (core->strand()->attached()) taken = "the pool '" + core->name() + "'";
    }
    raise(
        PyExc_RuntimeError,
        "Runtime.start: %s is served by another Runtime, which was not shut down: give all backends to one Runtime, or "
        "shut the other down first",
        taken.c_str());
  }

  void shutdown(bool drain) {
    const auto threads = others_threads("Runtime.shutdown", "its own runtime");
    if (!threads) return;
    stop(*threads, drain ? Stop::kDrain : Stop::kCancel);
    if (running_ == threads) running_.reset();
  }

  void add(const py::iterable& pools) {
    change("Runtime.add", pools, [](ServerThreads& threads, const Strands& strands) {
      if (!attach(threads, strands)) throw std::logic_error("served elsewhere");
    });
  }

  void take_back(const py::iterable& pools) {
    change("Runtime.add", pools, [](ServerThreads& threads, const Strands& strands) {
      for (const auto& strand : strands) threads.threads.reopen(strand);
    });
  }

  bool release(const py::iterable& pools, bool drain, std::optional<double> timeout) {
    const auto deadline = deadline_after(timeout);
    const Strands strands = strands_of(pools);
    const auto threads = others_threads("Runtime.remove", "what its own runtime serves");
    if (!threads) return true;
    {
      const WithoutGil released;
      runtime::Strand<SystemSync>::request_stop(strands, drain ? Stop::kDrain : Stop::kCancel);
    }
    return std::all_of(strands.begin(), strands.end(), [&](const auto& strand) {
      const auto ended = [&](Clock::time_point until) { return threads->threads.wait_released_until(strand, until); };
      return wait_interruptibly(ended, deadline);
    });
  }

 private:
  // Returns the running executor, or null if none runs. Throws a RuntimeError ("`where`: a worker cannot wait for the
  // end of `whose`") on one of the executor's threads, and std::runtime_error in a forked child.
  std::shared_ptr<ServerThreads> others_threads(const char* where, const char* whose) const {
    require_this_process(created_, where, "Runtime");
    if (running_ && running_->on_worker()) {
      raise(PyExc_RuntimeError, "%s: a worker cannot wait for the end of %s", where, whose);
    }
    return running_;
  }

  // Calls how(executor, strands) if the executor runs. Keeps the GIL, because how() waits only for locks under which no
  // thread asks for the GIL.
  template <typename How>
  void change(const char* where, const py::iterable& pools, const How& how) {
    require_this_process(created_, where, "Runtime");
    const Strands strands = strands_of(pools);
    if (!running_) return;
    const auto refuse = [where] {
      raise(PyExc_RuntimeError, "%s: one of the pools is served by another Runtime, or this one is being shut down",
            where);
    };
    try {
      how(*running_, strands);
    } catch (const runtime::StoppedError&) {
      refuse();
    } catch (const std::logic_error&) {
      refuse();
    }
  }

  std::shared_ptr<ServerThreads> running_;  // null while it does not run
  const int workers_;
  const int created_ = generation();
};

}  // namespace

void bind_executor(py::module_& module) {
  py::class_<PyExecutor>(module, "Executor", "The threads that serve the pools of a Runtime; see there.")
      .def(py::init<int, const py::iterable&>(), py::arg("workers"), py::arg("pools"))
      .def("running", &PyExecutor::running, "True from start to the end of shutdown.")
      .def("start", &PyExecutor::start, py::arg("pools"), "Start the workers, unless they run already.")
      .def("shutdown", &PyExecutor::shutdown, py::arg("drain"),
           "Wait until all requests are done and all workers have ended.")
      .def("add", &PyExecutor::add, py::arg("pools"), "Serve these pools, too; has no effect unless the executor runs.")
      .def("release", &PyExecutor::release, py::arg("pools"), py::arg("drain"), py::arg("timeout"),
           "Close these pools, wait until their requests are done, and stop serving them; False after the timeout.")
      .def("take_back", &PyExecutor::take_back, py::arg("pools"),
           "Open these pools again after a release that timed out; has no effect unless the executor runs.");
}

}  // namespace pymoe::bindings
