#include "bindings/gil.h"

#include <atomic>
#include <cmath>
#include <cstdarg>
#include <mutex>
#include <thread>
#include <vector>

namespace pymoe::bindings {
namespace {

std::atomic<unsigned long> main_thread{0};

// References that must be dropped. Never destroyed, because threads may still use it during static destruction.
struct Deferred {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

Deferred& deferred = *new Deferred;
std::atomic<bool> any_deferred{false};

}  // namespace

void stay() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(24));
}

void raise(PyObject* type, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(type, format, arguments);
  va_end(arguments);
  throw py::error_already_set();
}

void raise(py::handle exception) {
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

// The functions called here are C functions: if an exception passes through them, it unwinds a thread whose interpreter
// is gone.
WithoutGil::~WithoutGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {
    stay();
  }
}

GilTaken::GilTaken() {
  try {
    state_ = PyGILState_Ensure();
  } catch (...) {
    stay();
  }
}

void drop_later(PyObject* object) noexcept {
  if (object == nullptr) return;
  bool first;
  {
    const std::lock_guard lock(deferred.mutex);
    deferred.objects.push_back(object);
    first = !any_deferred.exchange(true, std::memory_order_relaxed);
  }
  if (!first) return;
  // A pending call drops the references even if the runtime is not called for long. If the table of pending calls is
  // full, the runtime's next call drops them.
  const auto pending_call = [](void*) {
    drop_deferred();
    return 0;
  };
  Py_AddPendingCall(pending_call, nullptr);
}

void drop_deferred() {
  if (!any_deferred.load(std::memory_order_relaxed)) return;
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(deferred.mutex);
    objects.swap(deferred.objects);
    any_deferred.store(false, std::memory_order_relaxed);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

void hold_deferred() { deferred.mutex.lock(); }
void release_deferred() { deferred.mutex.unlock(); }

bool on_main_thread() { return PyThread_get_thread_ident() == main_thread.load(std::memory_order_relaxed); }

void find_main_thread() {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
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
