// Functions of torch that the bindings call, looked up once. Use everything here with the GIL held.
#pragma once

#include <vector>

#include "bindings/gil.h"

namespace pymoe::bindings {

// A function that reads a setting of the calling thread, and the setting's value in a new thread (null: any false
// value).
struct Question {
  PyObject* function;
  PyObject* argument;  // or null
  PyObject* usual;
};

struct TorchCalls {
  PyObject* tensor;  // the type torch.Tensor
  PyObject* cat;
  PyObject* empty;
  PyObject* unsafe_split_with_sizes;
  PyObject* get_tensor_metadata;
  PyObject* gather_batch;  // pymoe's operator; null if the operators are not loaded
  PyObject* is_grad_enabled;
  PyObject* set_grad_enabled;
  const std::vector<Question>* plain_state;
  PyObject* cuda;         // the module torch.cuda; null if this torch lacks it, like the next two
  PyObject* cuda_device;  // returns this thread's current device
  PyObject* cuda_stream;
  PyObject* record;         // torch._C._profiler._RecordFunctionFast
  PyObject* requires_grad;  // names, interned
  PyObject* shape;
  PyObject* clone;
  PyObject* initialized;
};

// Returns the functions. Throws an ImportError if this torch lacks one that cannot be null.
const TorchCalls& torch_calls();

// Returns true if a batch would run on this thread as on a worker: none of the thread's settings affects operations,
// graphs or modules (modes, autocast, hooks on saved tensors, transforms, another GPU). The grad mode does not matter,
// because GradMode sets it; context variables and stack depth do not either, because a batch has its own (batch.cpp).
bool thread_is_plain();

// Makes this thread use the number of threads that torch.set_num_threads set: torch passes this number to OpenMP
// separately for each thread, but only in the thread's first parallel loop, and the thread may compute a matrix product
// before that.
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
