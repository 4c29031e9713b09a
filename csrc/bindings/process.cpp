#include "bindings/process.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batch.h"
#include "bindings/bind.h"
#include "bindings/parameter_lock.h"
#include "bindings/torch_calls.h"
#include "runtime/sync.h"

namespace pymoe::bindings {
namespace {

// Never destroyed: threads may still use it during static destruction.
struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Stoppable>> kept;
};

Registry* registry = new Registry;
thread_local bool is_worker = false;
thread_local bool is_server = false;
std::atomic<int> forks{0};
std::atomic<bool> exiting{false};

// Holds these locks during a fork, so that they are free in the child, which needs them: its tensors return memory, and
// its objects drop references.
void before_fork() {
  hold_deferred();
  buffers().before_fork();
}

void after_fork() {
  buffers().after_fork();
  release_deferred();
}

// Resets the state in a forked child. The parent's registry is abandoned, since another thread may have held its lock.
void start_generation() {
  after_fork();
  registry = new Registry;
  forget_waits();
  forks.fetch_add(1);
  become_main_thread();
}

void wait_stopped(Stoppable& stoppable) {
  wait_interruptibly([&](Clock::time_point until) { return stoppable.stopped_by(until); });
}

// Cancels all queued work, and waits for all workers. Runs at interpreter exit.
void stop_all() {
  std::vector<std::shared_ptr<Stoppable>> kept;
  {
    const WithoutGil released;
    {
      const std::lock_guard lock(registry->mutex);
      exiting = true;  // under the lock, so that an object is registered before this copy or not at all
      kept = registry->kept;
    }
    for (const auto& stoppable : kept) stoppable->request_stop(runtime::Stop::kCancel);
  }
  for (const auto& stoppable : kept) wait_stopped(*stoppable);
}

// The thread-local state by which the runtime identifies a thread. Another thread can adopt it.
struct ThreadIdentity {
  runtime::SystemSync::ThreadId thread = runtime::SystemSync::this_thread();
  int batches = runtime::SystemSync::batches_on_this_thread();
  bool worker = is_worker, server = is_server;
};

void adopt_identity(const ThreadIdentity& identity) {
  runtime::SystemSync::adopt(identity.thread);
  runtime::SystemSync::batches_on_this_thread() = identity.batches;
  is_worker = identity.worker;
  is_server = identity.server;
}

// Returns true if all threads of `stoppable` have ended. Returns false on a thread that runs a batch of it for a
// worker, where stopped_by throws.
bool has_stopped(Stoppable& stoppable) {
  try {
    return stoppable.stopped_by(Clock::now());
  } catch (const std::logic_error&) {
    return false;
  }
}

}  // namespace

void keep_until_stopped(std::shared_ptr<Stoppable> stoppable) {
  std::vector<std::shared_ptr<Stoppable>> ended;  // declared first, so destroyed after the unlock
  const std::lock_guard lock(registry->mutex);
  std::erase_if(registry->kept, [&](std::shared_ptr<Stoppable>& other) {
    if (other.use_count() > 1 || other->on_worker() || !has_stopped(*other)) return false;
    ended.push_back(std::move(other));
    return true;
  });
  if (exiting) throw std::runtime_error("the interpreter is exiting");
  registry->kept.push_back(std::move(stoppable));
}

void stop(Stoppable& stoppable, runtime::Stop how) {
  {
    const WithoutGil released;
    stoppable.request_stop(how);
  }
  wait_stopped(stoppable);
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
  with_gil([&] {
    adopt_thread_count();
    const WithoutGil released;
    work();
  });
}

void serve_with_thread_state(const std::function<void()>& work) {
  is_server = true;
  with_thread_state(work);
}

bool on_worker_thread() { return is_worker; }
bool on_server_thread() { return is_server; }

void bind_process(py::module_& module) {
  pthread_atfork(before_fork, after_fork, start_generation);
  py::module_::import("atexit").attr("register")(py::cpp_function(stop_all));

  py::class_<ThreadIdentity>(module, "ThreadIdentity", "The identity of a thread for the runtime.");
  module.def(
      "identity_of_this_thread", [] { return ThreadIdentity(); },
      "Return the identity of the calling thread, for a thread that works in its place.");
  module.def("adopt_identity", adopt_identity, py::arg("identity"),
             "Take the identity of another thread, which must wait until the calling thread has ended.");
}

}  // namespace pymoe::bindings
