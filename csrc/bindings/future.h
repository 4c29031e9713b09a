// RequestFuture of pymoe._runtime, through which a client gets the outcome of its request. It is a plain CPython type:
// every request creates one and reads it once, and both take three times as long with pybind11.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"
#include "runtime/strand.h"

#include <memory>

namespace pymoe::bindings {

// Returns a future of a request that was submitted to the pool.
py::object make_future(std::shared_ptr<TensorRequest> request, std::shared_ptr<Pool> pool, bool may_help);

// Returns the request of a RequestFuture; throws a TypeError for anything else. Throws std::runtime_error if the
// request is not done and was submitted before a fork.
std::shared_ptr<TensorRequest> waitable_request_of(const py::object& future, const char* where);

// Returns whether the calling thread must or may run batches (help) while it waits for a request or for room in a
// queue. Call with the GIL held.
//
// Inside a batch, and on a worker of a runtime, a thread must help: it may be the only one that can continue. Other
// threads never help if the wait is `limited`, since a batch may take longer. Without a limit, a worker of a WorkerPool
// must help, too, because a batch may wait for its call; a client helps if `may` is true and a batch would run on its
// thread as on a worker.
runtime::Help help_of_this_thread(bool may, bool limited);

}  // namespace pymoe::bindings
