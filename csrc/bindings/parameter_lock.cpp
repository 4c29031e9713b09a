#include "bindings/parameter_lock.h"

#include "bindings/outcome.h"
#include "bindings/turnstile.h"
#include "bindings/types.h"
#include "runtime/waits.h"

namespace pymoe::bindings {
namespace {

// Never destroyed: static destruction would come while threads may still look at it.
auto* waits = new runtime::Waits<SystemSync>;

struct LockObject {
  PyObject_HEAD runtime::Turn turn;
};

PyObject* enter(PyObject* object, PyObject*) {
  return guarded([&] {
    const runtime::Turn& turn = reinterpret_cast<LockObject*>(object)->turn;
    // With the GIL: nobody asks for it under the lock that this takes.
    if (waits->enter(turn, Clock::time_point::min())) return Py_NewRef(object);
    wait_interruptibly([&](Clock::time_point until) {
      leave_turnstile();
      return waits->enter(turn, until);
    });
    return Py_NewRef(object);
  });
}

PyObject* leave(PyObject* object, PyObject* const*, Py_ssize_t) {
  waits->leave(reinterpret_cast<LockObject*>(object)->turn);
  Py_RETURN_NONE;
}

void dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS,
     "__enter__(self: pymoe._runtime.ParameterLock) -> pymoe._runtime.ParameterLock\n\n"
     "Wait until nobody else holds it, but for threads that wait for this one."},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(leave)), METH_FASTCALL,
     "__exit__(self: pymoe._runtime.ParameterLock, *exception: typing.Any) -> None\n\nLet go of it."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_parameter_lock_type(PyObject* module) {
  add_type<LockObject>(
      module, {.name = "pymoe._runtime.ParameterLock",
               .doc = "A re-entrant lock that a thread which waits for a request lends to whoever it waits for.",
               .flags = 0,
               .dealloc = dealloc,
               .methods = methods});
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
