// ParameterLock of pymoe._runtime, which forward and backward passes hold while they read or change parameters; and
// functions that register what threads wait for.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

namespace pymoe::bindings {

// Forgets all waits and turns. Call it in a forked child, where no other thread exists.
void forget_waits();

// Registers, during its lifetime, that this thread waits for a request of the pool (null: for room), if other threads
// may be waiting for this thread. Created and destroyed under the GIL. Throws std::logic_error if the wait could never
// end.
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
