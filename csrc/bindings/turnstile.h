// Turnstile: the order in which threads that wait for the requests of one batch take the GIL and return.
//
// They can only return one at a time, because each needs the GIL. If all are woken together, they queue up for the GIL,
// and since torch releases it whenever a tensor is dropped, each of them queues up again and again: measured on two
// idle cores, this cost five thread switches per request, and two thirds of the throughput. If they are woken one after
// the other, each waits for the kernel to wake a sleeping core.
//
// So two threads are awake at a time: one runs, and the next one spins until the first one waits again or has left, but
// no longer than kSpin; then the next one waits for the GIL, whatever the first one does. A thread that leaves calls
// the thread after next; if the next thread has spun for kSpin before, it makes that call instead. So each called
// thread passes the call on within kSpin after it wakes, whatever Python does in between.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "bindings/request.h"

namespace pymoe::bindings {

// Tells the turnstile that this thread is about to wait, so that the next thread may return. Call it without the GIL.
void leave_turnstile();

struct Seat;

// A waiting thread's place in the order of return. Create it, and call wait_until, without the GIL.
class Place {
 public:
  explicit Place(TensorRequest& request);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // Waits until the request is done and it is this thread's turn to return. Returns false if `until` passes before. Do
  // not use the Place again after this has returned true.
  bool wait_until(std::chrono::steady_clock::time_point until);

 private:
  const std::shared_ptr<Seat> seat_;
};

// Calls end(), which ends requests. Clients that wait for these requests in a Place return through a turnstile, after
// this thread if it is a client itself. Call it without the GIL.
void deliver_through_turnstile(const std::function<void()>& end);

}  // namespace pymoe::bindings
