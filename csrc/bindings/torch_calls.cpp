#include "bindings/torch_calls.h"

namespace pymoe::bindings {
namespace {

bool is_true(PyObject* function) {
  const Ref value = Ref::checked(PyObject_CallNoArgs(function));
  return PyObject_IsTrue(value.get()) == 1;
}

void set_grad(bool enabled) {
  Ref::checked(PyObject_CallOneArg(torch_calls().set_grad_enabled, enabled ? Py_True : Py_False));
}

// A dotted name below torch; kept for the process.
PyObject* find(const Ref& torch, const char* dotted) {
  const Ref names = Ref::checked(PyUnicode_FromString(dotted));
  const Ref dot = Ref::checked(PyUnicode_FromString("."));
  const Ref parts = Ref::checked(PyUnicode_Split(names.get(), dot.get(), -1));
  Ref found = Ref::borrow(torch.get());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts.get()); ++i) {
    found = Ref::steal(PyObject_GetAttr(found.get(), PyList_GET_ITEM(parts.get(), i)));
    if (!found) {
      PyErr_Clear();
      const Ref version = Ref::checked(PyObject_GetAttrString(torch.get(), "__version__"));
      raise(PyExc_ImportError, "pymoe.runtime needs torch.%s, which torch %S does not have", dotted, version.get());
    }
  }
  return found.release();
}

TorchCalls load() {
  const Ref torch = Ref::checked(PyImport_ImportModule("torch"));
  TorchCalls calls{};
  calls.tensor = find(torch, "Tensor");
  calls.cat = find(torch, "cat");
  calls.empty = find(torch, "empty");
  calls.unsafe_split_with_sizes = find(torch, "unsafe_split_with_sizes");
  calls.get_num_threads = find(torch, "get_num_threads");
  calls.is_grad_enabled = find(torch, "is_grad_enabled");
  calls.set_grad_enabled = find(torch, "_C._set_grad_enabled");
  calls.is_inference = find(torch, "is_inference_mode_enabled");
  calls.any_autocast = find(torch, "_C._is_any_autocast_enabled");
  calls.function_modes = find(torch, "_C._len_torch_function_stack");
  calls.dispatch_modes = find(torch, "_C._len_torch_dispatch_stack");
  calls.record = find(torch, "_C._profiler._RecordFunctionFast");
  calls.requires_grad = Ref::checked(PyUnicode_InternFromString("requires_grad")).release();
  calls.shape = Ref::checked(PyUnicode_InternFromString("shape")).release();
  try {
    calls.gather_batch = find(torch, "ops.pymoe.gather_batch.default");
  } catch (const ErrorSet&) {
    PyErr_Clear();
  }
  return calls;
}

}  // namespace

const TorchCalls& torch_calls() {
  static const TorchCalls* calls = nullptr;
  if (calls == nullptr) calls = new TorchCalls(load());
  return *calls;
}

bool thread_is_neutral() {
  const TorchCalls& calls = torch_calls();
  for (PyObject* question : {calls.is_inference, calls.any_autocast, calls.function_modes, calls.dispatch_modes}) {
    if (is_true(question)) return false;
  }
  return true;
}

void adopt_thread_count() {
  thread_local bool adopted = false;
  if (adopted) return;
  Ref::checked(PyObject_CallNoArgs(torch_calls().get_num_threads));
  adopted = true;
}

GradMode::GradMode(bool enabled) : before_(is_true(torch_calls().is_grad_enabled)), changed_(before_ != enabled) {
  if (changed_) set_grad(enabled);
}

GradMode::~GradMode() {
  if (!changed_) return;
  const Ref error = PyErr_Occurred() ? take_error() : Ref();
  try {
    set_grad(before_);
  } catch (const ErrorSet&) {
    PyErr_Clear();
  }
  if (error) set_error(error.get());
}

}  // namespace pymoe::bindings
