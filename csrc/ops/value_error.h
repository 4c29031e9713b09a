// The exception that becomes Python's ValueError in every version of torch.
//
// torch's operators are called through pybind11, which turns std::invalid_argument into ValueError. From torch 2.15 on,
// torch turns it into a RuntimeError before pybind11 gets it. No version of torch converts pybind11's own exceptions,
// so value_error becomes ValueError in all of them. The headers of pybind11 cannot be compiled against Python's limited
// API, so value_error and its base class are declared here. pybind11 catches them because they have the names of its
// own classes, which have not changed since pybind11 2.0. If they ever do, the error is a RuntimeError.
#pragma once

#include <stdexcept>

extern "C" {
extern struct _object* PyExc_ValueError;
void PyErr_SetString(struct _object* type, const char* message);
}

namespace pybind11 {

class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  // Sets Python's error. pybind11 calls it with the GIL held.
  virtual void set_error() const = 0;
};

class __attribute__((visibility("default"))) value_error : public builtin_exception {
 public:
  using builtin_exception::builtin_exception;
  void set_error() const override { PyErr_SetString(PyExc_ValueError, what()); }
};

}  // namespace pybind11
