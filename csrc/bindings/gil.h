// The GIL and code around it: releasing it, taking it, waiting without it, Python objects that outlive it.
//
// Rules of this folder:
//   - The GIL is not held during anything that waits for other threads' work, and no lock of the runtime is held while
//     a thread takes the GIL. So these locks may be taken under the GIL, to queue a request or to attach all pools or
//     none. Python objects that live inside tasks and requests are dropped under the GIL (GilObject, drop_later).
//   - The main thread waits in slices of at most kSlice and handles signals between them, so Ctrl-C ends the wait
//     (except the wait for a lent turn, runtime/waits.h). Other threads never handle signals, so they need no slices.
//   - A thread that asks for the GIL of an interpreter that is gone blocks until the process ends. From 3.14 on,
//     CPython does so itself. Earlier versions unwind the thread through all C++ frames on its stack, wherever Python
//     code that they have called takes the GIL again. So the GIL is taken only by with_gil() and released only by
//     WithoutGil, which such a thread never leaves, and Python functions of users are called by or_stay(): nothing in
//     C++ is destroyed without the GIL, and no catch (...) of the runtime, which runs without the GIL, ever catches
//     such an unwinding.
//   - Python's errors travel as py::error_already_set, so that none is set while C++ unwinds.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if defined(__GNUC__)
#include <cxxabi.h>
#endif

#include <chrono>
#include <optional>
#include <utility>

namespace pymoe::bindings {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

// Takes ownership of the new reference that a function of Python's API returned, or throws the error that it set.
inline py::object own(PyObject* returned) {
  if (returned == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(returned);
}
// Keeps an object until the process ends and returns it: an exiting interpreter may need the object until the very end.
inline PyObject* forever(py::object object) { return object.release().ptr(); }
inline py::object borrow(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

// Throws a Python exception of the type. The message is formatted as by PyErr_Format.
[[noreturn]] void raise(PyObject* type, const char* format, ...);
// Throws this exception object, with its present traceback.
[[noreturn]] void raise(py::handle exception);

// Never returns: a thread whose interpreter is gone stays here.
[[noreturn]] void stay();
// The exception that unwinds a thread whose interpreter is gone, if it can be distinguished from other exceptions.
#if defined(__GLIBCXX__) && !defined(__ARM_EABI_UNWINDER__)
#define PYMOE_FORCED_UNWIND abi::__forced_unwind
#endif

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Returns body(), which calls Python code. If the interpreter is gone and unwinds the thread, the thread blocks here
// for ever. A try block with a catch (...) must call Python code through this function.
template <typename Body>
decltype(auto) or_stay(const Body& body) {
#ifdef PYMOE_FORCED_UNWIND
  try {
    return body();
  } catch (const PYMOE_FORCED_UNWIND&) {
    stay();
  }
#else
  return body();
#endif
}

class GilTaken {
 public:
  GilTaken();
  ~GilTaken() { PyGILState_Release(state_); }
  GilTaken(const GilTaken&) = delete;
  GilTaken& operator=(const GilTaken&) = delete;

 private:
  PyGILState_STATE state_;
};

// Returns body(), called with the GIL. Any thread may call this, even one that holds the GIL already.
template <typename Body>
decltype(auto) with_gil(const Body& body) {
  const GilTaken gil;
  return or_stay(body);
}

// A Python object that may be moved and destroyed without the GIL; all other uses need it.
class GilObject {
 public:
  GilObject() = default;
  explicit GilObject(py::object object) : pointer_(object.release().ptr()) {}
  GilObject(GilObject&& other) noexcept : pointer_(other.release()) {}
  GilObject& operator=(GilObject&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~GilObject() {
    if (pointer_ != nullptr) with_gil([&] { Py_DECREF(pointer_); });
  }

  PyObject* get() const { return pointer_; }
  py::object share() const { return borrow(pointer_); }
  // Returns the reference, which the caller then owns. Does not need the GIL.
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  py::object take() { return py::reinterpret_steal<py::object>(release()); }

 private:
  PyObject* pointer_ = nullptr;
};

// Takes over a reference to `object`, and drops it soon, under the GIL. May be called on any thread, with or without
// the GIL, under any lock: use it where the GIL must not be taken.
void drop_later(PyObject* object) noexcept;
// Drops the references passed to drop_later so far. Call it with the GIL but without locks. Cheap if there are none.
void drop_deferred();
// Call hold_deferred before a fork and release_deferred after it: the lock of the references is then free in the child.
void hold_deferred();
void release_deferred();

// Returns true on the main thread, the only thread on which Python handles signals.
bool on_main_thread();
// find_main_thread is called when the module is initialised, become_main_thread in a forked child.
void find_main_thread();
void become_main_thread();

constexpr std::chrono::milliseconds kSlice{50};

// Returns the time `seconds` from now (now if it is negative), or none if there is no timeout or it is at least a
// century, which might exceed the range of the clock. Throws ValueError for NaN.
std::optional<Clock::time_point> deadline_after(std::optional<double> seconds);

// Waits until ended(until) returns true or the deadline passes; returns true in the first case. Call it with the GIL,
// which is released during each call of ended(until). That call must return by `until`. Throws the exception of a
// signal handler.
template <typename Ended>
bool wait_interruptibly(const Ended& ended, std::optional<Clock::time_point> deadline = std::nullopt) {
  const bool serves_signals = on_main_thread();
  for (;;) {
    // Other threads wait for a day at a time: with some condition variables, a wait until time_point::max() overflows.
    auto until = Clock::now() + (serves_signals ? Clock::duration(kSlice) : Clock::duration(std::chrono::hours(24)));
    if (deadline && *deadline < until) until = *deadline;
    bool reached;
    {
      const WithoutGil released;
      reached = ended(until);
    }
    if (reached) return true;
    if (serves_signals && PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (deadline && Clock::now() >= *deadline) return false;
  }
}

}  // namespace pymoe::bindings
