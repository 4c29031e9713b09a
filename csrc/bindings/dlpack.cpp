#include "bindings/dlpack.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bindings/torch_calls.h"

namespace pymoe::bindings::dlpack {
namespace {

struct Version {
  uint32_t major, minor;
};

struct Managed {
  Version version;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  Tensor tensor;
};

struct Table {
  Version version;
  Table* previous;
  int (*allocate)(Tensor* prototype, Managed** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, Managed** out);
  int (*object_from_managed)(Managed* managed, void** out);
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t index, void** out);
};

constexpr uint32_t kMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

const Table* table = nullptr;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;

// A block of memory, and the DLPack description of it that torch keeps.
struct Owned {
  Managed managed;
  void (*release)(void*) noexcept;
  std::vector<int64_t> shape_and_strides;
};

void delete_owned(Managed* managed) {
  const std::unique_ptr<Owned> owned(static_cast<Owned*>(managed->context));
  owned->release(managed->tensor.data);
}

PyTypeObject* type_of(const py::module_& module, const char* name) {
  py::object type = module.attr(name);
  if (!PyType_Check(type.ptr())) raise(PyExc_ImportError, "pymoe: torch's %s is not a type", name);
  return reinterpret_cast<PyTypeObject*>(type.release().ptr());  // kept until the process ends
}

// Throws the error for a request whose tensor could not be read.
[[noreturn]] void refuse(const py::error_already_set& error, PyObject* object, const char* where, Py_ssize_t position) {
  if (!error.matches(PyExc_Exception)) raise(error.value());  // an interrupt
  const std::string said = py::str(error.value());
  const bool no_memory = error.matches(PyExc_MemoryError) || said.find("allocate memory") != std::string::npos ||
                         said.find("not enough memory") != std::string::npos ||
                         said.find("out of memory") != std::string::npos;
  if (no_memory) {
    raise(PyExc_MemoryError, "%s: no memory for a contiguous copy of tensor %zd (%s)", where, position, said.c_str());
  }
  const py::handle tensor(object);
  raise(PyExc_TypeError,
        "%s: tensor %zd cannot be part of a batch: expected a dense tensor with values, got %S on %S (%s)", where,
        position, tensor.attr("layout").ptr(), tensor.attr("device").ptr(),
        said.substr(0, said.find('\n')).c_str());  // the other lines name torch's own functions
}

// Reads a tensor through torch's table of DLPack functions. Throws TypeError unless the tensor is in memory of the CPU
// or of a CUDA device.
void read_table(PyObject* object, Tensor& tensor, const char* where, Py_ssize_t position) {
  if (table->tensor_from_object(object, &tensor) != 0) refuse(py::error_already_set(), object, where, position);
  const int32_t type = tensor.device.type;
  if (type == kCpu || type == kCuda || type == kCudaHost) return;
  raise(PyExc_TypeError, "%s: tensor %zd is on a device that batches are not made on (DLPack's type %d): CPU or CUDA",
        where, position, static_cast<int>(type));
}

// Returns true if the tensor's memory contains the conjugates or the negatives of its values (torch's "conj bit" and
// "neg bit"): z.conj().imag is negated. One call returns both bits, for any tensor, and unlike is_neg, it does not
// release the GIL.
bool has_bits(PyObject* object, const char* where, Py_ssize_t position) {
  const auto bits = py::reinterpret_steal<py::object>(PyObject_CallOneArg(torch_calls().get_tensor_metadata, object));
  if (!bits) refuse(py::error_already_set(), object, where, position);
  return PyObject_IsTrue(bits.ptr()) != 0;
}

// Converts an unusual tensor to a plain, dense one with the same values.
py::object plain(PyObject* object, const char* where, Py_ssize_t position) {
  if (!is_tensor(object)) {
    raise(PyExc_TypeError, "%s: argument %zd must be a tensor, got %s", where, position, Py_TYPE(object)->tp_name);
  }
  try {
    py::object tensor = borrow(object);
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) {
      const py::handle base(reinterpret_cast<PyObject*>(tensor_type));
      if (!tensor.attr("__torch_dispatch__").is(base.attr("__torch_dispatch__"))) {
        raise(PyExc_TypeError, "a %s holds its values in its own way", Py_TYPE(object)->tp_name);
      }
      tensor = tensor.attr("as_subclass")(base);
    }
    return tensor.attr("detach")().attr("resolve_conj")().attr("resolve_neg")().attr("contiguous")();
  } catch (const py::error_already_set& error) {
    refuse(error, object, where, position);
  }
}

}  // namespace

int64_t Tensor::row_bytes() const {
  int64_t bytes = (static_cast<int64_t>(dtype.bits) * dtype.lanes + 7) / 8;
  for (int32_t i = 1; i < ndim; ++i) bytes *= shape[i];
  return bytes;
}

bool Tensor::dense() const {
  if (std::find(shape, shape + ndim, 0) != shape + ndim) return true;  // as in torch: an empty tensor is dense
  int64_t expected = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

void load() {
  if (table != nullptr) return;
  const auto torch = py::module_::import("torch");
  tensor_type = type_of(torch, "Tensor");
  parameter_type = type_of(py::module_::import("torch.nn"), "Parameter");
  const py::object capsule = py::getattr(torch.attr("Tensor"), "__dlpack_c_exchange_api__", py::none());
  const auto* found = static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  PyErr_Clear();
  while (found != nullptr && found->version.major != kMajor) found = found->previous;
  if (found == nullptr || found->tensor_from_object == nullptr || found->object_from_managed == nullptr) {
    raise(
        PyExc_ImportError,
        "pymoe.runtime reads tensors through torch.Tensor.__dlpack_c_exchange_api__ of DLPack %u, which torch %S does "
        "not offer: torch >= 2.11 is needed",
        kMajor, torch.attr("__version__").ptr());
  }
  table = found;
}

bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, tensor_type); }

py::object read(PyObject* object, Tensor& tensor, const char* where, Py_ssize_t position) {
  const bool known = Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type;
  if (known) {
    read_table(object, tensor, where, position);
    if (tensor.dense() && !has_bits(object, where, position)) return borrow(object);
  }
  py::object dense = plain(object, where, position);
  read_table(dense.ptr(), tensor, where, position);
  return dense;
}

void read_plain(PyObject* object, Tensor& tensor) {
  if (table->tensor_from_object(object, &tensor) != 0) throw py::error_already_set();
}

bool reread(PyObject* object, Tensor& tensor) noexcept {
  if (object != nullptr && table->tensor_from_object(object, &tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

py::object make(void* data, void (*release)(void*) noexcept, DataType dtype, const int64_t* shape, int32_t ndim) {
  auto* owned = new Owned{{{kMajor, 0}, nullptr, delete_owned, 0, {}}, release, {}};
  owned->managed.context = owned;
  owned->shape_and_strides.assign(shape, shape + ndim);
  owned->shape_and_strides.resize(static_cast<size_t>(ndim) * 2);
  int64_t* strides = owned->shape_and_strides.data() + ndim;
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  owned->managed.tensor = {data, {kCpu, 0}, ndim, dtype, owned->shape_and_strides.data(), strides, 0};
  void* object = nullptr;
  if (table->object_from_managed(&owned->managed, &object) != 0) {
    delete_owned(&owned->managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

}  // namespace pymoe::bindings::dlpack
