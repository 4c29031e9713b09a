// PyBatchFunction: what a batch of requests goes through. Rows are gathered into pooled memory, many of them without
// the GIL; Python's function is called on tensors over it; its output is cut into views, one structure a request.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"
#include "bindings/turnstile.h"

#include <exception>
#include <string>

namespace pymoe::bindings {

class PyBatchFunction final : public runtime::BatchFunction<SystemSync> {
 public:
  // `pin_memory`: gather tensors of the host into page-locked memory.
  PyBatchFunction(std::string name, Ref function, bool pin_memory);
  ~PyBatchFunction() override;

  void run(Batch batch) override;
  bool may_retry(const std::exception_ptr& error) override;
  void deliver(const std::function<void()>& complete) override { deliver_through_turnstile(complete); }

  // For Python's garbage collector; under the GIL.
  PyObject* function() const { return function_; }
  void clear() { Py_CLEAR(function_); }

 private:
  Ref call(const std::vector<Ref>& tensors) const;

  const std::string where_;  // "TaskPool 'name'"
  PyObject* function_;       // null once its pool was collected
  PyObject* range_;          // what the profiler shows
  const bool pin_memory_;
};

// set_plain_runner(function): what calls a function on a thread in the state in which threads begin.
PyObject* set_plain_runner(PyObject* module, PyObject* function);

// The KeyboardInterrupt that ended a batch on this thread; what waited there raises it. Null if there is none.
Ref take_interrupt();

}  // namespace pymoe::bindings
