#include "bindings/process.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/buffers.h"
#include "bindings/deferred.h"
#include "bindings/gil.h"
#include "bindings/parameter_lock.h"
#include "runtime/sync.h"

namespace pymoe::bindings {
namespace {

// Never destroyed: static destruction would come while threads may still look at it.
struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Stoppable>> kept;
};

Registry* registry = new Registry;
thread_local bool is_worker = false;
thread_local bool is_server = false;
std::atomic<int> forks{0};
std::atomic<bool> exiting{false};

// The child's tensors give memory back, and its objects drop references: the locks of both must be free there.
void before_fork() {
  hold_deferred();
  buffers().before_fork();
}

void after_fork() {
  buffers().after_fork();
  release_deferred();
}

// In the child of a fork. The parent's registry is left behind, since another thread may have held its lock.
void start_generation() {
  after_fork();
  registry = new Registry;
  forget_waits();
  forks.fetch_add(1);
  become_main_thread();
}

PyObject* stop_all(PyObject*, PyObject*) {
  std::vector<std::shared_ptr<Stoppable>> kept;
  {
    const WithoutGil released;
    {
      const std::lock_guard lock(registry->mutex);
      exiting = true;  // under the lock: a thing is registered before this copy, or not at all
      kept = registry->kept;
    }
    for (const auto& stoppable : kept) stoppable->cancel();
  }
  try {
    for (const auto& stoppable : kept) {
      wait_interruptibly([&](Clock::time_point until) { return stoppable->stopped_by(until); });
    }
  } catch (const ErrorSet&) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef stop_all_method = {"stop_all", stop_all, METH_NOARGS, "Cancel what is queued and wait for all workers."};

// False also on a thread that runs one of its batches for it, which cannot ask.
bool has_stopped(Stoppable& stoppable) {
  try {
    return stoppable.stopped_by(Clock::now());
  } catch (const std::logic_error&) {
    return false;
  }
}

}  // namespace

void keep_until_stopped(std::shared_ptr<Stoppable> stoppable) {
  std::vector<std::shared_ptr<Stoppable>> ended;  // destroyed after the lock is let go of
  const std::lock_guard lock(registry->mutex);
  std::erase_if(registry->kept, [&](std::shared_ptr<Stoppable>& other) {
    if (other.use_count() > 1 || other->on_worker() || !has_stopped(*other)) return false;
    ended.push_back(std::move(other));
    return true;
  });
  if (exiting) throw std::runtime_error("the interpreter is exiting");
  registry->kept.push_back(std::move(stoppable));
}

int generation() { return forks.load(std::memory_order_relaxed); }

void require_this_process(int created, const char* where, const char* kind) {
  if (created == generation()) return;
  throw std::runtime_error(std::string(where) + ": this " + kind +
                           " was created before a fork, and its workers exist only in the parent process; create a "
                           "new one in the child");
}

void with_thread_state(const std::function<void()>& work) {
  is_worker = true;
  const WithGil gil;
  const WithoutGil released;
  work();
}

void serve_with_thread_state(const std::function<void()>& work) {
  is_server = true;
  with_thread_state(work);
}

bool on_worker_thread() { return is_worker; }
bool on_server_thread() { return is_server; }

struct Identity {
  runtime::SystemSync::ThreadId thread;
  int batches;
  bool is_worker, is_server;
};
constexpr const char* kIdentity = "pymoe thread identity";

PyObject* identity_of_this_thread(PyObject*, PyObject*) {
  using runtime::SystemSync;
  auto* identity = new Identity{SystemSync::this_thread(), SystemSync::batches_on_this_thread(), is_worker, is_server};
  PyObject* capsule = PyCapsule_New(identity, kIdentity, [](PyObject* object) {
    delete static_cast<Identity*>(PyCapsule_GetPointer(object, kIdentity));
  });
  if (capsule == nullptr) delete identity;
  return capsule;
}

PyObject* adopt_identity(PyObject*, PyObject* capsule) {
  const auto* identity = static_cast<Identity*>(PyCapsule_GetPointer(capsule, kIdentity));
  if (identity == nullptr) return nullptr;
  runtime::SystemSync::adopt(identity->thread);
  runtime::SystemSync::batches_on_this_thread() = identity->batches;
  is_worker = identity->is_worker;
  is_server = identity->is_server;
  Py_RETURN_NONE;
}

void install_process_hooks() {
  find_main_thread();
#if !defined(_WIN32)
  pthread_atfork(before_fork, after_fork, start_generation);
#endif
  const Ref atexit = Ref::checked(PyImport_ImportModule("atexit"));
  const Ref hook = Ref::checked(PyCFunction_New(&stop_all_method, nullptr));
  Ref::checked(PyObject_CallMethod(atexit.get(), "register", "O", hook.get()));
}

}  // namespace pymoe::bindings
