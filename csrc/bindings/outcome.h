// What a request came to, said in Python's terms.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

#include <exception>

namespace pymoe::bindings {

// Of a request that is done: the exception object to raise, or null if it has a result.
Ref exception_of(const TensorRequest& request);

// True if it was cancelled before it had started.
bool was_cancelled(const TensorRequest& request);

// Looks up concurrent.futures.CancelledError, once, when the module is made: an import at interpreter exit, when
// requests are cancelled, would run Python in threads that are not to run any.
void find_cancelled_error();

// Sets the Python exception for a C++ one of the runtime, and throws ErrorSet.
[[noreturn]] void raise_as_python(const std::exception_ptr& error);

// Calls a method's body and turns what it throws into what CPython expects.
template <typename Body>
auto guarded(const Body& body, decltype(body()) failed = {}) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const ErrorSet&) {
#ifdef PYMOE_FORCED_UNWIND
  } catch (const PYMOE_FORCED_UNWIND&) {
    stay();
#endif
  } catch (...) {
    try {
      raise_as_python(std::current_exception());
    } catch (const ErrorSet&) {
    }
  }
  return failed;
}

// True for a KeyboardInterrupt on the main thread: it is nobody else's, and must not be lost.
bool is_interrupt(PyObject* exception);

// Logs the exception that is set, on the logger pymoe.runtime, and clears it. An interrupt is raised again as soon as
// the main thread is back in code of its own.
void log_error(const char* message);

}  // namespace pymoe::bindings
