// Extends torch's profiler to the threads that work for a profiled thread.
#include "bindings/bind.h"

#include <dlfcn.h>

#include <memory>
#include <utility>

namespace py = pybind11;

namespace pymoe::bindings {
namespace {

// The profiler watches a thread through two things that torch keeps there: a chain of debug information, which is
// shared, and a list of callbacks, which is copied. torch carries both to its own threads; code outside torch can reach
// both only through these C++ functions. No header of torch is needed: a shared pointer is handled the same way
// whatever it points to, and this code never reads the list. (torch's enableProfilerInChildThread is no alternative: it
// serves a single thread, and leaves a callback behind there.)
using DebugInfo = std::shared_ptr<void>;
using Callbacks = void;

struct TorchProfiler {
  DebugInfo (*current_info)() = nullptr;
  void (*force_info)(DebugInfo) = nullptr;
  const Callbacks* (*callbacks)() = nullptr;
  void (*set_callbacks)(const Callbacks*) = nullptr;
  void (*clear_callbacks)() = nullptr;

  bool found() const { return current_info && force_info && callbacks && set_callbacks && clear_callbacks; }
};

template <typename Function>
void find(Function& function, const char* library, const char* name) {
  // Searches only libraries that are already loaded.
  if (void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY)) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    dlclose(handle);
  }
}

const TorchProfiler& torch_profiler() {
  static const TorchProfiler profiler = [] {
    TorchProfiler found;
    find(found.current_info, "libc10.so", "_ZN3c1020ThreadLocalDebugInfo7currentEv");
    find(found.force_info, "libc10.so", "_ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E");
    find(found.callbacks, "libtorch_cpu.so", "_ZN2at24get_record_function_tls_Ev");
    find(found.set_callbacks, "libtorch_cpu.so", "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE");
    find(found.clear_callbacks, "libtorch_cpu.so", "_ZN2at25clearThreadLocalCallbacksEv");
    return found;
  }();
  return profiler;
}

// The profiling state of the thread that created this object. That thread must wait while other threads are part of its
// profile.
class Profiled {
 public:
  Profiled() {
    if (!torch_profiler().found()) return;
    info_ = torch_profiler().current_info();
    callbacks_ = torch_profiler().callbacks();
  }

  // Makes the calling thread part of the profile of the thread that created this object. The caller must be another
  // thread, which is not profiled. Returns false if this torch lacks one of the functions.
  bool join() const {
    if (callbacks_ == nullptr) return false;
    torch_profiler().set_callbacks(callbacks_);
    torch_profiler().force_info(info_);
    return true;
  }

  static void leave() {
    torch_profiler().clear_callbacks();
    torch_profiler().force_info(nullptr);
  }

 private:
  DebugInfo info_;
  const Callbacks* callbacks_ = nullptr;
};

}  // namespace

void bind_profiler(py::module_& module) {
  py::class_<Profiled>(module, "Profiled",
                       "The profilers of torch that watch this thread, for threads that work for it.")
      .def(py::init<>())
      .def("join", &Profiled::join,
           "Let the profilers watch the calling thread, too; False if this torch offers no way. The thread that made\n"
           "the object must wait until :meth:`leave`, and the calling thread must not be watched yet.")
      .def_static("leave", &Profiled::leave, "Remove all profilers from this thread.");
}

}  // namespace pymoe::bindings
