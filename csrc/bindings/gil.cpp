#include "bindings/gil.h"

#include <atomic>
#include <cmath>
#include <cstdarg>
#include <thread>

namespace pymoe::bindings {
namespace {

std::atomic<unsigned long> main_thread{0};

}  // namespace

void stay() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(24));
}

void raise(PyObject* type, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(type, format, arguments);
  va_end(arguments);
  throw ErrorSet();
}

// What is caught in these two is the unwinding of a thread whose interpreter has gone, and nothing else: both are C.
WithoutGil::~WithoutGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {
    stay();
  }
}

WithGil::WithGil() {
  try {
    state_ = PyGILState_Ensure();
  } catch (...) {
    stay();
  }
}

Ref take_error() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return Ref::steal(value);
}

void set_error(PyObject* exception) { PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception); }

bool on_main_thread() { return PyThread_get_thread_ident() == main_thread.load(std::memory_order_relaxed); }

void find_main_thread() {
  const Ref threading = Ref::checked(PyImport_ImportModule("threading"));
  const Ref thread = Ref::checked(PyObject_CallMethod(threading.get(), "main_thread", nullptr));
  const Ref ident = Ref::checked(PyObject_GetAttrString(thread.get(), "ident"));
  main_thread = PyLong_AsUnsignedLong(ident.get());
}

void become_main_thread() { main_thread = PyThread_get_thread_ident(); }

std::optional<Clock::time_point> deadline_after(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  if (std::isnan(*seconds)) raise(PyExc_ValueError, "timeout must be a number of seconds, got nan");
  constexpr double kCentury = 100 * 365.25 * 86400;
  if (*seconds >= kCentury) return std::nullopt;
  if (*seconds <= 0) return Clock::now();
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds));
}

}  // namespace pymoe::bindings
