#include "runtime/task_graph.h"

#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace pymoe::runtime;
using namespace std::chrono_literals;
using Pool = WorkerPool<SystemSync>;
using Graph = TaskGraph<SystemSync>;

namespace {

// A graph of `layers` x `width` nodes, each of which depends on all of the layer before and writes down its turn.
struct Layers {
  Layers(int layers, int width) : turn(static_cast<size_t>(layers * width)), width(width) {
    for (int i = 0; i < layers * width; ++i) {
      graph.add([this, i] { turn[static_cast<size_t>(i)] = ++turns; });
      for (int before = (i / width - 1) * width; before >= 0 && before < i / width * width; ++before) {
        graph.add_edge(before, i);
      }
    }
  }
  bool in_order() const {
    for (size_t i = static_cast<size_t>(width); i < turn.size(); ++i) {
      const size_t first = (i / static_cast<size_t>(width) - 1) * static_cast<size_t>(width);
      for (size_t before = first; before < first + static_cast<size_t>(width); ++before) {
        if (turn[before] >= turn[i]) return false;
      }
    }
    return true;
  }
  Graph graph;
  std::atomic<int> turns{0};
  std::vector<int> turn;
  int width;
};

}  // namespace

TEST_CASE("nodes run after those that they depend on, in every run of a graph") {
  for (const int workers : {1, 2, 4}) {
    Pool pool(workers);
    Layers layers(6, 5);
    for (int step = 1; step <= 50; ++step) {
      layers.graph.run(pool)->get();
      CHECK(layers.turns == step * 30);
      CHECK(layers.in_order());
    }
  }
}

TEST_CASE("an empty graph ends at once, and so does one without edges after all of its nodes") {
  Pool pool(2);
  Graph graph;
  CHECK(graph.run(pool)->done());
  std::atomic<int> ran{0};
  for (int i = 0; i < 1000; ++i) graph.add([&] { ++ran; });
  const auto run = graph.run(pool);
  CHECK(run->wait_until(SystemSync::now() + 1min));  // without help
  CHECK(run->error() == nullptr);
  CHECK(ran == 1000);
}

TEST_CASE("of the nodes that are ready the greatest head start goes first, then the order in which they were added") {
  Pool pool(1);
  std::latch started(1), released(1);
  const auto blocker = pool.submit([&] {
    started.count_down();
    released.wait();
  });
  started.wait();
  Graph graph;
  std::string order;
  for (const char name : std::string("abcdef")) {
    graph.add([&order, name] { order += name; }, name == 'c' ? 2s : name == 'e' ? 3s : 0s);
  }
  const auto run = graph.run(pool);
  released.count_down();
  CHECK(run->wait_until(SystemSync::now() + 1min));
  CHECK(order == "ecabdf");
}

TEST_CASE("a failure skips what depends on it and nothing else, and the first node's exception comes out") {
  Pool pool(2);
  Graph graph;
  std::atomic<int> ran{0};
  const auto root = graph.add([&] { ++ran; });
  const auto late = graph.add([] { throw std::out_of_range("late in the order"); });
  const auto skipped = graph.add([&] { ran += 100; });
  const auto skipped_too = graph.add([&] { ran += 100; });
  const auto fine = graph.add([&] { ++ran; });
  const auto last = graph.add([] { throw std::runtime_error("last in the order"); });
  graph.add_edge(root, late);
  graph.add_edge(late, skipped);
  graph.add_edge(skipped, skipped_too);
  graph.add_edge(root, skipped_too);
  graph.add_edge(root, fine);
  for (int step = 0; step < 20; ++step) {
    ran = 0;
    const auto run = graph.run(pool);
    CHECK_THROWS_WITH_AS(run->get(), "late in the order", std::out_of_range);
    CHECK(ran == 2);
    REQUIRE(run->failures().size() == 2);
    CHECK(run->failures()[0].node == late);
    CHECK(run->failures()[1].node == last);
    CHECK_THROWS_WITH(std::rethrow_exception(run->failures()[1].error), "last in the order");
  }
}

TEST_CASE("a cycle is refused with its nodes, and nothing has run") {
  Pool pool(1);
  Graph graph;
  int ran = 0;
  for (int i = 0; i < 5; ++i) graph.add([&] { ++ran; }, 0s, i == 2 ? "backward" : "");
  graph.add_edge(0, 1);
  graph.add_edge(1, 2);
  graph.add_edge(2, 3);
  graph.add_edge(3, 1);
  graph.add_edge(3, 4);
  CHECK_THROWS_WITH_AS(graph.run(pool),
                       "TaskGraph: the edges make a cycle: node 1 -> node 2 (backward) -> node 3 -> node 1",
                       std::invalid_argument);
  CHECK(ran == 0);
  Graph loop;
  loop.add([] {});
  loop.add_edge(0, 0);
  CHECK_THROWS_WITH_AS(loop.run(pool), "TaskGraph: the edges make a cycle: node 0 -> node 0", std::invalid_argument);
}

TEST_CASE("an edge of a node that is not there is refused") {
  Graph graph;
  graph.add([] {});
  CHECK_THROWS_AS(graph.add_edge(0, 1), std::out_of_range);
  CHECK_THROWS_AS(graph.add_edge(-1, 0), std::out_of_range);
  CHECK(graph.size() == 1);
}

TEST_CASE("whoever waits runs nodes, so nodes may wait for other graphs on one worker") {
  Pool pool(1);
  Graph inner, outer;
  std::atomic<int> ran{0};
  for (int i = 0; i < 3; ++i) inner.add([&] { ++ran; });
  inner.add_edge(0, 1);
  std::atomic<bool> on_worker{true};
  outer.add([&] {
    on_worker = pool.on_worker();
    inner.run(pool)->get();
    inner.run(pool)->get();
  });
  const auto run = outer.run(pool);
  CHECK(run->wait_until(SystemSync::now() + 1min));
  CHECK(on_worker);
  CHECK(ran == 6);
}

TEST_CASE("a graph runs on the thread that waits while every worker is busy") {
  Pool pool(1);
  std::latch released(1);
  const auto blocker = pool.submit([&] { released.wait(); });
  while (blocker.wait_for(0s) || pool.older_waits(SystemSync::now())) std::this_thread::yield();
  Layers layers(3, 3);
  layers.graph.run(pool)->get();
  CHECK(layers.in_order());
  released.count_down();
}

TEST_CASE("a wait in slices helps until its time") {
  Pool pool(1);
  Graph graph;
  std::latch started(1), released(1);
  graph.add([&] {
    started.count_down();
    released.wait();
  });
  const auto run = graph.run(pool);
  started.wait();  // on the worker: else the helper below would start the node itself, and wait for itself
  CHECK_FALSE(run->help_until(SystemSync::now() + 1ms));
  released.count_down();
  CHECK(run->help_until(SystemSync::now() + 1min));
  CHECK(run->done());
}

TEST_CASE("a cancelled run ends with Cancelled once what runs has ended") {
  Pool pool(2);
  Graph graph;
  std::latch started(1), released(1);
  std::atomic<int> ran{0};
  const auto first = graph.add([&] {
    started.count_down();
    released.wait();
    ++ran;
  });
  graph.add_edge(first, graph.add([&] { ran += 100; }));
  const auto run = graph.run(pool);
  started.wait();
  run->cancel();
  CHECK_FALSE(run->done());
  released.count_down();
  CHECK_THROWS_AS(run->get(), Cancelled);
  CHECK(ran == 1);
  run->cancel();  // has ended: nothing to do
}

TEST_CASE("a stop of the pool: a drain ends the run, a cancel skips what has not started, and a later run is refused") {
  for (const Stop how : {Stop::kDrain, Stop::kCancel}) {
    Pool pool(1);
    std::latch started(1), released(1);
    Graph other;
    int ran = 0;
    for (int i = 0; i < 4; ++i) {
      other.add([&] { ++ran; });
      if (i > 0) other.add_edge(i - 1, i);
    }
    const auto blocker = pool.submit([&] {
      started.count_down();
      released.wait();
    });
    started.wait();
    const auto run = other.run(pool);
    pool.request_stop(how);
    released.count_down();
    pool.stop();
    CHECK(run->done());
    CHECK(ran == (how == Stop::kDrain ? 4 : 0));
    if (how == Stop::kCancel) CHECK_THROWS_AS(run->get(), Cancelled);
    CHECK_THROWS_AS(other.run(pool), StoppedError);
  }
}

TEST_CASE("a graph may change, and be run again, while a run of it goes on") {
  Pool pool(2);
  std::latch started(1), released(1);
  std::atomic<int> ran{0};
  Graph graph;
  graph.add([&] {
    if (ran++ > 0) return;
    started.count_down();
    released.wait();
  });
  const auto first = graph.run(pool);
  started.wait();
  graph.add_edge(0, graph.add([&] { ran += 10; }));
  graph.run(pool)->get();
  CHECK(ran == 12);
  CHECK_FALSE(first->done());
  released.count_down();
  first->get();
  CHECK(ran == 12);
}

TEST_CASE("a run outlives its graph") {
  Pool pool(1);
  std::atomic<int> ran{0};
  std::shared_ptr<Graph::Run> run;
  {
    Graph graph;
    for (int i = 0; i < 100; ++i) graph.add([&] { ++ran; });
    run = graph.run(pool);
  }
  run->get();
  CHECK(ran == 100);
}

TEST_CASE("an older job goes before the rest of a graph") {
  Pool pool(1);
  Graph graph;
  std::string order;
  struct Older final : Job {
    explicit Older(std::string& order) : order(order) {}
    void run() noexcept override { order += 'o'; }
    std::string& order;
  };
  graph.add([&] {
    order += 'a';
    pool.post(std::make_shared<Older>(order), SystemSync::now() - 1h);
  });
  graph.add([&] { order += 'b'; });
  graph.add_edge(0, 1);
  CHECK(graph.run(pool)->wait_until(SystemSync::now() + 1min));
  pool.stop();
  CHECK(order == "aob");
}

TEST_CASE("many graphs at once on one pool") {
  Pool pool(4);
  std::latch start(4);
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&] {
      Layers layers(4, 4);
      start.arrive_and_wait();
      for (int step = 0; step < 500; ++step) {
        layers.graph.run(pool)->get();
        wrong += !layers.in_order();
      }
      wrong += layers.turns != 500 * 16;
    });
  }
  for (auto& client : clients) client.join();
  CHECK(wrong == 0);
}

TEST_CASE("with patience short nodes stay on the thread that waits, and a long one brings the workers") {
  Pool pool(2);
  Graph graph;
  std::atomic<bool> released{false};
  std::atomic<int> elsewhere{0};
  const auto self = std::this_thread::get_id();
  for (int i = 0; i < 100; ++i) graph.add([&] { elsewhere += std::this_thread::get_id() != self; });
  graph.run(pool, 1min)->get();
  CHECK(elsewhere == 0);

  // Only another thread can end the first of these.
  graph = Graph();
  graph.add([&] {
    while (!released) std::this_thread::yield();
  });
  graph.add([&] { released = true; });
  graph.run(pool, 1ms)->get();
  CHECK(released);
}

TEST_CASE("with patience a run goes on though nobody waits, and a wait in slices is no wait for all") {
  Pool pool(1);
  Graph graph;
  std::atomic<bool> released{true};
  std::atomic<int> ran{0};
  graph.add([&] {
    while (!released) std::this_thread::yield();
  });
  for (int i = 0; i < 10; ++i) graph.add([&] { ++ran; });
  const auto alone = graph.run(pool, 1ms);
  while (!alone->done()) std::this_thread::yield();
  CHECK(ran == 10);
  // The first node holds the worker up, so the run cannot have ended when the wait does.
  released = false;
  const auto sliced = graph.run(pool, 1min);
  CHECK_FALSE(sliced->help_until(SystemSync::now() - 1ms));  // it is late: from now on workers do it
  released = true;
  while (!sliced->done()) std::this_thread::yield();
  CHECK(ran == 20);
}

TEST_CASE("a stop of the pool leaves a run with patience to who waits for it") {
  for (const Stop how : {Stop::kDrain, Stop::kCancel}) {
    Pool pool(1);
    Graph graph;
    int ran = 0;
    for (int i = 0; i < 3; ++i) graph.add([&] { ++ran; });
    const auto run = graph.run(pool, 1min);
    pool.stop(how);
    run->get();
    CHECK(ran == 3);
  }
}
