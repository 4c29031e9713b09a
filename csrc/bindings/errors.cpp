#include "bindings/errors.h"

#include <new>
#include <stdexcept>

#include "runtime/completion.h"
#include "runtime/request.h"
#include "runtime/worker_pool.h"

namespace pymoe::bindings {
namespace {

PyObject* cancelled_error = nullptr;

}  // namespace

void find_cancelled_error() {
  cancelled_error = forever(py::module_::import("concurrent.futures").attr("CancelledError"));
}

void set_python_error(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& raised) {
    raised.restore();
  } catch (const runtime::Cancelled& cancelled) {
    PyErr_SetString(cancelled_error, cancelled.what());
  } catch (const runtime::DeadlineExceeded& late) {
    PyErr_SetString(PyExc_TimeoutError, late.what());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "no memory for a batch");
  } catch (const std::invalid_argument& wrong) {
    PyErr_SetString(PyExc_ValueError, wrong.what());
  } catch (const std::exception& other) {
    PyErr_SetString(PyExc_RuntimeError, other.what());
  }
}

py::object exception_of(const py::error_already_set& error) {
  if (error.trace()) PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
  return error.value();
}

py::object take_error() { return exception_of(py::error_already_set()); }

bool is_interrupt(py::handle exception) {
  return on_main_thread() && PyErr_GivenExceptionMatches(exception.ptr(), PyExc_KeyboardInterrupt);
}

void log_error(const char* message, const py::object& error) {
  if (is_interrupt(error)) return PyErr_SetInterrupt();
  try {
    const py::object logger = py::module_::import("logging").attr("getLogger")("pymoe.runtime");
    logger.attr("error")(message, py::arg("exc_info") = error);
  } catch (py::error_already_set& second) {
    if (is_interrupt(second.value())) return PyErr_SetInterrupt();
    second.restore();
    PyErr_WriteUnraisable(nullptr);
  }
}

}  // namespace pymoe::bindings
