// Functions of torch that the bindings call, looked up once. Under the GIL.
#pragma once

#include "bindings/gil.h"

namespace pymoe::bindings {

struct TorchCalls {
  PyObject* tensor;  // the type
  PyObject* cat;
  PyObject* empty;
  PyObject* unsafe_split_with_sizes;
  PyObject* gather_batch;  // pymoe's operator; null where the operators are not loaded
  PyObject* get_num_threads;
  PyObject* is_grad_enabled;
  PyObject* set_grad_enabled;
  PyObject* is_inference;
  PyObject* any_autocast;
  PyObject* function_modes;
  PyObject* dispatch_modes;
  PyObject* record;         // torch._C._profiler._RecordFunctionFast
  PyObject* requires_grad;  // names, interned
  PyObject* shape;
};

// Throws ErrorSet with an ImportError where torch is not as we know it.
const TorchCalls& torch_calls();

// True where a batch may run on this thread as it would on a worker: no inference mode, no autocast, no mode that
// watches functions. The grad mode may be any: GradMode sets it.
bool thread_is_neutral();

// Has this thread heed torch.set_num_threads: torch tells OpenMP so for each thread by itself, but not before its first
// parallel loop, and a matrix product may come first.
void adopt_thread_count();

// Sets the grad mode while it lives.
class GradMode {
 public:
  explicit GradMode(bool enabled);
  ~GradMode();
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  bool before_, changed_;
};

}  // namespace pymoe::bindings
