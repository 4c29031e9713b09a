// The Python module pymoe._ops. Importing it registers the operators of this library. The module's attributes say how
// the library was built and which vector instructions the kernels use on this CPU; torch_multiplies says what a GPU
// supports. The module is written against the limited API, so one file serves every CPython from 3.10 on that has a
// GIL.
#include <pyconfig.h>

// Free-threaded CPython cannot load extensions of the limited API.
#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <exception>

#include "kernels/cpu/isa.h"
#include "ops/operators.h"

#ifndef PYMOE_BUILT_WITH_TORCH
#define PYMOE_BUILT_WITH_TORCH "?"
#endif
#ifndef PYMOE_CUDA_VERSION
#define PYMOE_CUDA_VERSION ""
#endif
#ifndef PYMOE_CUDA_ARCHITECTURES
#define PYMOE_CUDA_ARCHITECTURES ""
#endif

namespace {

int execute(PyObject* module) {
  const char* const facts[][2] = {
      {"torch", PYMOE_BUILT_WITH_TORCH},
      {"cuda", PYMOE_CUDA_VERSION},
      {"cuda_architectures", PYMOE_CUDA_ARCHITECTURES},
      {"compiler", __VERSION__},
      {"cpu_isa", pymoe::cpu::name_of(pymoe::cpu::best_isa())},
  };
  for (const auto& [name, value] : facts) {
    if (PyModule_AddStringConstant(module, name, value) != 0) return -1;
  }
  return 0;
}

// torch_multiplies(device): see ops/operators.h. It is a function and not an operator, because it takes no tensor.
PyObject* torch_multiplies(PyObject*, PyObject* device) {
  const long index = PyLong_AsLong(device);
  if (index == -1 && PyErr_Occurred() != nullptr) return nullptr;
  try {
    return PyBool_FromLong(pymoe::ops::grouped_linear_op::torch_multiplies(index));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {{"torch_multiplies", torch_multiplies, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(execute)},
#if defined(Py_mod_gil) && !defined(Py_LIMITED_API)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_ops",
    "Operators of pymoe and the facts of their build.",
    0,
    methods,
    slots,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__ops() { return PyModuleDef_Init(&definition); }
