#include "bindings/deferred.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace pymoe::bindings {
namespace {

// Never destroyed, as the process's registry.
struct Deferred {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

Deferred& deferred = *new Deferred;
std::atomic<bool> any{false};

int pending_call(void*) {
  drop_deferred();
  return 0;
}

}  // namespace

void drop_later(PyObject* object) noexcept {
  if (object == nullptr) return;
  bool first;
  {
    const std::lock_guard lock(deferred.mutex);
    deferred.objects.push_back(object);
    first = !any.exchange(true, std::memory_order_relaxed);
  }
  // In case nothing of the runtime is called for long. A full table of pending calls is no loss: the next one serves.
  if (first) Py_AddPendingCall(pending_call, nullptr);
}

void drop_deferred() {
  if (!any.load(std::memory_order_relaxed)) return;
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(deferred.mutex);
    objects.swap(deferred.objects);
    any.store(false, std::memory_order_relaxed);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

void hold_deferred() { deferred.mutex.lock(); }
void release_deferred() { deferred.mutex.unlock(); }

}  // namespace pymoe::bindings
