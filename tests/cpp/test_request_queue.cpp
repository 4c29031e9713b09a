// Tests the batching policy, case by case. Each case sets the time itself, so nothing waits.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "runtime/request_queue.h"
#include "runtime/sync.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;

namespace {

using Sync = SystemSync;
using Queue = RequestQueue<Sync>;
using Pointer = std::shared_ptr<Request<Sync>>;
using Options = BatchingOptions<Sync>;
using Time = Sync::Time;

// Returns the time `after` the beginning of a test, which is late enough for head starts.
Time at(Sync::Duration after) { return Time(std::chrono::hours(1000)) + after; }

Pointer request(int64_t rows, Sync::Duration head_start = 0s, std::optional<Time> deadline = std::nullopt) {
  return std::make_shared<Request<Sync>>(rows, 0, deadline, head_start);
}

Options sizes(int64_t min, int64_t max) {
  Options options;
  options.min_batch_size = min;
  options.max_batch_size = max;
  return options;
}

struct Bench {
  explicit Bench(Options chosen = {}) : options(chosen), queue(options) {}

  Pointer push(int64_t rows, Time now, Sync::Duration head_start = 0s, std::optional<Time> deadline = std::nullopt) {
    const Pointer pushed = request(rows, head_start, deadline);
    queue.push(pushed, now);
    return pushed;
  }
  std::vector<Slice<Sync>> take(Time now) {
    queue.expire(now, expired);
    return queue.take();
  }

  // Takes a batch at `start` and ends it after `took`, with all its requests done.
  std::vector<Slice<Sync>> run(Time start, Sync::Duration took) {
    auto batch = take(start);
    finish(batch, start + took, took);
    return batch;
  }
  void finish(const std::vector<Slice<Sync>>& batch, Time end, Sync::Duration took) {
    int64_t done = 0;
    for (const auto& slice : batch) done += slice.last();
    queue.ended(done, end, took);
  }
  // Pushes `clients` requests of one row that arrive together, and runs them in a batch that takes 1 ms.
  void crowd(int clients, Time start) {
    for (int i = 0; i < clients; ++i) push(1, start);
    run(start, 1ms);
  }

  const Options options;
  Queue queue;
  Queue::Requests expired;
};

std::vector<Pointer> requests_of(const std::vector<Slice<Sync>>& batch) {
  std::vector<Pointer> result;
  for (const auto& slice : batch) result.push_back(slice.request);
  return result;
}

int64_t rows_of(const std::vector<Slice<Sync>>& batch) {
  int64_t rows = 0;
  for (const auto& slice : batch) rows += slice.end - slice.begin;
  return rows;
}

}  // namespace

TEST_CASE("an empty queue is never ready") { CHECK(Bench().queue.ready_at() == Queue::kNever); }

TEST_CASE("a lonely request is ready at once") {
  Bench bench;
  bench.push(1, at(0ms));
  CHECK(bench.queue.ready_at() == Queue::kNow);
  for (int i = 1; i <= 5; ++i) {  // and the queue stays so, request after request
    bench.run(at(i * 10ms), 1ms);
    bench.push(1, at(i * 10ms + 1ms));
    CHECK(bench.queue.ready_at() == Queue::kNow);
  }
}

TEST_CASE("fewer rows than min_batch_size are never ready without a timeout") {
  Bench bench(sizes(4, 8));
  for (int i = 0; i < 3; ++i) {
    bench.push(1, at(0ms));
    CHECK(bench.queue.ready_at() == Queue::kNever);
  }
  bench.push(1, at(5ms));
  CHECK(bench.queue.ready_at() == Queue::kNow);
}

TEST_CASE("fewer rows than min_batch_size are ready when the oldest has waited for the timeout") {
  Options options = sizes(4, 8);
  options.timeout = 20ms;
  Bench bench(options);
  bench.push(1, at(3ms));
  bench.push(1, at(9ms));
  CHECK(bench.queue.ready_at() == at(23ms));
  CHECK(bench.run(at(23ms), 1ms).size() == 2);
}

TEST_CASE("the timeout counts from the oldest request, whoever is in front") {
  Options options = sizes(4, 8);
  options.timeout = 20ms;
  Bench bench(options);
  bench.push(1, at(0ms));
  const Pointer first = bench.push(1, at(5ms), 1s);
  CHECK(bench.queue.ready_at() == at(20ms));
  CHECK(bench.take(at(20ms))[0].request == first);
}

TEST_CASE("max_batch_size rows are ready at once, whoever else is expected") {
  Bench bench(sizes(1, 4));
  bench.crowd(4, at(0ms));
  bench.push(4, at(1ms));
  CHECK(bench.queue.ready_at() == Queue::kNow);
}

TEST_CASE("a queue waits for those who were in flight together, and not once they are back") {
  Bench bench;
  bench.crowd(8, at(0ms));
  for (int i = 0; i < 7; ++i) {
    bench.push(1, at(1ms + i * 10us));
    CHECK(bench.queue.ready_at() > at(1ms + i * 10us));
  }
  bench.push(1, at(2ms));
  CHECK(bench.queue.ready_at() == Queue::kNow);
}

TEST_CASE("two cohorts that take turns become one") {
  Bench bench;
  bench.crowd(4, at(0ms));
  for (int i = 0; i < 4; ++i) bench.push(1, at(1ms));
  const auto running = bench.take(at(1ms));
  CHECK(running.size() == 4);
  for (int i = 0; i < 4; ++i) bench.push(1, at(1ms + 500us));  // the other cohort arrives while the first runs
  bench.finish(running, at(2ms), 1ms);
  CHECK(bench.queue.ready_at() > at(2ms));
  for (int i = 0; i < 4; ++i) bench.push(1, at(2ms + i * 10us));
  CHECK(bench.queue.ready_at() == Queue::kNow);
  CHECK(bench.take(at(2ms + 40us)).size() == 8);
}

TEST_CASE("the linger ends when nobody has come for as long as a batch takes") {
  Bench bench;
  bench.crowd(8, at(0ms));  // a batch takes 1 ms
  bench.push(1, at(1ms + 100us));
  CHECK(bench.queue.ready_at() == at(2ms + 100us));
  bench.push(1, at(1ms + 900us));
  CHECK(bench.queue.ready_at() == at(2ms + 900us));
}

TEST_CASE("the linger ends after `linger` at the latest, however slow batches are and however many come") {
  Options options;
  options.linger = 2ms;
  Bench bench(options);
  for (int i = 0; i < 64; ++i) bench.push(1, at(0ms));
  bench.run(at(0ms), 1s);
  bench.push(1, at(1s));
  CHECK(bench.queue.ready_at() == at(1s + 2ms));
  bench.push(1, at(1s + 1500us));
  CHECK(bench.queue.ready_at() == at(1s + 2ms));
}

TEST_CASE("a linger of zero takes what is there") {
  Options options;
  options.linger = 0ms;
  Bench bench(options);
  bench.crowd(8, at(0ms));
  bench.push(1, at(1ms));
  CHECK(bench.queue.ready_at() <= at(1ms));
}

TEST_CASE("the timeout bounds the linger too") {
  Options options;
  options.timeout = 300us;
  Bench bench(options);
  bench.crowd(8, at(0ms));
  bench.push(1, at(1ms));
  CHECK(bench.queue.ready_at() == at(1ms + 300us));
}

TEST_CASE("who is left alone lingers once") {
  Bench bench;
  bench.crowd(8, at(0ms));
  bench.push(1, at(2ms));
  const Time ready = bench.queue.ready_at();
  CHECK(ready > at(2ms));
  bench.run(ready, 1ms);
  bench.push(1, ready + 2ms);
  CHECK(bench.queue.ready_at() == Queue::kNow);
}

TEST_CASE("waiting in vain is done less and less, and again when it pays") {
  Bench bench;
  Time now = at(0ms);
  // Runs four requests in a batch of 1 ms, after which `come` clients return; returns how long the queue waits.
  const auto linger = [&](int come) {
    bench.crowd(4, now += 1s);
    now += 1ms;
    for (int i = 0; i < come; ++i) bench.push(1, now);
    const Time ready = bench.queue.ready_at();
    bench.run(ready == Queue::kNow ? now : ready, 1ms);
    return ready == Queue::kNow ? 0us : std::chrono::duration_cast<std::chrono::microseconds>(ready - now);
  };
  CHECK(linger(1) == 1000us);
  CHECK(linger(1) == 500us);
  CHECK(linger(1) == 250us);
  CHECK(linger(4) == 0us);  // the limit of 1/8 ms doubles, as all are back; the next crowd doubles it again
  CHECK(linger(1) == 500us);
  for (int i = 0; i < 8; ++i) linger(4);
  CHECK(linger(1) == 1000us);
}

TEST_CASE("requests run in the order of their arrival") {
  Bench bench(sizes(1, 3));
  std::vector<Pointer> pushed;
  for (int i = 0; i < 7; ++i) pushed.push_back(bench.push(1, at(i * 1us)));
  std::vector<Pointer> ran;
  while (!bench.queue.empty()) {
    for (const auto& r : requests_of(bench.run(at(1ms), 1ms))) ran.push_back(r);
  }
  CHECK(ran == pushed);
}

TEST_CASE("requests that arrive at one instant keep their order") {
  Bench bench;
  std::vector<Pointer> pushed;
  for (int i = 0; i < 20; ++i) pushed.push_back(bench.push(1, at(0ms)));
  CHECK(requests_of(bench.take(at(0ms))) == pushed);
}

TEST_CASE("a head start overtakes what arrived less than that before, and nothing older") {
  Bench bench;
  const Pointer oldest = bench.push(1, at(0ms));
  const Pointer older = bench.push(1, at(15ms));
  const Pointer urgent = bench.push(1, at(20ms), 10ms);
  const Pointer late = bench.push(1, at(21ms));
  CHECK(requests_of(bench.take(at(21ms))) == std::vector{oldest, urgent, older, late});
}

TEST_CASE("a negative head start lets others go first") {
  Bench bench;
  const Pointer patient = bench.push(1, at(0ms), -10ms);
  const Pointer normal = bench.push(1, at(5ms));
  CHECK(requests_of(bench.take(at(5ms))) == std::vector{normal, patient});
}

TEST_CASE("a request that does not fit ends the batch, and is not overtaken") {
  Bench bench(sizes(1, 4));
  const Pointer first = bench.push(3, at(0ms)), second = bench.push(3, at(1us)), third = bench.push(1, at(2us));
  CHECK(requests_of(bench.run(at(1ms), 1ms)) == std::vector{first});
  CHECK(requests_of(bench.run(at(2ms), 1ms)) == std::vector{second, third});
}

TEST_CASE("a request larger than a batch is taken in slices, which others fill up") {
  Bench bench(sizes(1, 4));
  const Pointer small = bench.push(1, at(0ms)), large = bench.push(9, at(1us)), last = bench.push(2, at(2us));
  CHECK(bench.queue.rows() == 12);
  struct Part {
    Pointer request;
    int64_t begin, end;
  };
  const std::vector<std::vector<Part>> expected{
      {{small, 0, 1}, {large, 0, 3}}, {{large, 3, 7}}, {{large, 7, 9}, {last, 0, 2}}};
  for (const auto& batch : expected) {
    CHECK(bench.queue.ready_at() == Queue::kNow);
    const auto taken = bench.run(at(1ms), 1ms);
    REQUIRE(taken.size() == batch.size());
    for (size_t i = 0; i < batch.size(); ++i) {
      CHECK(taken[i].request == batch[i].request);
      CHECK(taken[i].begin == batch[i].begin);
      CHECK(taken[i].end == batch[i].end);
    }
  }
  CHECK(bench.queue.rows() == 0);
  CHECK(bench.queue.idle());
}

TEST_CASE("requests without rows ride along, also in a full batch, and run alone") {
  Bench bench(sizes(1, 2));
  const Pointer first = bench.push(2, at(0ms)), none = bench.push(0, at(1us));
  CHECK(requests_of(bench.run(at(1ms), 1ms)) == std::vector{first, none});
  const Pointer alone = bench.push(0, at(2ms));
  CHECK(requests_of(bench.run(at(3ms), 1ms)) == std::vector{alone});
}

TEST_CASE("a request that has not begun by its deadline is expired and in no batch") {
  Bench bench;
  const Pointer kept = bench.push(1, at(0ms), 0s, at(10ms));
  const Pointer late = bench.push(1, at(0ms), 0s, at(5ms));
  CHECK(bench.queue.next_deadline() == at(5ms));
  CHECK(requests_of(bench.take(at(5ms))) == std::vector{kept});
  CHECK(bench.expired == std::vector{late});
  CHECK_FALSE(late->pending());
  CHECK(bench.queue.next_deadline() == Queue::kNever);
}

TEST_CASE("what has begun no longer expires") {
  Bench bench(sizes(1, 2));
  bench.push(5, at(0ms), 0s, at(5ms));
  bench.run(at(1ms), 1ms);
  bench.queue.expire(at(10ms), bench.expired);
  CHECK(bench.expired.empty());
  CHECK(bench.queue.next_deadline() == Queue::kNever);
  CHECK(bench.queue.rows() == 3);
}

TEST_CASE("a queue whose requests have all expired gives an empty batch") {
  Bench bench;
  bench.push(1, at(0ms), 0s, at(1ms));
  CHECK(bench.take(at(2ms)).empty());
  CHECK(bench.expired.size() == 1);
  CHECK(bench.queue.empty());
}

TEST_CASE("a request can be taken back until it has begun") {
  Bench bench(sizes(1, 2));
  const Pointer large = bench.push(3, at(0ms)), queued = bench.push(2, at(0ms), 0s, at(1s));
  bench.run(at(1ms), 1ms);
  CHECK_FALSE(bench.queue.remove(*large));
  CHECK(bench.queue.remove(*queued));
  CHECK_FALSE(bench.queue.remove(*queued));
  CHECK(bench.queue.rows() == 1);
  CHECK(bench.queue.next_deadline() == Queue::kNever);
}

TEST_CASE("clearing leaves what has begun") {
  Bench bench(sizes(1, 2));
  const Pointer large = bench.push(3, at(0ms)), queued = bench.push(1, at(0ms));
  bench.run(at(1ms), 1ms);
  Queue::Requests cleared;
  bench.queue.clear(cleared);
  CHECK(cleared == std::vector{queued});
  CHECK(requests_of(bench.run(at(2ms), 1ms)) == std::vector{large});
}

TEST_CASE("a batch that is put back is again where it was") {
  Bench bench(sizes(1, 4));
  std::vector<Pointer> pushed;
  for (int i = 0; i < 2; ++i) pushed.push_back(bench.push(1, at(0ms), 0s, at(1s)));
  pushed.push_back(bench.push(6, at(0ms), 0s, at(1s)));
  pushed.push_back(bench.push(1, at(0ms)));
  const auto batch = bench.take(at(1ms));
  CHECK(batch.size() == 3);
  bench.queue.put_back(batch);
  CHECK(bench.queue.rows() == 9);
  CHECK(bench.queue.requests() == 4);
  CHECK(bench.queue.next_deadline() == at(1s));
  for (const Pointer& r : pushed) CHECK(r->pending());
  const auto again = bench.take(at(2ms));
  CHECK(requests_of(again) == requests_of(batch));
  CHECK(again[2].begin == 0);
  CHECK(again[2].end == 2);
}

TEST_CASE("the last slice of a request can be put back") {
  Bench bench(sizes(1, 4));
  const Pointer large = bench.push(6, at(0ms)), other = bench.push(1, at(0ms));
  bench.run(at(0ms), 1ms);
  const auto rest = bench.take(at(1ms));
  CHECK(rows_of(rest) == 3);
  bench.queue.put_back(rest);
  CHECK(bench.queue.rows() == 3);
  CHECK_FALSE(large->pending());
  const auto again = bench.run(at(2ms), 1ms);
  CHECK(requests_of(again) == std::vector{large, other});
  CHECK(again[0].begin == 4);
}

TEST_CASE("the rest of a request that failed is dropped") {
  Bench bench(sizes(1, 4));
  const Pointer large = bench.push(10, at(0ms));
  bench.take(at(0ms));
  CHECK(bench.queue.drop_rest(*large) == 6);
  CHECK(bench.queue.empty());
  CHECK(bench.queue.rows() == 0);
}

TEST_CASE("options that make no sense are refused by name") {
  const auto message = [](auto change) {
    Options options;
    change(options);
    try {
      options.check();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message([](Options&) {}).empty());
  CHECK(message([](Options& o) { o.min_batch_size = 0; }) == "TaskPool: min_batch_size must be at least 1, got 0");
  CHECK(message([](Options& o) { o = sizes(5, 4); }) ==
        "TaskPool: max_batch_size must be at least min_batch_size (5), got 4");
  CHECK(message([](Options& o) { o.capacity = 0; }) == "TaskPool: capacity must be at least 1, got 0");
  CHECK(message([](Options& o) { o.timeout = -1s; }) == "TaskPool: timeout must not be negative");
  CHECK(message([](Options& o) { o.linger = -1s; }) == "TaskPool: linger must not be negative");
}

TEST_CASE("whatever happens, every row is given out once and no batch is too large") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](int64_t least, int64_t most) {
      return std::uniform_int_distribution<int64_t>(least, most)(random);
    };
    Bench bench(sizes(1, pick(1, 8)));
    std::vector<std::pair<Pointer, int64_t>> seen;  // each request, and its rows that ran
    Time now = at(0ms);
    int64_t queued_rows = 0, gone = 0;
    for (int step = 0; step < 200; ++step) {
      now += pick(0, 300) * 1us;
      const int64_t choice = pick(0, 9);
      if (choice < 5) {
        const auto deadline = pick(0, 3) == 0 ? std::optional(now + pick(0, 2000) * 1us) : std::nullopt;
        const int64_t rows = pick(0, 12);
        seen.emplace_back(bench.push(rows, now, pick(-2, 2) * 100us, deadline), 0);
        queued_rows += rows;
      } else if (choice == 5 && !seen.empty()) {
        const auto& victim = seen[static_cast<size_t>(pick(0, static_cast<int64_t>(seen.size()) - 1))].first;
        if (bench.queue.remove(*victim)) queued_rows -= victim->rows, ++gone;
      } else if (!bench.queue.empty()) {
        const auto batch = bench.take(now);
        for (const auto& late : bench.expired) queued_rows -= late->rows, ++gone;
        bench.expired.clear();
        CHECK(rows_of(batch) <= bench.options.max_batch_size);
        if (pick(0, 4) == 0) {
          bench.queue.put_back(batch);
        } else {
          for (const auto& slice : batch) {
            const auto entry =
                std::find_if(seen.begin(), seen.end(), [&](const auto& e) { return e.first == slice.request; });
            CHECK(entry->second == slice.begin);
            entry->second = slice.end;
            queued_rows -= slice.end - slice.begin;
          }
          bench.finish(batch, now, 100us);
        }
      }
      CHECK(bench.queue.rows() == queued_rows);
    }
    while (!bench.queue.empty()) {
      const auto batch = bench.take(at(10s));
      gone += static_cast<int64_t>(bench.expired.size());
      bench.expired.clear();
      for (const auto& slice : batch) {
        std::find_if(seen.begin(), seen.end(), [&](const auto& e) { return e.first == slice.request; })->second =
            slice.end;
      }
      bench.finish(batch, at(10s), 1ms);
    }
    CHECK(bench.queue.idle());
    int64_t whole = 0;
    for (const auto& [r, rows] : seen) whole += rows == r->rows && !r->pending() && r->rows > 0;
    int64_t with_rows = 0;
    for (const auto& [r, rows] : seen) with_rows += r->rows > 0;
    CHECK(whole <= with_rows);
    CHECK(whole + gone >= with_rows);
  }
}
