// Pools with batch functions that a test supplies, and requests for those pools.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <utility>

#include "runtime/executor.h"

namespace pymoe::runtime::test {

using namespace std::chrono_literals;

using Sync = SystemSync;
using Pool = TaskPool<Sync>;
using Pointer = std::shared_ptr<Request<Sync>>;
using Batch = std::span<const Slice<Sync>>;
using Options = BatchingOptions<Sync>;
constexpr auto kForever = Sync::Time::max();

struct Function : BatchFunction<Sync> {
  explicit Function(std::function<void(Batch)> body = {}) : body(std::move(body)) {}
  void run(Batch batch) override {
    if (body) body(batch);
  }
  bool may_retry(const std::exception_ptr&) override { return retry; }
  std::function<void(Batch)> body;
  std::atomic<bool> retry{true};
};

inline std::shared_ptr<Pool> make_pool(std::function<void(Batch)> body = {}, const Options& options = {},
                                       std::shared_ptr<Strand<Sync>> strand = std::make_shared<Strand<Sync>>(),
                                       std::string name = "pool") {
  return Pool::create(std::move(name), options, std::make_shared<Function>(std::move(body)), std::move(strand));
}

inline Pointer request(int64_t rows = 1, uint64_t kind = 0, std::optional<Sync::Time> deadline = std::nullopt,
                       Sync::Duration head_start = 0s) {
  return std::make_shared<Request<Sync>>(rows, kind, deadline, head_start);
}

inline Pointer submit(Pool& pool, Pointer submitted) {
  REQUIRE(pool.submit(submitted, kForever));
  return submitted;
}

template <typename Error>
bool failed_with(const Pointer& request, const std::string& text = "") {
  if (!request->done() || !request->error()) return false;
  try {
    std::rethrow_exception(request->error());
  } catch (const Error& error) {
    return std::string(error.what()).find(text) != std::string::npos;
  } catch (...) {
    return false;
  }
}

inline bool succeeded(const Pointer& request) { return request->done() && !request->error(); }

inline void stop(Executor<Sync>& executor, Stop how = Stop::kDrain) {
  executor.request_stop(how);
  while (!executor.wait_stopped_until(kForever)) {
  }
}

// A batch function that signals when it has begun, and ends when the test releases it.
struct Gate {
  std::latch begun{1}, go{1};
  std::function<void(Batch)> body() {
    return [this, first = std::make_shared<std::atomic<bool>>(true)](Batch) {
      if (!first->exchange(false)) return;
      begun.count_down();
      go.wait();
    };
  }
};

}  // namespace pymoe::runtime::test
