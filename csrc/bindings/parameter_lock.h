// ParameterLock of pymoe._runtime: held by passes while they read or change parameters; and the registered waits of
// threads.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

namespace pymoe::bindings {

// Called in a forked child: no thread waits, and no thread holds anything.
void forget_waits();

// Registers, during its lifetime, that this thread waits for a request of the pool (null: for room). Created and
// destroyed under the GIL. Throws std::logic_error if the wait could never end.
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
