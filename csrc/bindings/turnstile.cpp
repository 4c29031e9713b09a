#include "bindings/turnstile.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/process.h"
#include "runtime/sync.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pymoe::bindings {

using SeatPointer = std::shared_ptr<Seat>;

namespace {

// The time that a client takes between two waits: to return, loop and submit.
constexpr std::chrono::microseconds kSpin{5};

void relax() {
#if defined(__x86_64__)
  for (int i = 0; i < 8; ++i) _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

// The threads that wait for one batch's requests, in the order in which they will return.
class Turnstile : public std::enable_shared_from_this<Turnstile> {
 public:
  // `runs`: the seat of a thread that returns before the threads of `seats`; null if there is none.
  Turnstile(std::vector<SeatPointer> seats, SeatPointer runs) : seats_(std::move(seats)), last_(std::move(runs)) {}

  void call_next();

 private:
  std::mutex mutex_;
  std::vector<SeatPointer> seats_;
  size_t next_ = 0;
  SeatPointer last_;  // the seat that was called last; null once all were called
};

struct Seat {
  const std::thread::id owner = std::this_thread::get_id();
  std::mutex mutex;
  runtime::SystemSync::Condition wake;
  enum { kWaiting, kCalled, kEmpty } state = kWaiting;  // guarded by mutex
  // The seat before this one; set when this seat is called.
  SeatPointer before;
  std::shared_ptr<Turnstile> turnstile;
  std::atomic<bool> owes_call{false};
  std::atomic<bool> left{false};  // true once the seat's thread waits again, or has ended

  // Allows the seat's thread to return, after that of `predecessor`. Returns false if the thread no longer waits.
  bool call(SeatPointer predecessor, std::shared_ptr<Turnstile> through) {
    {
      const std::lock_guard lock(mutex);
      if (state != kWaiting) return false;
      state = kCalled;
      before = std::move(predecessor);
      turnstile = std::move(through);
      owes_call = turnstile != nullptr;
    }
    wake.notify_one();
    return true;
  }

  // Calls the next seat, if this seat still owes that call. Runs on this seat's thread or on the next one's.
  void pass_on() {
    if (owes_call.exchange(false)) turnstile->call_next();
  }

  void leave() {
    left = true;
    pass_on();
  }

  // Waits, after this seat was called, until the previous seat's thread has left, but at most for kSpin. Runs on the
  // seat's own thread.
  void take_turn() {
    const SeatPointer running = std::move(before);
    if (!running) return;
    for (const auto until = Clock::now() + kSpin; !running->left; relax()) {
      if (Clock::now() < until) continue;
      running->pass_on();
      return;
    }
  }
};

void Turnstile::call_next() {
  const std::lock_guard lock(mutex_);
  bool called = false;
  while (!called && next_ < seats_.size()) {
    const SeatPointer seat = std::move(seats_[next_++]);
    called = seat->call(last_, shared_from_this());
    if (called) last_ = seat;
  }
  if (next_ == seats_.size()) last_ = nullptr;
}

namespace {

// This thread's current seat: that of its last completed wait, or the one it took when it delivered a batch; null once
// the thread has left the turnstile.
struct Current {
  SeatPointer seat;
  int created = 0;

  void become(SeatPointer came_back) {
    leave_turnstile();
    seat = std::move(came_back);
    created = generation();
  }
  ~Current() { leave_turnstile(); }
};

thread_local Current current;
thread_local std::vector<SeatPointer>* delivered = nullptr;

// Calls the seat of a thread whose request is done. If this thread is delivering the requests of a batch, and the seat
// is another thread's, queues the seat instead.
void arrive(const SeatPointer& seat) {
  if (delivered != nullptr && seat->owner != std::this_thread::get_id()) {
    delivered->push_back(seat);
  } else {
    seat->call(nullptr, nullptr);
  }
}

}  // namespace

void leave_turnstile() {
  const SeatPointer seat = std::move(current.seat);
  // A forked child must not take the lock of a seat: threads that exist only in the parent may hold it for ever.
  if (seat && current.created == generation()) seat->leave();
}

Place::Place(TensorRequest& request) : seat_(std::make_shared<Seat>()) {
  request.wake_by([seat = seat_] { arrive(seat); });
}

Place::~Place() {
  {
    const std::lock_guard lock(seat_->mutex);
    if (std::exchange(seat_->state, Seat::kEmpty) != Seat::kCalled) return;
  }
  // The seat was called, but its thread does not return: make the call that the previous seat owes, and the one that
  // this seat owes.
  if (const SeatPointer running = std::move(seat_->before)) running->pass_on();
  seat_->leave();
}

bool Place::wait_until(Clock::time_point until) {
  {
    std::unique_lock lock(seat_->mutex);
    while (seat_->state != Seat::kCalled) {
      if (!seat_->wake.wait_until(lock, until) && seat_->state != Seat::kCalled) return false;
    }
    seat_->state = Seat::kEmpty;
  }
  seat_->take_turn();
  current.become(seat_);
  return true;
}

void deliver_through_turnstile(const std::function<void()>& end) {
  std::vector<SeatPointer> seats;
  auto* const outer = std::exchange(delivered, &seats);
  end();
  delivered = outer;
  if (seats.empty()) return;
  leave_turnstile();
  if (on_worker_thread()) {
    const auto turnstile = std::make_shared<Turnstile>(std::move(seats), nullptr);
    turnstile->call_next();
    turnstile->call_next();
    return;
  }
  const auto here = std::make_shared<Seat>();
  const auto turnstile = std::make_shared<Turnstile>(std::move(seats), here);
  here->call(nullptr, turnstile);
  turnstile->call_next();
  current.become(here);
}

}  // namespace pymoe::bindings
