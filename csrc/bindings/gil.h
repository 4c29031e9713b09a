// The GIL: letting go of it, taking it, waiting without it, and Python objects that outlive it.
//
// Rules of this folder:
//   - The GIL is not held around anything that may wait, join or queue, and no lock of the runtime is held while the
//     GIL is taken. Python objects that live inside tasks and requests are destroyed under the GIL (GilObject).
//   - Waits run in slices of at most kSlice on the main thread, between which signals are served: Ctrl-C ends any of
//     them. Other threads never serve signals, so they wait in one piece.
//   - A thread that asks for the GIL of an interpreter that has gone stays where it is until the process ends. CPython
//     does so itself from 3.14 on; before, it unwinds the thread through whatever C++ frames there are.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#if defined(__GNUC__)
#include <cxxabi.h>
#endif

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

namespace pymoe::bindings {

using Clock = std::chrono::steady_clock;

// A Python exception is set in this thread, and is on its way to Python.
class ErrorSet : public std::exception {};

// Sets a Python exception of the type and throws ErrorSet; the format is PyErr_Format's.
[[noreturn]] void raise(PyObject* type, const char* format, ...);

// Never returns: where a thread stays whose interpreter has gone.
[[noreturn]] void stay();
// What unwinds such a thread, where it can be told from other exceptions.
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

// From any thread, also from one that holds the GIL already.
class WithGil {
 public:
  WithGil();
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// An owned reference, made, moved and dropped under the GIL.
class Ref {
 public:
  Ref() = default;
  static Ref steal(PyObject* object) { return Ref(object); }
  static Ref borrow(PyObject* object) { return Ref(Py_XNewRef(object)); }
  // Steals what a call of Python's API returned, or throws ErrorSet if it failed.
  static Ref checked(PyObject* object) {
    if (object == nullptr) throw ErrorSet();
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = std::exchange(pointer_, std::exchange(other.pointer_, nullptr));
    Py_XDECREF(old);
    return *this;
  }
  ~Ref() { Py_XDECREF(pointer_); }

  PyObject* get() const { return pointer_; }
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  PyObject* share() const { return Py_XNewRef(pointer_); }
  explicit operator bool() const { return pointer_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : pointer_(object) {}
  PyObject* pointer_ = nullptr;
};

// A Python object that may be moved and destroyed without the GIL.
class GilObject {
 public:
  GilObject() = default;
  explicit GilObject(Ref object) : pointer_(object.release()) {}
  GilObject(GilObject&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  GilObject& operator=(GilObject&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~GilObject() {
    if (pointer_ == nullptr) return;
    const WithGil gil;
    Py_DECREF(pointer_);
  }

  // Under the GIL.
  PyObject* get() const { return pointer_; }
  Ref share() const { return Ref::borrow(pointer_); }
  // Gives the reference away; needs no GIL.
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  Ref take() { return Ref::steal(std::exchange(pointer_, nullptr)); }

 private:
  PyObject* pointer_ = nullptr;
};

// Takes the exception that is set out of the thread, its traceback attached.
Ref take_error();
// Sets the exception, keeping the traceback that it has.
void set_error(PyObject* exception);

// True where signals are served.
bool on_main_thread();
// Found once, when the module is made; again in the child of a fork.
void find_main_thread();
void become_main_thread();

constexpr std::chrono::milliseconds kSlice{50};

// The time `seconds` from now; none without a timeout, or with one so long that no clock counts to it. Throws
// ValueError for a timeout that is no number.
std::optional<Clock::time_point> deadline_after(std::optional<double> seconds);

// Calls ended(until), which waits to `until` at most and tells whether its end was reached, until it was or the
// deadline has passed. Call it with the GIL; `ended` runs without. Throws ErrorSet if a signal handler raised.
template <typename Ended>
bool wait_interruptibly(const Ended& ended, std::optional<Clock::time_point> deadline = std::nullopt) {
  const bool serves_signals = on_main_thread();
  for (;;) {
    // Slices elsewhere are a day long: condition variables do not all bear the end of time.
    auto until = Clock::now() + (serves_signals ? Clock::duration(kSlice) : Clock::duration(std::chrono::hours(24)));
    if (deadline && *deadline < until) until = *deadline;
    bool reached;
    {
      const WithoutGil released;
      reached = ended(until);
    }
    if (reached) return true;
    if (serves_signals && PyErr_CheckSignals() != 0) throw ErrorSet();
    if (deadline && Clock::now() >= *deadline) return false;
  }
}

}  // namespace pymoe::bindings
