#include "bindings/structure.h"

#include <numeric>

#include "bindings/dlpack.h"
#include "bindings/torch_calls.h"

namespace pymoe::bindings {
namespace {

// Structures that hold themselves never end.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" in a structure of tensors") != 0) throw ErrorSet();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
};

// `values`, a tuple that is taken over, as a tuple of the type of `like`.
Ref as_tuple_like(PyObject* like, Ref values) {
  if (PyTuple_CheckExact(like)) return values;
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(like));
  if (PyObject_HasAttrString(type, "_fields")) return Ref::checked(PyObject_CallObject(type, values.get()));
  return Ref::checked(PyObject_CallOneArg(type, values.get()));
}

Ref as_list_like(PyObject* like, Ref values) {
  if (PyList_CheckExact(like)) return values;
  return Ref::checked(PyObject_CallOneArg(reinterpret_cast<PyObject*>(Py_TYPE(like)), values.get()));
}

Ref dict_like(PyObject* like) {
  return Ref::checked(PyDict_CheckExact(like) ? PyDict_New() : PyObject_CallMethod(like, "copy", nullptr));
}

class Split {
 public:
  Split(const std::vector<int64_t>& rows, const char* where)
      : rows_(rows), total_(std::accumulate(rows.begin(), rows.end(), int64_t{0})), where_(where) {}

  std::vector<Ref> operator()(PyObject* output) {
    if (dlpack::is_tensor(output)) return tensor(output);
    if (PyTuple_Check(output)) return sequence(output, output, true);
    if (PyList_Check(output)) {
      const Ref items = Ref::checked(PyList_AsTuple(output));  // what is done with them may change the list
      return sequence(output, items.get(), false);
    }
    if (PyDict_Check(output)) return dict(output);
    std::vector<Ref> parts(rows_.size());
    for (Ref& part : parts) part = Ref::borrow(output);
    return parts;
  }

 private:
  std::vector<Ref> tensor(PyObject* output) {
    const TorchCalls& torch = torch_calls();
    const Ref shape = Ref::checked(PyObject_GetAttr(output, torch.shape));
    if (!PyTuple_Check(shape.get())) {
      raise(PyExc_TypeError, "%s: the shape of an output is a %s, not a tuple", where_, Py_TYPE(shape.get())->tp_name);
    }
    const bool right =
        PyTuple_GET_SIZE(shape.get()) > 0 && PyLong_AsLongLong(PyTuple_GET_ITEM(shape.get(), 0)) == total_;
    PyErr_Clear();
    if (!right) {
      raise(PyExc_ValueError,
            "%s: the output for a batch of %lld rows has shape %R: its first dimension must be the rows", where_,
            static_cast<long long>(total_), shape.get());
    }
    std::vector<Ref> parts(rows_.size());
    if (rows_.size() == 1) {
      parts[0] = Ref::borrow(output);
      return parts;
    }
    if (!sizes_) {
      sizes_ = Ref::checked(PyList_New(static_cast<Py_ssize_t>(rows_.size())));
      for (size_t i = 0; i < rows_.size(); ++i) {
        PyList_SET_ITEM(sizes_.get(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(rows_[i]));
      }
    }
    // "Unsafe" leaves out what forbids to change one of several views in place: each goes to a client of its own.
    const Ref requires_grad = Ref::checked(PyObject_GetAttr(output, torch.requires_grad));
    const GradMode mode(requires_grad.get() == Py_True);
    // Rows that are one row in memory (an expanded one) are made to be several: each client may change its own.
    const Ref stride = Ref::checked(PyObject_CallMethod(output, "stride", "i", 0));
    Ref own = Ref::borrow(output);
    if (PyLong_AsLongLong(stride.get()) == 0) own = Ref::checked(PyObject_CallMethod(output, "contiguous", nullptr));
    PyErr_Clear();
    PyObject* arguments[] = {own.get(), sizes_.get()};
    const Ref views = Ref::checked(PyObject_Vectorcall(torch.unsafe_split_with_sizes, arguments, 2, nullptr));
    const Ref items = Ref::checked(PySequence_Fast(views.get(), "torch.unsafe_split_with_sizes gives a sequence"));
    if (PySequence_Fast_GET_SIZE(items.get()) != static_cast<Py_ssize_t>(rows_.size())) {
      raise(PyExc_RuntimeError, "%s: torch gave another number of views than asked for", where_);
    }
    for (size_t i = 0; i < rows_.size(); ++i) {
      parts[i] = Ref::borrow(PySequence_Fast_GET_ITEM(items.get(), static_cast<Py_ssize_t>(i)));
    }
    return parts;
  }

  // `items`: the tuple or list `output` as a tuple.
  std::vector<Ref> sequence(PyObject* output, PyObject* items, bool is_tuple) {
    const Deeper deeper;
    const Py_ssize_t size = PyTuple_GET_SIZE(items);
    std::vector<Ref> results(rows_.size());
    for (Ref& result : results) result = Ref::checked(is_tuple ? PyTuple_New(size) : PyList_New(size));
    for (Py_ssize_t item = 0; item < size; ++item) {
      std::vector<Ref> parts = (*this)(PyTuple_GET_ITEM(items, item));
      for (size_t i = 0; i < parts.size(); ++i) {
        PyObject* part = parts[i].release();
        if (is_tuple) {
          PyTuple_SET_ITEM(results[i].get(), item, part);
        } else {
          PyList_SET_ITEM(results[i].get(), item, part);
        }
      }
    }
    for (Ref& result : results) {
      result = is_tuple ? as_tuple_like(output, std::move(result)) : as_list_like(output, std::move(result));
    }
    return results;
  }

  std::vector<Ref> dict(PyObject* output) {
    const Deeper deeper;
    std::vector<Ref> results(rows_.size());
    for (Ref& result : results) result = dict_like(output);
    const Ref items = Ref::checked(PyMapping_Items(output));
    for (Py_ssize_t item = 0; item < PyList_GET_SIZE(items.get()); ++item) {
      PyObject* pair = PyList_GET_ITEM(items.get(), item);
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        raise(PyExc_TypeError, "%s: the items() of a %s in an output are not pairs", where_, Py_TYPE(output)->tp_name);
      }
      std::vector<Ref> parts = (*this)(PyTuple_GET_ITEM(pair, 1));
      for (size_t i = 0; i < parts.size(); ++i) {
        if (PyObject_SetItem(results[i].get(), PyTuple_GET_ITEM(pair, 0), parts[i].get()) != 0) throw ErrorSet();
      }
    }
    return results;
  }

  const std::vector<int64_t>& rows_;
  const int64_t total_;
  const char* where_;
  Ref sizes_;  // rows_ as a list
};

}  // namespace

std::vector<Ref> split_structure(PyObject* output, const std::vector<int64_t>& rows, const char* where) {
  return Split(rows, where)(output);
}

Ref cat_structures(PyObject* parts) {
  const Deeper deeper;
  const Py_ssize_t count = PyList_GET_SIZE(parts);
  PyObject* first = PyList_GET_ITEM(parts, 0);
  if (dlpack::is_tensor(first)) return Ref::checked(PyObject_CallOneArg(torch_calls().cat, parts));
  const bool is_tuple = PyTuple_Check(first), is_dict = PyDict_Check(first);
  if (!is_tuple && !is_dict && !PyList_Check(first)) return Ref::borrow(first);

  // What every part has at `key`, put together.
  const auto cat_at = [&](PyObject* key) {
    const Ref column = Ref::checked(PyList_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyList_SET_ITEM(column.get(), i, Ref::checked(PyObject_GetItem(PyList_GET_ITEM(parts, i), key)).release());
    }
    return cat_structures(column.get());
  };
  if (is_dict) {
    Ref result = dict_like(first);
    const Ref keys = Ref::checked(PyMapping_Keys(first));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.get()); ++i) {
      PyObject* key = PyList_GET_ITEM(keys.get(), i);
      if (PyObject_SetItem(result.get(), key, cat_at(key).get()) != 0) throw ErrorSet();
    }
    return result;
  }
  const Py_ssize_t size = PySequence_Size(first);
  if (size < 0) throw ErrorSet();
  Ref result = Ref::checked(is_tuple ? PyTuple_New(size) : PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Ref key = Ref::checked(PyLong_FromSsize_t(i));
    PyObject* joined = cat_at(key.get()).release();
    if (is_tuple) {
      PyTuple_SET_ITEM(result.get(), i, joined);
    } else {
      PyList_SET_ITEM(result.get(), i, joined);
    }
  }
  return is_tuple ? as_tuple_like(first, std::move(result)) : as_list_like(first, std::move(result));
}

}  // namespace pymoe::bindings
