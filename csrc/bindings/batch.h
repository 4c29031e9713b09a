// PyBatchFunction: runs a batch of requests. Rows are gathered into pooled memory, without the GIL if they are many;
// the Python function is called on tensors over this memory; its output is copied and cut into views, one structure per
// request.
//
// CPU rows use cpu::gather_batch directly, while GPU batches call the project's operator through Python: this module
// includes no header of torch, so that one build serves every torch from 2.11 on and compiles in seconds. It can
// allocate memory of the host and pass it to torch (DLPack). Memory of a GPU belongs to torch's caching allocator, and
// work on it to torch's current stream; the operator handles both. For the same reason grad modes, profiler ranges,
// torch.cat and torch.split are called through Python (torch_calls.h). These calls cost a few microseconds per batch.
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
