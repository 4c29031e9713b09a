// The bound WorkerPool, for what else runs on it.
#pragma once

#include <pybind11/typing.h>

#include <memory>

#include "bindings/process.h"
#include "runtime/worker_pool.h"

namespace pymoe::bindings {

// The workers behind a pymoe._runtime.WorkerPool: they outlive its Python object until they have stopped.
class StoppablePool : public Stoppable {
 public:
  using Growth = runtime::Growth<runtime::SystemSync>;

  explicit StoppablePool(int workers, Growth growth = {}) : pool(workers, with_thread_state, growth) {}
  void cancel() override { pool.request_stop(runtime::Stop::kCancel); }
  bool stopped_by(std::chrono::steady_clock::time_point until) override { return pool.wait_stopped_until(until); }
  bool on_worker() const override { return pool.on_worker(); }

  runtime::WorkerPool<runtime::SystemSync> pool;
};

class PyFuture;

// pymoe._runtime.WorkerPool. All under the GIL.
class PyWorkerPool {
 public:
  // `still` and `idle` in seconds.
  PyWorkerPool(int workers, int most, double still, double idle);
  ~PyWorkerPool();
  PyWorkerPool(const PyWorkerPool&) = delete;
  PyWorkerPool& operator=(const PyWorkerPool&) = delete;

  PyFuture submit(py::object function, py::Args<py::object> args, py::KWArgs<py::object> kwargs);
  void shutdown(bool drain);
  int workers() const { return kept_->pool.workers(); }
  // Throws std::runtime_error, with `where`, if the pool belongs to the parent of this process.
  std::shared_ptr<StoppablePool> kept(const char* where) const;

 private:
  std::shared_ptr<StoppablePool> kept_;
  int created_;
};

}  // namespace pymoe::bindings
