// Functions of torch that the bindings call, looked up once. Under the GIL.
#pragma once

#include <vector>

#include "bindings/gil.h"

namespace pymoe::bindings {

// Something that a thread can be asked, and what a thread in the state in which threads begin answers (null: anything
// that counts as false).
struct Question {
  PyObject* function;
  PyObject* argument;  // or null
  PyObject* usual;
};

struct TorchCalls {
  PyObject* tensor;  // the type
  PyObject* cat;
  PyObject* empty;
  PyObject* unsafe_split_with_sizes;
  PyObject* gather_batch;  // pymoe's operator; null where the operators are not loaded
  PyObject* is_grad_enabled;
  PyObject* set_grad_enabled;
  const std::vector<Question>* plain_state;
  PyObject* cuda;         // the module; null where torch has none, as are the next two
  PyObject* cuda_device;  // of this thread
  PyObject* cuda_stream;
  PyObject* record;         // torch._C._profiler._RecordFunctionFast
  PyObject* requires_grad;  // names, interned
  PyObject* shape;
  PyObject* clone;
  PyObject* initialized;
};

// Throws an ImportError where torch is not as we know it.
const TorchCalls& torch_calls();

// True where a batch may run on this thread as it would on a worker: nothing is switched on that an operation, a graph
// or a module would notice (modes, autocast, hooks on saved tensors, transforms, another GPU). The grad mode may be
// any: GradMode sets it. Context variables and the depth of the stack a batch has for itself anyway (batch.cpp).
bool thread_is_plain();

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
