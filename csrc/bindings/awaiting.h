// How a coroutine waits for a request, from `await future` to the loop's next turn:
//
//   await            makes an Awaiting, an iterator: it yields a waiter, a future of the loop that the task sleeps on.
//   the batch ends   and whoever completes it puts the waiters of its requests into the loop's Mailbox without the GIL,
//                    and calls the loop once, not once a request: call_soon_threadsafe costs more than all the rest.
//   the loop         takes the waiters out and sets them; each task goes on, and Awaiting returns the request's result.
//
// A request has one future: when one of several tasks that await it is cancelled, it is cancelled for all of them.
// A loop that is there but raises when it is called is called once more, and otherwise with the next waiter that comes.
#pragma once

#include "bindings/gil.h"

#include <optional>

namespace pymoe::bindings {

// The iterator for a RequestFuture. After `seconds` it gives up: cancels the request and raises TimeoutError.
py::object make_awaiting(py::object future, std::optional<double> seconds = std::nullopt);

}  // namespace pymoe::bindings
