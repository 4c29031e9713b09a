#include "bindings/torch_calls.h"

namespace pymoe::bindings {
namespace {

bool is_true(PyObject* function) {
  const Ref value = Ref::checked(PyObject_CallNoArgs(function));
  return PyObject_IsTrue(value.get()) == 1;
}

bool answers_as_usual(const Question& question) {
  const Ref answer =
      Ref::checked(question.argument != nullptr ? PyObject_CallOneArg(question.function, question.argument)
                                                : PyObject_CallNoArgs(question.function));
  if (answer.get() == question.usual) return true;
  return question.usual == nullptr && PyObject_IsTrue(answer.get()) == 0;  // a count
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

// The same, or null where this torch does not have it.
PyObject* find_optional(const Ref& torch, const char* dotted) {
  try {
    return find(torch, dotted);
  } catch (const ErrorSet&) {
    PyErr_Clear();
    return nullptr;
  }
}

// What a thread can have switched on in torch, each with the answer of a thread that has not. Few, since every client
// that is alone with its request asks them all: a thread in inference mode is noticed by its forward-mode gradients,
// which are off. The interpreters are those of torch.func's transforms. Keys of the dispatcher are left out below
// autograd: inside a custom operator, and where a dispatch mode handles an operation. A frame callback is
// torch.compile's, while it runs compiled code.
std::vector<Question> plain_state(const Ref& torch) {
  std::vector<Question> questions = {
      {find(torch, "_C._is_any_autocast_enabled"), nullptr, Py_False},
      {find(torch, "_C._len_torch_function_stack"), nullptr, nullptr},
      {find(torch, "_C._len_torch_dispatch_stack"), nullptr, nullptr},
      {find(torch, "is_inference_mode_enabled"), nullptr, Py_False},
  };
  const auto ask = [&](const char* name, PyObject* usual, PyObject* argument = nullptr) {
    if (PyObject* function = find_optional(torch, name)) questions.push_back({function, argument, usual});
  };
  const bool knows_forward_mode = find_optional(torch, "_C._is_fwd_grad_enabled") != nullptr;
  if (knows_forward_mode) questions.pop_back();
  ask("_C._is_fwd_grad_enabled", Py_True);
  ask("_C._is_torch_function_enabled", Py_True);
  ask("_C._autograd._top_saved_tensors_default_hooks", Py_None, Py_True);
  ask("_C._autograd._saved_tensors_hooks_get_disabled_error_message", Py_None);
  ask("_C._functorch.peek_interpreter_stack", Py_None);
  ask("_C._dynamo.eval_frame.get_eval_frame_callback", Py_None);
  if (PyObject* autograd = find_optional(torch, "_C.DispatchKey.AutogradOther")) {
    ask("_C._dispatch_tls_is_dispatch_key_excluded", Py_False, autograd);
  }
  return questions;
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
  calls.plain_state = new std::vector<Question>(plain_state(torch));
  calls.record = find(torch, "_C._profiler._RecordFunctionFast");
  calls.requires_grad = Ref::checked(PyUnicode_InternFromString("requires_grad")).release();
  calls.shape = Ref::checked(PyUnicode_InternFromString("shape")).release();
  calls.gather_batch = find_optional(torch, "ops.pymoe.gather_batch.default");
  calls.cuda = find_optional(torch, "cuda");
  calls.cuda_device = find_optional(torch, "_C._cuda_getDevice");
  calls.cuda_stream = find_optional(torch, "_C._cuda_getCurrentRawStream");
  calls.initialized = Ref::checked(PyUnicode_InternFromString("_initialized")).release();
  return calls;
}

}  // namespace

const TorchCalls& torch_calls() {
  static const TorchCalls* calls = nullptr;
  if (calls == nullptr) calls = new TorchCalls(load());
  return *calls;
}

// Work of a thread that has not been told otherwise goes to the default stream of the first GPU.
static bool on_usual_gpu(const TorchCalls& calls) {
  if (calls.cuda == nullptr || calls.cuda_device == nullptr || calls.cuda_stream == nullptr) return true;
  const Ref initialized = Ref::checked(PyObject_GetAttr(calls.cuda, calls.initialized));
  if (initialized.get() != Py_True) return true;
  const Ref device = Ref::checked(PyObject_CallNoArgs(calls.cuda_device));
  if (PyLong_AsLong(device.get()) != 0) return false;
  const Ref stream = Ref::checked(PyObject_CallOneArg(calls.cuda_stream, device.get()));
  return PyObject_IsTrue(stream.get()) == 0;
}

bool thread_is_plain() {
  const TorchCalls& calls = torch_calls();
  for (const Question& question : *calls.plain_state) {
    if (!answers_as_usual(question)) return false;
  }
  return on_usual_gpu(calls);
}

PyObject* thread_is_plain(PyObject*, PyObject*) {
  try {
    return PyBool_FromLong(thread_is_plain());
  } catch (const ErrorSet&) {
    return nullptr;
  }
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
