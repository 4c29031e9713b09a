// PyBatchFunction: what a batch of requests goes through. Rows are gathered into pooled memory, many of them without
// the GIL; Python's function is called on tensors over it; its output is cut into views, one structure a request.
//
// Why GPU batches call the project's own operator through Python while CPU rows call cpu::gather_batch directly: this
// module includes no header of torch, so that one build serves every torch from 2.11 on and compiles in seconds. Memory
// of the host it can allocate and hand to torch (DLPack); memory of a GPU belongs to torch's caching allocator, and
// work on it to torch's current stream, and the operator knows both. The same price is paid for grad modes, profiler
// ranges, torch.cat and torch.split, which torch_calls.h reaches through Python. It is a few microseconds a batch,
// beside the start of a kernel and a copy.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"
#include "bindings/turnstile.h"
#include "runtime/buffer_pool.h"

#include <exception>
#include <string>

namespace pymoe::bindings {

class PyBatchFunction final : public runtime::BatchFunction<SystemSync> {
 public:
  // `pin_memory`: gather tensors of the host into page-locked memory.
  PyBatchFunction(std::string name, py::object function, bool pin_memory);
  ~PyBatchFunction() override;

  void run(Batch batch) override;
  bool may_retry(const std::exception_ptr& error) override;
  void deliver(const std::function<void()>& complete) override { deliver_through_turnstile(complete); }

  // For Python's garbage collector; under the GIL.
  PyObject* function() const { return function_; }
  void clear() { Py_CLEAR(function_); }

 private:
  py::object call(Batch batch, const std::vector<py::object>& tensors) const;

  const std::string where_;  // "TaskPool 'name'"
  PyObject* function_;       // null once its pool was collected
  PyObject* range_;          // what the profiler shows
  const bool pin_memory_;
};

// The memory that batches are gathered into: one pool for the process, which outlives every tensor over it.
runtime::BufferPool& buffers();

// Raises the KeyboardInterrupt that ended a batch on this thread, for what waited there.
[[noreturn]] void raise_interrupt();

}  // namespace pymoe::bindings
