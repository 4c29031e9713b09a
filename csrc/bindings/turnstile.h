// Turnstile: how threads that wait for the requests of one batch come back through the GIL.
//
// They can only come back one at a time. Woken all at once they queue up for the GIL, and since torch lets go of it
// whenever a tensor is dropped, each of them queues up again and again: on two idle cores that was measured to cost
// five changes of thread a request, and two thirds of the throughput. Woken one after the other they wait for the
// kernel to wake a core that has gone to sleep.
//
// So two are awake at a time: one runs, the next one spins until that one waits again or is gone (leave), but for no
// longer than kSpin; then it asks for the GIL whatever the other does. Whoever leaves calls the one after next; the
// next one does so in its place when it has spun in vain. So each thread that is called passes the call on within kSpin
// of being awake, whatever Python does in between.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "bindings/request.h"

namespace pymoe::bindings {

// This thread is about to wait: whoever was to come after it may. Called without the GIL.
void leave_turnstile();

struct Seat;

// A thread's place among those that wait; made and used without the GIL.
class Place {
 public:
  explicit Place(TensorRequest& request);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // Waits until the request is done and it is this thread's turn; false if it is not by `until`. After a true one the
  // place is used up.
  bool wait_until(std::chrono::steady_clock::time_point until);

 private:
  const std::shared_ptr<Seat> seat_;
};

// Calls end(), which ends requests; those who wait for them in a Place come back through a turnstile, after this thread
// if it is a client's. Called without the GIL.
void deliver_through_turnstile(const std::function<void()>& end);

}  // namespace pymoe::bindings
