#include "bindings/structure.h"

#include <algorithm>
#include <numeric>

#include "bindings/dlpack.h"
#include "bindings/torch_calls.h"

namespace pymoe::bindings {
namespace {

// Limits the nesting depth, because a structure may contain itself.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" in a structure of tensors") != 0) throw py::error_already_set();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
};

// Returns `items` as a sequence of the same type as `like`.
py::object sequence_like(py::handle like, py::list items) {
  const py::type type = py::type::of(like);
  if (PyList_CheckExact(like.ptr())) return items;
  if (PyList_Check(like.ptr())) return type(items);
  py::tuple values(items);
  if (PyTuple_CheckExact(like.ptr())) return values;
  return py::hasattr(type, "_fields") ? type(*values) : type(values);
}

py::object dict_like(const py::object& like) {
  return PyDict_CheckExact(like.ptr()) ? py::dict() : like.attr("copy")();
}

class Split {
 public:
  Split(const std::vector<int64_t>& rows, const char* where)
      : rows_(rows), total_(std::accumulate(rows.begin(), rows.end(), int64_t{0})), where_(where) {}

  // Finds the memory that several tensors of an output share. Such tensors must not be cloned separately: after a
  // direct call, a change of one of them appears in the others, and this must be so here, too.
  void find_shared(const py::object& output) {
    if (dlpack::is_tensor(output.ptr())) {
      const size_t memory = memory_of(output);
      (std::find(seen_.begin(), seen_.end(), memory) == seen_.end() ? seen_ : shared_).push_back(memory);
      return;
    }
    const Deeper deeper;
    if (PyTuple_Check(output.ptr()) || PyList_Check(output.ptr())) {
      for (py::handle item : py::tuple(output)) find_shared(borrow(item.ptr()));
    } else if (PyDict_Check(output.ptr())) {
      for (py::handle item : own(PyMapping_Values(output.ptr()))) find_shared(borrow(item.ptr()));
    }
  }

  std::vector<py::object> operator()(const py::object& output) {
    if (dlpack::is_tensor(output.ptr())) return tensor(output);
    if (PyTuple_Check(output.ptr()) || PyList_Check(output.ptr())) return sequence(output);
    if (PyDict_Check(output.ptr())) return dict(output);
    return {rows_.size(), output};
  }

 private:
  std::vector<py::object> tensor(const py::object& output) {
    const TorchCalls& torch = torch_calls();
    const py::object shape = own(PyObject_GetAttr(output.ptr(), torch.shape));
    if (!PyTuple_Check(shape.ptr())) {
      raise(PyExc_TypeError, "%s: the shape of an output is a %s, not a tuple", where_, Py_TYPE(shape.ptr())->tp_name);
    }
    const bool right =
        PyTuple_GET_SIZE(shape.ptr()) > 0 && PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), 0)) == total_;
    PyErr_Clear();
    if (!right) {
      raise(PyExc_ValueError,
            "%s: the output for a batch of %lld rows has shape %R: its first dimension must be the rows", where_,
            static_cast<long long>(total_), shape.ptr());
    }
    const GradMode mode(own(PyObject_GetAttr(output.ptr(), torch.requires_grad)).ptr() == Py_True);
    // Clients may change their results, so they never get the function's own memory (a table, a cache, its parameters),
    // a view of it, or several rows that are one row in memory (an expanded tensor). Tensors that share memory with
    // each other are the exception.
    const py::object apart = shares(output) ? output : own(PyObject_CallMethodNoArgs(output.ptr(), torch.clone));
    if (rows_.size() == 1) return {apart};
    if (!sizes_) sizes_ = py::cast(rows_);
    // The "unsafe" split returns views that may be changed in place, as clients may do with their results.
    PyObject* arguments[] = {apart.ptr(), sizes_.ptr()};
    const py::object views = own(PyObject_Vectorcall(torch.unsafe_split_with_sizes, arguments, 2, nullptr));
    std::vector<py::object> parts;
    parts.reserve(rows_.size());
    for (py::handle view : views) parts.push_back(py::reinterpret_borrow<py::object>(view));
    if (parts.size() != rows_.size()) {
      raise(PyExc_RuntimeError, "%s: torch gave another number of views than asked for", where_);
    }
    return parts;
  }

  std::vector<py::object> sequence(const py::object& output) {
    const Deeper deeper;
    std::vector<py::list> items(rows_.size());
    for (py::handle item : py::tuple(output)) {  // a copy, since code that is called below may change a list
      const std::vector<py::object> parts = (*this)(py::reinterpret_borrow<py::object>(item));
      for (size_t i = 0; i < parts.size(); ++i) items[i].append(parts[i]);
    }
    std::vector<py::object> results;
    for (py::list& one : items) results.push_back(sequence_like(output, std::move(one)));
    return results;
  }

  std::vector<py::object> dict(const py::object& output) {
    const Deeper deeper;
    std::vector<py::object> results(rows_.size());
    for (py::object& result : results) result = dict_like(output);
    for (py::handle pair : own(PyMapping_Items(output.ptr()))) {
      if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
        raise(PyExc_TypeError, "%s: the items() of a %s in an output are not pairs", where_,
              Py_TYPE(output.ptr())->tp_name);
      }
      const std::vector<py::object> parts = (*this)(borrow(PyTuple_GET_ITEM(pair.ptr(), 1)));
      for (size_t i = 0; i < parts.size(); ++i) {
        if (PyObject_SetItem(results[i].ptr(), PyTuple_GET_ITEM(pair.ptr(), 0), parts[i].ptr()) != 0) {
          throw py::error_already_set();
        }
      }
    }
    return results;
  }

  // Returns the address of a tensor's storage, or zero if it has none.
  static size_t memory_of(const py::object& tensor) {
    try {
      return tensor.attr("untyped_storage")().attr("data_ptr")().cast<size_t>();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      return 0;
    }
  }

  // Returns true if another tensor of the structure has the same memory as the tensor `output`. For an expanded tensor
  // (row stride 0) returns false, so that it is cloned and its rows become separate.
  bool shares(const py::object& output) const {
    if (shared_.empty()) return false;
    const size_t memory = memory_of(output);
    return memory != 0 && std::find(shared_.begin(), shared_.end(), memory) != shared_.end() &&
           !output.attr("stride")(0).equal(py::int_(0));
  }

  std::vector<size_t> seen_, shared_;
  const std::vector<int64_t>& rows_;
  const int64_t total_;
  const char* where_;
  py::object sizes_;  // rows_ as a list
};

}  // namespace

std::vector<py::object> split_structure(const py::object& output, const std::vector<int64_t>& rows, const char* where) {
  Split split(rows, where);
  if (!dlpack::is_tensor(output.ptr())) split.find_shared(output);
  return split(output);
}

py::object cat_structures(const py::list& parts) {
  const Deeper deeper;
  const py::object first = parts[0];
  if (dlpack::is_tensor(first.ptr())) return own(PyObject_CallOneArg(torch_calls().cat, parts.ptr()));

  // Returns the values of all parts at `key`, concatenated.
  const auto cat_at = [&](const py::object& key) {
    py::list column;
    for (py::handle part : parts) column.append(own(PyObject_GetItem(part.ptr(), key.ptr())));
    return cat_structures(column);
  };
  if (PyDict_Check(first.ptr())) {
    py::object result = dict_like(first);
    for (py::handle key : own(PyMapping_Keys(first.ptr()))) {
      result[key] = cat_at(py::reinterpret_borrow<py::object>(key));
    }
    return result;
  }
  if (!PyTuple_Check(first.ptr()) && !PyList_Check(first.ptr())) return first;
  py::list items;
  for (size_t i = 0; i < py::len(first); ++i) items.append(cat_at(py::int_(i)));
  return sequence_like(first, std::move(items));
}

}  // namespace pymoe::bindings
