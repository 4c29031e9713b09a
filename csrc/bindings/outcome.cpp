#include "bindings/outcome.h"

#include <new>
#include <stdexcept>

#include "runtime/completion.h"
#include "runtime/worker_pool.h"

namespace pymoe::bindings {
namespace {

PyObject* cancelled_error = nullptr;

}  // namespace

void find_cancelled_error() {
  const Ref module = Ref::checked(PyImport_ImportModule("concurrent.futures"));
  cancelled_error = Ref::checked(PyObject_GetAttrString(module.get(), "CancelledError")).release();
}

void raise_as_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ErrorSet&) {
    throw;
  } catch (const runtime::Cancelled& cancelled) {
    raise(cancelled_error, "%s", cancelled.what());
  } catch (const runtime::DeadlineExceeded& late) {
    raise(PyExc_TimeoutError, "%s", late.what());
  } catch (const std::bad_alloc&) {
    raise(PyExc_MemoryError, "no memory for a batch");
  } catch (const std::invalid_argument& wrong) {
    raise(PyExc_ValueError, "%s", wrong.what());
  } catch (const std::exception& other) {
    raise(PyExc_RuntimeError, "%s", other.what());
  }
}

Ref exception_of(const TensorRequest& request) {
  if (!request.error()) return Ref();
  try {
    std::rethrow_exception(request.error());
  } catch (const BatchRaised&) {
    if (request.outcome != nullptr && PyExceptionInstance_Check(request.outcome)) {
      // Every request of a batch raises the one exception, in threads of their own. Without this its traceback would
      // grow by the frames of each.
      PyException_SetTraceback(request.outcome, request.traceback != nullptr ? request.traceback : Py_None);
      return Ref::borrow(request.outcome);
    }
  } catch (...) {
    // said below
  }
  try {
    raise_as_python(request.error());
  } catch (const ErrorSet&) {
    return take_error();
  }
}

bool was_cancelled(const TensorRequest& request) {
  if (!request.done() || !request.error()) return false;
  try {
    std::rethrow_exception(request.error());
  } catch (const runtime::Cancelled&) {
    return true;
  } catch (...) {
    return false;
  }
}

bool is_interrupt(PyObject* exception) {
  return on_main_thread() && PyErr_GivenExceptionMatches(exception, PyExc_KeyboardInterrupt);
}

void log_error(const char* message) {
  const Ref error = take_error();
  if (is_interrupt(error.get())) {
    PyErr_SetInterrupt();
    return;
  }
  try {
    const Ref logging = Ref::checked(PyImport_ImportModule("logging"));
    const Ref logger = Ref::checked(PyObject_CallMethod(logging.get(), "getLogger", "s", "pymoe.runtime"));
    const Ref method = Ref::checked(PyObject_GetAttrString(logger.get(), "error"));
    const Ref arguments = Ref::checked(Py_BuildValue("(s)", message));
    const Ref keywords = Ref::checked(Py_BuildValue("{s:O}", "exc_info", error.get()));
    Ref::checked(PyObject_Call(method.get(), arguments.get(), keywords.get()));
  } catch (const ErrorSet&) {
    const Ref second = take_error();
    if (is_interrupt(second.get())) {
      PyErr_SetInterrupt();
      return;
    }
    set_error(second.get());
    PyErr_WriteUnraisable(nullptr);
  }
}

}  // namespace pymoe::bindings
