// Reads and makes tensors of torch through torch's table of C functions for DLPack, without a header of torch.
//
// The structs are defined by DLPack 1.x (its specification is public; major version 1 guarantees their layout). The
// table is an attribute of torch.Tensor in all versions that pymoe supports, 2.11 and later. Everything here needs the
// GIL.
#pragma once

#include "bindings/gil.h"

#include <compare>
#include <cstdint>

namespace pymoe::bindings::dlpack {

struct Device {
  int32_t type;
  int32_t index;
  auto operator<=>(const Device&) const = default;
};
constexpr int32_t kCpu = 1, kCuda = 2, kCudaHost = 3;

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  auto operator<=>(const DataType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;    // owned by torch: valid as long as the tensor lives and is not resized
  int64_t* strides;  // in elements
  uint64_t byte_offset;

  const void* begin() const { return static_cast<const char*>(data) + byte_offset; }
  // Returns the number of bytes of one row: all dimensions except the first.
  int64_t row_bytes() const;
  // Returns true if the elements lie one after the other in row-major order, without gaps, or if there are none.
  bool dense() const;
};

// Finds torch's table of C functions. Throws an ImportError if this torch has no supported table.
void load();

// Reads a tensor that can be part of a batch, on the CPU or a CUDA device. Returns the tensor, or a contiguous copy of
// it, which `tensor` then describes. For any other object, throws a TypeError whose message begins with `where` and
// names argument `position`. Throws a MemoryError if there is no memory for the copy.
py::object read(PyObject* object, Tensor& tensor, const char* where, Py_ssize_t position);

// Reads a tensor that this module made, as read() does, but without checks.
void read_plain(PyObject* object, Tensor& tensor);

// Reads once more a tensor that read() has returned, without checks. Returns false, without an error set, if it can no
// longer be read.
bool reread(PyObject* object, Tensor& tensor) noexcept;

// Makes a contiguous CPU tensor of torch over `data`. `release(data)` runs when torch releases it, on any thread, with
// or without the GIL, or immediately if this function fails.
py::object make(void* data, void (*release)(void*) noexcept, DataType dtype, const int64_t* shape, int32_t ndim);

bool is_tensor(PyObject* object);

}  // namespace pymoe::bindings::dlpack
