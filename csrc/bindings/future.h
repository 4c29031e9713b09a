// RequestFuture of pymoe._runtime: through it a client gets the outcome of its request. It is a CPython type without
// pybind11, because every request creates one and reads it once, which takes a third of pybind11's time.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"
#include "runtime/strand.h"

#include <memory>

namespace pymoe::bindings {

// Returns a future of a request that was submitted to the pool.
py::object make_future(std::shared_ptr<TensorRequest> request, std::shared_ptr<Pool> pool, bool may_help);

// Returns the request of a future. Throws std::runtime_error if the request is not done and was submitted before a
// fork.
std::shared_ptr<TensorRequest> waitable_request_of(const py::object& future, const char* where);

// Returns whether the calling thread runs batches while it waits for a request, or for room in a queue. Under the GIL.
//
// Inside a batch, and on a worker of a runtime, a thread must: it may be the only one that can continue. Any other
// worker may, if a batch waits for it. No other thread whose wait is `limited` helps, since a batch may take longer. A
// client helps if it `may`, and its thread is in a state in which a batch runs as on a worker.
runtime::Help help_of_this_thread(bool may, bool limited);

}  // namespace pymoe::bindings
