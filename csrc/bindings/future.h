// RequestFuture of pymoe._runtime: where a client finds the outcome of its request. A type of CPython's own making,
// since every request makes one and asks it once: the calls cost a third of what they would through pybind11.
#pragma once

#include "bindings/gil.h"
#include "bindings/request.h"

#include <memory>

namespace pymoe::bindings {

// Adds the type to the module; throws ErrorSet.
void add_future_type(PyObject* module);

// A future of a request that was submitted to the pool.
Ref make_future(std::shared_ptr<TensorRequest> request, std::shared_ptr<Pool> pool, bool may_help);

// Waits for the request and returns its result, or throws ErrorSet with what it raised.
Ref wait_for_result(const std::shared_ptr<TensorRequest>& request, Pool& pool, bool may_help, const char* where,
                    std::optional<Clock::time_point> deadline);

// The function that makes `await future` work: called with the future, it returns an iterator.
PyObject* set_await(PyObject* module, PyObject* function);
// set_standard(function): what makes, for a future, the object whose condition, waiters and state are those that
// functions of concurrent.futures look at.
PyObject* set_standard(PyObject* module, PyObject* function);

// must_help(limited): whether a wait of this thread for a request, one with a limit or without, runs batches.
PyObject* must_help(PyObject* module, PyObject* limited);

}  // namespace pymoe::bindings
