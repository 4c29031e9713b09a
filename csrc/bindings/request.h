// TensorRequest: a client's tensors on their way through a pool, and Signature: the common properties of the tensors in
// one batch.
#pragma once

#include "bindings/dlpack.h"
#include "bindings/gil.h"
#include "runtime/request.h"
#include "runtime/sync.h"
#include "runtime/task_pool.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pymoe::bindings {

using runtime::SystemSync;
using Pool = runtime::TaskPool<SystemSync>;
using Batch = std::span<const runtime::Slice<SystemSync>>;

// The error of a request whose batch raised; the exception itself is the request's `outcome`. If a request ended in
// another way, `outcome` may hold an exception from an earlier run of its batch.
class BatchRaised : public std::exception {
 public:
  explicit BatchRaised(bool may_retry) : may_retry(may_retry) {}

  const bool may_retry;
  const char* what() const noexcept override { return "the batch raised a Python exception"; }
};

struct Position {
  explicit Position(const dlpack::Tensor& tensor)
      : dtype(tensor.dtype),
        device(tensor.device),
        row_shape(tensor.shape + 1, tensor.shape + tensor.ndim),
        row_bytes(tensor.row_bytes()) {}

  dlpack::DataType dtype;
  dlpack::Device device;
  std::vector<int64_t> row_shape;
  int64_t row_bytes;

  bool matches(const dlpack::Tensor& tensor) const;
  auto operator<=>(const Position&) const = default;
};

struct Signature {
  Signature(uint64_t number, std::vector<Position> of)
      : kind(number), positions(std::move(of)), on_cpu(std::all_of(positions.begin(), positions.end(), is_on_cpu)) {}

  const uint64_t kind;
  const std::vector<Position> positions;
  const bool on_cpu;  // true if every tensor is on the CPU

 private:
  static bool is_on_cpu(const Position& position) { return position.device.type == dlpack::kCpu; }
};

// A request: the tensors of one client. All Python objects are read and written only under the GIL.
class TensorRequest final : public runtime::Request<SystemSync> {
 public:
  struct Input {
    PyObject* tensor;  // owned
    const void* data;
  };

  // Takes ownership of the references to Python objects in `inputs`.
  TensorRequest(std::shared_ptr<const Signature> signature, Input* inputs, int64_t tensor_rows,
                std::optional<Time> deadline, Duration head_start);
  // May run on any thread, even while a lock is held.
  ~TensorRequest() override;

  const Input* inputs() const { return many_ ? many_.get() : few_.data(); }
  int64_t positions() const { return static_cast<int64_t>(signature->positions.size()); }
  void drop_inputs();
  void set_outcome(py::object value, bool raised);
  // Returns true if every tensor still has the memory, shape, strides and dtype that it had at submit. Call with the
  // GIL held.
  bool unchanged() const;
  // Returns the exception to raise, for a request that has ended with an error.
  py::object exception() const;
  // Returns true if the request was cancelled before it had started or, if it is larger than a batch, before its last
  // batch had.
  bool was_cancelled() const;

  const std::shared_ptr<const Signature> signature;
  // Number of rows of the request's tensors. In its queue, a request without rows counts as one row, or it would never
  // become ready.
  const int64_t tensor_rows;

  PyObject* outcome = nullptr;    // the result, or the exception that its batch raised
  PyObject* traceback = nullptr;  // traceback of that exception when the batch ended
  std::vector<PyObject*> parts;   // owned results of finished slices, if the request is larger than a batch
  bool dropped = false;           // true if the outcome will not be read

 private:
  std::array<Input, 2> few_;
  std::unique_ptr<Input[]> many_;  // used for more than two inputs
};

// The signatures that a pool has seen, with their numbers. Guarded by the GIL, and left consistent before any Python
// code is called, since the GIL may change hands there.
class Signatures {
 public:
  // `schema`: the types that every request's tensors must have, if given.
  Signatures(std::string pool, std::optional<std::vector<Position>> schema)
      : pool_(std::move(pool)), schema_(std::move(schema)) {}

  // Returns the signature of these tensors. Throws ValueError or TypeError if they do not fit the schema.
  std::shared_ptr<const Signature> find(const dlpack::Tensor* tensors, size_t count);

 private:
  // With fewer signatures than this, none is forgotten.
  static constexpr size_t kKept = 256;

  void check(const dlpack::Tensor* tensors, size_t count) const;
  void forget_unused();

  const std::string pool_;
  const std::optional<std::vector<Position>> schema_;
  std::shared_ptr<const Signature> last_;
  std::map<std::vector<Position>, std::shared_ptr<const Signature>> known_;
  size_t most_known_ = kKept;
  uint64_t next_kind_ = 0;
};

// Returns the pool of a TaskPool object. Throws a TypeError for anything else, and std::runtime_error for a TaskPool
// that was created before a fork.
std::shared_ptr<Pool> pool_of(PyObject* object, const char* where);

}  // namespace pymoe::bindings
