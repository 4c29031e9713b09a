#include "bindings/parameter_lock.h"

#include "bindings/bind.h"
#include "bindings/turnstile.h"
#include "runtime/waits.h"

namespace pymoe::bindings {
namespace {

// Never destroyed: threads may still use it during static destruction.
auto* waits = new runtime::Waits<SystemSync>;

void enter(const runtime::Turn& turn) {
  // Trying to enter with the GIL held is safe: no thread that holds the lock of `waits` asks for the GIL.
  if (waits->enter(turn, Clock::time_point::min())) return;
  wait_interruptibly([&](Clock::time_point until) {
    leave_turnstile();
    return waits->enter(turn, until);
  });
}

}  // namespace

void bind_parameter_lock(py::module_& module) {
  py::class_<runtime::Turn>(
      module, "ParameterLock",
      "A re-entrant lock. A holder that waits for a request lends it to the thread that runs the request.")
      .def(py::init<>())
      .def("__enter__", enter, "Wait until no other thread holds the lock, except threads that wait for this one.")
      .def(
          "__exit__", [](const runtime::Turn& turn, py::handle, py::handle, py::handle) { waits->leave(turn); },
          py::arg("type"), py::arg("value"), py::arg("traceback"), "Release the lock.");
}

void forget_waits() { waits = new runtime::Waits<SystemSync>; }

RegisteredWait::RegisteredWait(const Pool& pool, const TensorRequest* request, bool limited)
    : registered_(waits->concern_this_thread()) {
  if (registered_) waits->begin(pool, request, limited || (request != nullptr && request->deadline));
}

RegisteredWait::~RegisteredWait() {
  if (!registered_ || waits->end()) return;
  const WithoutGil released;
  waits->regain();
}

}  // namespace pymoe::bindings
