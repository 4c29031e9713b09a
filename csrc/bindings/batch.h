// PyBatchFunction: runs a batch of requests. Each argument's rows are gathered into one tensor, the Python function is
// called on these tensors, and its output is copied and split into views, one structure of them per request.
//
// CPU rows are gathered by cpu::gather_batch into pooled memory, without the GIL if there is much to copy, or into
// page-locked memory with `pin_memory`. GPU rows are gathered by the project's operator, called through Python. The
// reason is that this module includes no torch header, so that one build serves every torch from 2.11 on and compiles
// in seconds. It can allocate host memory and pass it to torch (DLPack), but GPU memory must come from torch's caching
// allocator, and GPU work must run on torch's current stream; the operator handles both. Grad modes, profiler ranges,
// torch.cat and torch.split are called through Python for the same reason (torch_calls.h). These calls cost a few
// microseconds per batch.
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

  // For Python's garbage collector. Call these two functions with the GIL held.
  PyObject* function() const { return function_; }
  void clear() { Py_CLEAR(function_); }

 private:
  py::object call(Batch batch, const std::vector<py::object>& tensors) const;

  const std::string where_;  // "TaskPool 'name'"
  PyObject* function_;       // null after its pool was collected
  PyObject* range_;          // name in the profiler
  const bool pin_memory_;
};

// Returns the memory into which batches are gathered: one pool per process, which outlives every tensor over it.
runtime::BufferPool& buffers();

// Raises the KeyboardInterrupt that arrived while this thread ran a batch. Called by the function that ran the batch
// while waiting.
[[noreturn]] void raise_interrupt();

}  // namespace pymoe::bindings
