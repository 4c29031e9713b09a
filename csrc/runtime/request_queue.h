// RequestQueue: the queued requests of one kind, and the rule that forms batches of them.
//
// Order      Requests are sorted by rank, smallest first; the rank is the arrival time minus the head start. Equal
//            ranks are in order of arrival.
// Ready      A batch is ready immediately if max_batch_size rows are queued. With fewer than min_batch_size rows, it is
//            ready only after the pool's timeout; in between, the linger decides (batching.h).
// Batches    A batch takes whole requests from the front; the first one that does not fit ends it. A request larger
//            than max_batch_size is taken in slices, which fill batches to the last row.
// Deadlines  expire returns the requests that have not begun by their deadline. take does not look at deadlines: call
//            expire before it if next_deadline has passed.
// Claims     take, remove, expire and clear claim the requests that they return: the caller must complete them.
//
// Not thread-safe: the strand's mutex guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/batching.h"
#include "runtime/request.h"

namespace pymoe::runtime {

template <typename Sync>
class RequestQueue {
 public:
  using Time = typename Sync::Time;
  using RequestPointer = std::shared_ptr<Request<Sync>>;
  using Requests = std::vector<RequestPointer>;
  using Slices = std::vector<Slice<Sync>>;

  static constexpr Time kNow = Time::min();
  static constexpr Time kNever = Time::max();

  explicit RequestQueue(const BatchingOptions<Sync>& options) : options_(options), linger_(options.linger) {}

  bool empty() const { return queue_.empty(); }
  int64_t requests() const { return static_cast<int64_t>(queue_.size()); }
  int64_t rows() const { return rows_; }
  bool idle() const { return queue_.empty() && running_ == 0; }

  // Returns the rank of the first request. Call only if the queue is not empty.
  Time rank() const { return queue_.begin()->first; }

  void push(RequestPointer request, Time now) {
    request->arrival_ = now;
    insert(std::move(request), queue_.end());
    linger_.arrived(now, requests() + running_);
  }

  // Returns the time at which the next batch should run if no other request arrives: kNow if it is ready, kNever if it
  // must wait for more requests.
  Time ready_at() const {
    if (queue_.empty()) return kNever;
    if (rows_ >= options_.max_batch_size) return kNow;
    const bool enough = rows_ >= options_.min_batch_size;
    if (enough && linger_.complete(requests())) return kNow;
    const Time oldest = oldest_arrival();
    const Time overdue = options_.timeout ? oldest + *options_.timeout : kNever;
    return enough ? std::min(linger_.until(oldest), overdue) : overdue;
  }

  // Removes and returns the next batch.
  Slices take() {
    Slices batch;
    linger_.started(requests());
    int64_t room = options_.max_batch_size;
    while (!queue_.empty()) {
      const RequestPointer request = queue_.begin()->second;
      const int64_t left = request->rows - request->next_row_;
      if (left > room && (request->rows <= options_.max_batch_size || room == 0)) break;
      const int64_t rows = std::min(left, room);
      if (request->next_row_ == 0) {
        request->claim();
        forget_deadline(*request);
        ++running_;
      }
      batch.push_back({request, request->next_row_, request->next_row_ + rows});
      request->in_batch_ = true;
      request->next_row_ += rows;
      room -= rows;
      rows_ -= rows;
      if (request->next_row_ < request->rows) break;
      erase(*request);
    }
    return batch;
  }

  // Takes back slices that take() has returned but that have not run. Each request returns to its place in the queue.
  void put_back(std::span<const Slice<Sync>> batch) {
    for (size_t i = batch.size(); i-- > 0;) {
      const auto& [request, begin, end] = batch[i];
      if (begin == 0) {
        request->unclaim();
        --running_;
      }
      request->next_row_ = begin;
      if (!request->queued_) {
        insert(request, queue_.lower_bound(rank_of(*request)));
      } else {
        rows_ += end - begin;
        if (begin == 0) remember_deadline(*request);
      }
    }
  }

  // Records that the batch with a slice of this request has ended. Returns true if the request's remaining rows were
  // withdrawn.
  bool returned(Request<Sync>& request) {
    request.in_batch_ = false;
    return request.given_up_;
  }

  // Withdraws the remaining rows of a request that has begun, and adds their number to `rows`. Returns false if none
  // remain, or if the request has not begun. The caller must complete the request: immediately if `ends_now` is set,
  // that is, if no running batch contains a part of it; otherwise when that batch ends.
  bool give_up(Request<Sync>& request, int64_t& rows, bool& ends_now) {
    if (!request.queued_ || request.next_row_ == 0) return false;
    rows += request.rows - request.next_row_;
    request.given_up_ = true;
    ends_now = !request.in_batch_;
    if (ends_now) --running_;
    drop(request);
    return true;
  }

  Requests begun() const {
    Requests result;
    for (const auto& [rank, request] : queue_) {
      if (request->next_row_ > 0) result.push_back(request);
    }
    return result;
  }

  // Records the end of a batch that took `took` and completed `requests` requests.
  void ended(int64_t requests, Time now, typename Sync::Duration took) {
    running_ -= requests;
    linger_.ended(now, took);
  }

  // Removes a request that has not begun; returns false if it has begun.
  bool remove(Request<Sync>& request) {
    if (!request.queued_ || !request.claim()) return false;
    drop(request);
    return true;
  }

  // Removes the remaining rows of a request after one of its slices has failed; returns their number.
  int64_t drop_rest(Request<Sync>& request) {
    const int64_t rows = request.rows - request.next_row_;
    drop(request);
    return rows;
  }

  void expire(Time now, Requests& expired) {
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      const RequestPointer request = deadlines_.begin()->second->place_->second;
      request->claim();
      drop(*request);
      expired.push_back(request);
    }
  }

  // Returns the earliest deadline of a queued request, or kNever if there is none.
  Time next_deadline() const { return deadlines_.empty() ? kNever : deadlines_.begin()->first; }

  // Removes every request that has not begun and adds it to `cleared`; with `begun_too`, also those that have begun.
  void clear(Requests& cleared, bool begun_too = false) {
    for (auto place = queue_.begin(); place != queue_.end();) {
      const RequestPointer request = (place++)->second;
      if (!request->claim() && !begun_too) continue;
      drop(*request);
      cleared.push_back(request);
    }
  }

  static Time arrival(const Request<Sync>& request) { return request.arrival_; }

 private:
  using ByRank = typename Request<Sync>::ByRank;

  static Time rank_of(const Request<Sync>& request) { return request.arrival_ - request.head_start; }

  void insert(RequestPointer request, typename ByRank::iterator hint) {
    Request<Sync>& r = *request;
    rows_ += r.rows - r.next_row_;
    if (r.head_start != r.head_start.zero()) ++with_head_start_;
    if (oldest_) oldest_ = std::min(*oldest_, r.arrival_);
    r.place_ = queue_.emplace_hint(hint, rank_of(r), std::move(request));
    r.queued_ = true;
    if (r.next_row_ == 0) remember_deadline(r);
  }

  void remember_deadline(Request<Sync>& request) {
    if (request.deadline) request.deadline_ = deadlines_.emplace(*request.deadline, &request);
  }
  void forget_deadline(Request<Sync>& request) {
    if (request.deadline) deadlines_.erase(request.deadline_);
  }

  // Removes a request from the queue; its remaining rows no longer count.
  void drop(Request<Sync>& request) {
    if (request.next_row_ == 0) forget_deadline(request);
    rows_ -= request.rows - request.next_row_;
    erase(request);
  }

  void erase(Request<Sync>& request) {
    if (oldest_ == request.arrival_) oldest_.reset();
    if (request.head_start != request.head_start.zero()) --with_head_start_;
    request.queued_ = false;
    queue_.erase(request.place_);  // may be the last reference, so it is dropped after everything else
  }

  // Returns the arrival time of the oldest request. Without head starts, that is the first request of the queue; with
  // head starts, the queue is searched again whenever the oldest request has left.
  Time oldest_arrival() const {
    if (with_head_start_ == 0) return queue_.begin()->second->arrival_;
    if (!oldest_) {
      oldest_ = queue_.begin()->second->arrival_;
      for (const auto& [rank, request] : queue_) oldest_ = std::min(*oldest_, request->arrival_);
    }
    return *oldest_;
  }

  const BatchingOptions<Sync>& options_;
  ByRank queue_;
  typename Request<Sync>::ByTime deadlines_;
  int64_t rows_ = 0;                    // number of queued rows that no batch has taken
  int64_t running_ = 0;                 // number of requests that have begun and are not done
  int64_t with_head_start_ = 0;         // number of queued requests with a head start
  mutable std::optional<Time> oldest_;  // arrival of the oldest request in the queue; none if unknown
  Linger<Sync> linger_;
};

}  // namespace pymoe::runtime
