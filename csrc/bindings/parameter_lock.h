// ParameterLock of pymoe._runtime: what passes hold while they read or change parameters, and the waits of threads that
// do.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

namespace pymoe::bindings {

// In the child of a fork: nobody waits, and nobody holds anything.
void forget_waits();

// A wait of this thread for a request of the pool (null: for room), while it lives. Made and destroyed under the GIL.
// Throws std::logic_error where the wait could never end.
class RegisteredWait {
 public:
  RegisteredWait(const Pool& pool, const TensorRequest* request, bool limited);
  ~RegisteredWait();
  RegisteredWait(const RegisteredWait&) = delete;
  RegisteredWait& operator=(const RegisteredWait&) = delete;

 private:
  const bool registered_;
};

}  // namespace pymoe::bindings
