#include "bindings/torch_calls.h"

#include <algorithm>
#include <string>

#include "bindings/bind.h"

namespace pymoe::bindings {
namespace {

bool is_true(PyObject* function) { return own(PyObject_CallNoArgs(function)).ptr() == Py_True; }

bool answers_as_usual(const Question& question) {
  const py::object answer = own(question.argument != nullptr ? PyObject_CallOneArg(question.function, question.argument)
                                                             : PyObject_CallNoArgs(question.function));
  if (answer.ptr() == question.usual) return true;
  return question.usual == nullptr && PyObject_IsTrue(answer.ptr()) == 0;  // a count
}

void set_grad(bool enabled) { own(PyObject_CallOneArg(torch_calls().set_grad_enabled, enabled ? Py_True : Py_False)); }

// Returns the object of torch with the given dotted name, and keeps it until the process ends. Returns null if this
// torch lacks it.
PyObject* find_optional(const std::string& dotted) {
  try {
    py::object found = py::module_::import("torch");
    for (size_t begin = 0, end; begin <= dotted.size(); begin = end + 1) {
      end = std::min(dotted.find('.', begin), dotted.size());
      found = found.attr(dotted.substr(begin, end - begin).c_str());
    }
    return found.release().ptr();
  } catch (const py::error_already_set&) {
    return nullptr;
  }
}

PyObject* find(const char* dotted) {
  if (PyObject* found = find_optional(dotted)) return found;
  raise(PyExc_ImportError, "pymoe.runtime needs torch.%s, which torch %S does not have", dotted,
        py::module_::import("torch").attr("__version__").ptr());
}

PyObject* interned(const char* name) { return forever(own(PyUnicode_InternFromString(name))); }

// Returns the settings of torch that may change what a batch does on a thread, each with its value on a new thread.
// They must be few, because every client that runs a batch itself reads all of them. Some are noticed indirectly:
// inference mode turns off forward-mode gradients; transforms of torch.func push interpreters; custom operators, and
// dispatch modes while they handle an operation, exclude autograd's dispatch keys; code compiled by torch.compile sets
// a frame callback.
std::vector<Question> plain_state() {
  return {
      {find("_C._is_any_autocast_enabled"), nullptr, Py_False},
      {find("_C._len_torch_function_stack"), nullptr, nullptr},
      {find("_C._len_torch_dispatch_stack"), nullptr, nullptr},
      {find("_C._is_fwd_grad_enabled"), nullptr, Py_True},
      {find("_C._is_torch_function_enabled"), nullptr, Py_True},
      {find("_C._autograd._top_saved_tensors_default_hooks"), Py_True, Py_None},
      {find("_C._autograd._saved_tensors_hooks_get_disabled_error_message"), nullptr, Py_None},
      {find("_C._functorch.peek_interpreter_stack"), nullptr, Py_None},
      {find("_C._dynamo.eval_frame.get_eval_frame_callback"), nullptr, Py_None},
      {find("_C._dispatch_tls_is_dispatch_key_excluded"), find("_C.DispatchKey.AutogradOther"), Py_False},
  };
}

TorchCalls load() {
  TorchCalls calls{};
  calls.tensor = find("Tensor");
  calls.cat = find("cat");
  calls.empty = find("empty");
  calls.unsafe_split_with_sizes = find("unsafe_split_with_sizes");
  calls.get_tensor_metadata = find("_C._get_tensor_metadata");
  calls.is_grad_enabled = find("is_grad_enabled");
  calls.set_grad_enabled = find("_C._set_grad_enabled");
  calls.plain_state = new std::vector<Question>(plain_state());
  calls.record = find("_C._profiler._RecordFunctionFast");
  calls.requires_grad = interned("requires_grad");
  calls.shape = interned("shape");
  calls.clone = interned("clone");
  calls.gather_batch = find_optional("ops.pymoe.gather_batch.default");
  calls.cuda = find_optional("cuda");
  calls.cuda_device = find_optional("_C._cuda_getDevice");
  calls.cuda_stream = find_optional("_C._cuda_getCurrentRawStream");
  calls.initialized = interned("_initialized");
  return calls;
}

}  // namespace

const TorchCalls& torch_calls() {
  static const TorchCalls* calls = nullptr;
  if (calls == nullptr) calls = new TorchCalls(load());
  return *calls;
}

// Returns true if this thread's work goes where that of a new thread goes (to the default stream of the first GPU), or
// if this process has not used a GPU.
static bool on_usual_gpu(const TorchCalls& calls) {
  if (calls.cuda == nullptr || calls.cuda_device == nullptr || calls.cuda_stream == nullptr) return true;
  if (own(PyObject_GetAttr(calls.cuda, calls.initialized)).ptr() != Py_True) return true;
  const py::object device = own(PyObject_CallNoArgs(calls.cuda_device));
  if (PyLong_AsLong(device.ptr()) != 0) return false;
  return PyObject_IsTrue(own(PyObject_CallOneArg(calls.cuda_stream, device.ptr())).ptr()) == 0;
}

bool thread_is_plain() {
  const TorchCalls& calls = torch_calls();
  for (const Question& question : *calls.plain_state) {
    if (!answers_as_usual(question)) return false;
  }
  return on_usual_gpu(calls);
}

void adopt_thread_count() {
  thread_local bool adopted = false;
  if (adopted) return;
  // Do not import torch here: new workers call this, possibly before torch is imported.
  const py::object torch = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
  if (!torch || !py::hasattr(torch, "get_num_threads")) return;
  torch.attr("get_num_threads")();
  adopted = true;
}

GradMode::GradMode(bool enabled) : before_(is_true(torch_calls().is_grad_enabled)), changed_(before_ != enabled) {
  if (changed_) set_grad(enabled);
}

GradMode::~GradMode() {
  if (!changed_) return;
  try {
    set_grad(before_);
  } catch (const py::error_already_set&) {  // a destructor cannot handle the error
  }
}

void bind_thread_state(py::module_& module) {
  module.def(
      "thread_is_plain", thread_is_plain,
      "Return whether torch's state on this thread is the initial state of threads; gradients may be on or off.");
}

}  // namespace pymoe::bindings
