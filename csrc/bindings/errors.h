// Converts errors of the runtime to Python exceptions, and logs errors that cannot be raised in any caller.
#pragma once

#include "bindings/gil.h"

#include <exception>

namespace pymoe::bindings {

// Looks up concurrent.futures.CancelledError when the module is initialised. The class is needed at interpreter exit,
// when requests are cancelled on threads that must not run the Python code of an import.
void find_cancelled_error();

// Sets the Python exception for a C++ exception.
void set_python_error(const std::exception_ptr& error) noexcept;
// exception_of returns the exception object of a thrown error, with its traceback. take_error does so for the error
// that is set, and clears the error.
py::object exception_of(const py::error_already_set& error);
py::object take_error();

// Returns body(), or null with a Python exception set if it throws: for functions that CPython calls without pybind11.
template <typename Body>
PyObject* guarded(const Body& body) noexcept {
  try {
    return or_stay(body);
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return nullptr;
}

// Returns true if the exception is a KeyboardInterrupt and this is the main thread. Such an interrupt must not get
// lost, and may be raised on that thread only.
bool is_interrupt(py::handle exception);

// Logs the exception on the logger pymoe.runtime. If it is an interrupt (is_interrupt), raises it again instead, as
// soon as the main thread runs its own code again.
void log_error(const char* message, const py::object& error);

}  // namespace pymoe::bindings
