// Executor of pymoe._runtime: the threads that serve the pools of a pymoe.runtime.Runtime, which holds the pools.
#include "runtime/executor.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "bindings/bind.h"
#include "bindings/process.h"
#include "bindings/task_pool.h"

namespace pymoe::bindings {
namespace {

using runtime::Stop;
using StrandPointer = std::shared_ptr<runtime::Strand<SystemSync>>;
using PoolPointers = std::vector<std::shared_ptr<Pool>>;

class StoppableExecutor final : public Stoppable {
 public:
  explicit StoppableExecutor(int workers) : executor(workers, serve_with_thread_state) {}
  void cancel() override { executor.request_stop(Stop::kCancel); }
  bool stopped_by(Clock::time_point until) override { return executor.wait_stopped_until(until); }
  bool on_worker() const override { return executor.on_worker(); }

  runtime::Executor<SystemSync> executor;
};

PoolPointers pools_in(const py::iterable& objects) {
  PoolPointers pools;
  for (py::handle object : objects) pools.push_back(pool_of(object.ptr(), "Runtime: a pool"));
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

class PyExecutor {
 public:
  // Checks the pools, too, which are not served before start.
  PyExecutor(int workers, const py::iterable& pools) : workers_(workers) {
    pools_in(pools);
    if (workers < 1) raise(PyExc_ValueError, "Runtime: num_workers must be at least 1, got %d", workers);
  }

  // Dropped without a shutdown. May run on any thread, a worker of its own included, so it does not wait: the process
  // keeps the threads until they have stopped. A parent's locks may be held for ever.
  ~PyExecutor() {
    if (!running_) return;
    if (created_ != generation()) {
      new std::shared_ptr(std::move(running_));
      return;
    }
    const WithoutGil released;
    running_->cancel();
    running_.reset();
  }
  PyExecutor(const PyExecutor&) = delete;
  PyExecutor& operator=(const PyExecutor&) = delete;

  bool running() const { return running_ != nullptr; }

  void start(const py::iterable& objects) {
    require_this_process(created_, "Runtime.start", "Runtime");
    if (running_) return;
    const PoolPointers pools = pools_in(objects);
    std::shared_ptr<StoppableExecutor> threads;
    bool all = true;
    {
      const WithoutGil released;
      threads = std::make_shared<StoppableExecutor>(workers_);
      keep_until_stopped(threads);
      all = serve(threads->executor, pools);
      if (!all) threads->cancel();
    }
    if (!all) {
      wait_interruptibly([&](Clock::time_point until) { return threads->stopped_by(until); });
      raise(PyExc_RuntimeError,
            "Runtime.start: one of its pools is served by another Runtime, which was not shut down");
    }
    running_ = std::move(threads);
  }

  void shutdown(bool drain) {
    const auto threads = others_threads("Runtime.shutdown", "its own runtime");
    if (!threads) return;
    {
      const WithoutGil released;
      threads->executor.request_stop(drain ? Stop::kDrain : Stop::kCancel);
    }
    wait_interruptibly([&](Clock::time_point until) { return threads->stopped_by(until); });
    if (running_ == threads) running_.reset();
  }

  void add(const py::iterable& objects) {
    attach(objects, [](auto& executor, const PoolPointers& pools) { return serve(executor, pools); });
  }

  void take_back(const py::iterable& objects) {
    attach(objects, [](auto& executor, const PoolPointers& pools) {
      try {
        for (const auto& strand : strands_of(pools)) executor.reopen(strand);
        return true;
      } catch (const runtime::StoppedError&) {
      } catch (const std::logic_error&) {
      }
      return false;
    });
  }

  bool release(const py::iterable& objects, bool drain, std::optional<double> timeout) {
    const auto deadline = deadline_after(timeout);
    const std::vector<StrandPointer> strands = strands_of(pools_in(objects));
    const auto threads = others_threads("Runtime.remove", "what its own runtime serves");
    if (!threads) return true;
    {
      const WithoutGil released;
      for (const auto& strand : strands)
        threads->executor.request_release(strand, drain ? Stop::kDrain : Stop::kCancel);
    }
    for (const auto& strand : strands) {
      const auto ended = [&](Clock::time_point until) { return threads->executor.wait_released_until(strand, until); };
      if (!wait_interruptibly(ended, deadline)) return false;
    }
    return true;
  }

 private:
  // Null if it does not run. Throws where this is one of its threads, which cannot wait for the end of `whose`.
  std::shared_ptr<StoppableExecutor> others_threads(const char* where, const char* whose) const {
    require_this_process(created_, where, "Runtime");
    if (running_ && running_->on_worker()) {
      raise(PyExc_RuntimeError, "%s: a worker cannot wait for the end of %s", where, whose);
    }
    return running_;
  }

  template <typename How>
  void attach(const py::iterable& objects, const How& how) {
    require_this_process(created_, "Runtime.add", "Runtime");
    const PoolPointers pools = pools_in(objects);
    const auto threads = running_;
    if (!threads) return;
    bool all;
    {
      const WithoutGil released;
      all = how(threads->executor, pools);
    }
    if (!all) {
      raise(PyExc_RuntimeError,
            "Runtime.add: one of the pools is served by another Runtime, or this one is being shut down");
    }
  }

  std::shared_ptr<StoppableExecutor> running_;  // null while it does not run
  const int workers_;
  const int created_ = generation();
};

}  // namespace

void bind_executor(py::module_& module) {
  py::class_<PyExecutor>(module, "Executor", "The threads that serve the pools of a Runtime, which documents the rest.")
      .def(py::init<int, const py::iterable&>(), py::arg("workers"), py::arg("pools"))
      .def("running", &PyExecutor::running, "True from start to the end of shutdown.")
      .def("start", &PyExecutor::start, py::arg("pools"), "Start the workers; nothing if they run already.")
      .def("shutdown", &PyExecutor::shutdown, py::arg("drain"), "Wait until all requests are done and workers ended.")
      .def("add", &PyExecutor::add, py::arg("pools"), "Serve these as well; nothing where it does not run.")
      .def("release", &PyExecutor::release, py::arg("pools"), py::arg("drain"), py::arg("timeout"),
           "Close these, wait until their requests are done, and serve them no longer; False if that takes longer.")
      .def("take_back", &PyExecutor::take_back, py::arg("pools"),
           "Open these again, of which release has not seen the end; nothing where it does not run.");
}

}  // namespace pymoe::bindings
