// What of a thread's Python state a batch has for itself, whoever's thread it runs on: an empty context and a stack of
// its own depth. Under the GIL.
#pragma once

#include "bindings/gil.h"

namespace pymoe::bindings {

// Context variables (decimal's precision, numpy's error state, what a web framework keeps there) are those of a thread
// that has just begun, while this lives: a client's are not seen, and what is set is forgotten.
class EmptyContext {
 public:
  EmptyContext() : context_(Ref::checked(PyContext_New())) {
    if (PyContext_Enter(context_.get()) != 0) throw ErrorSet();
  }
  ~EmptyContext() {
    const Ref error = PyErr_Occurred() ? take_error() : Ref();
    if (PyContext_Exit(context_.get()) != 0) PyErr_Clear();
    if (error) set_error(error.get());
  }
  EmptyContext(const EmptyContext&) = delete;
  EmptyContext& operator=(const EmptyContext&) = delete;

 private:
  const Ref context_;
};

// The calls that the thread is inside of do not count towards the recursion limit while this lives: a client that waits
// near its limit runs other clients' requests as a worker would. The limit may change meanwhile.
class WholeStack {
 public:
  WholeStack() : state_(PyThreadState_Get()), used_(depth()) { add(-used_); }
  ~WholeStack() { add(used_); }
  WholeStack(const WholeStack&) = delete;
  WholeStack& operator=(const WholeStack&) = delete;

 private:
#if PY_VERSION_HEX >= 0x030C0000
  int depth() const { return state_->py_recursion_limit - state_->py_recursion_remaining; }
  void add(int calls) { state_->py_recursion_remaining -= calls; }
#elif PY_VERSION_HEX >= 0x030B0000
  int depth() const { return state_->recursion_limit - state_->recursion_remaining; }
  void add(int calls) { state_->recursion_remaining -= calls; }
#else
  int depth() const { return state_->recursion_depth; }
  void add(int calls) { state_->recursion_depth += calls; }
#endif

  PyThreadState* const state_;
  const int used_;
};

}  // namespace pymoe::bindings
