// Functions of torch that the bindings call, looked up once. Under the GIL.
#pragma once

#include <vector>

#include "bindings/gil.h"

namespace pymoe::bindings {

// A function that reads a setting of the thread, and its value in a thread's initial state (null: any false value).
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
  PyObject* gather_batch;  // pymoe's operator; null if the operators are not loaded
  PyObject* is_grad_enabled;
  PyObject* set_grad_enabled;
  const std::vector<Question>* plain_state;
  PyObject* cuda;         // the module; null if torch has none, like the next two
  PyObject* cuda_device;  // of this thread
  PyObject* cuda_stream;
  PyObject* record;         // torch._C._profiler._RecordFunctionFast
  PyObject* requires_grad;  // names, interned
  PyObject* shape;
  PyObject* clone;
  PyObject* initialized;
};

// Throws an ImportError if torch does not have the expected names.
const TorchCalls& torch_calls();

// Returns true if a batch may run on this thread as it would on a worker: no setting is on that an operation, a graph
// or a module would notice (modes, autocast, hooks on saved tensors, transforms, another GPU). The grad mode does not
// matter: GradMode sets it. A batch has its own context variables and stack depth anyway (batch.cpp).
bool thread_is_plain();

// Makes this thread follow torch.set_num_threads: torch passes the number to OpenMP for each thread, but only at the
// thread's first parallel loop, and a matrix product may come first.
void adopt_thread_count();

// Sets the grad mode during the object's lifetime.
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
