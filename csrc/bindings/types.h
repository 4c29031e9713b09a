// How the module makes its types.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "bindings/gil.h"

namespace pymoe::bindings {

// What a type has, apart from what its objects' struct says. Null: it does not have that.
struct TypeTraits {
  const char* name;  // qualified, and static: the type keeps it
  const char* doc;
  unsigned int flags;  // besides Py_TPFLAGS_DEFAULT
  destructor dealloc;
  traverseproc traverse = nullptr;
  inquiry clear = nullptr;
  PyMethodDef* methods = nullptr;
  unaryfunc await = nullptr;
  reprfunc repr = nullptr;
  PyGetSetDef* attributes = nullptr;
};

// A type of `Object`s, put into the module and kept for the process. Objects with a `weak_references` can be referred
// to weakly.
template <typename Object>
PyTypeObject* add_type(PyObject* module, const TypeTraits& traits) {
  std::vector<PyType_Slot> slots = {{Py_tp_doc, const_cast<char*>(traits.doc)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(traits.dealloc)}};
  if (traits.traverse != nullptr) slots.push_back({Py_tp_traverse, reinterpret_cast<void*>(traits.traverse)});
  if (traits.clear != nullptr) slots.push_back({Py_tp_clear, reinterpret_cast<void*>(traits.clear)});
  if (traits.methods != nullptr) slots.push_back({Py_tp_methods, traits.methods});
  if (traits.await != nullptr) slots.push_back({Py_am_await, reinterpret_cast<void*>(traits.await)});
  if (traits.repr != nullptr) slots.push_back({Py_tp_repr, reinterpret_cast<void*>(traits.repr)});
  if (traits.attributes != nullptr) slots.push_back({Py_tp_getset, traits.attributes});
  if constexpr (requires(Object object) { object.weak_references; }) {
    static std::array<PyMemberDef, 2> members = {
        PyMemberDef{"__weaklistoffset__", T_PYSSIZET, offsetof(Object, weak_references), READONLY, nullptr}};
    slots.push_back({Py_tp_members, members.data()});
  }
  slots.push_back({0, nullptr});
  PyType_Spec spec = {traits.name, sizeof(Object), 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT) | traits.flags,
                      slots.data()};
  Ref type = Ref::checked(PyType_FromSpec(&spec));
  if (PyModule_AddObjectRef(module, std::strrchr(traits.name, '.') + 1, type.get()) != 0) throw ErrorSet();
  return reinterpret_cast<PyTypeObject*>(type.release());
}

}  // namespace pymoe::bindings
