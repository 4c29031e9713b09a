// TaskGraph under seeded schedules: order kept, failures contained, everything settled, no deadlock.
#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/task_graph.h"
#include "schedules.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;
using Pool = WorkerPool<Sync>;
using Graph = TaskGraph<Sync>;

namespace {

constexpr size_t kMostNodes = 8;

// A random graph whose nodes check that they run once, after all that they depend on.
class Checked {
 public:
  explicit Checked(bool may_fail) : size_(1 + random_below(kMostNodes)) {
    for (size_t node = 0; node < size_; ++node) {
      fails_[node] = may_fail && random_below(6) == 0;
      graph.add([this, node] { run(node); }, std::chrono::milliseconds(random_below(3)));
      for (size_t before = 0; before < node; ++before) {
        edge_[before][node] = random_below(3) == 0;
        if (edge_[before][node]) graph.add_edge(static_cast<Graph::Node>(before), static_cast<Graph::Node>(node));
      }
    }
  }

  // After a run: whether everything has run that should have, and what came out.
  void check(Graph::Run& run, bool cancelled) {
    expect(run.done(), "a run that was waited for has not ended");
    std::array<bool, kMostNodes> bad{};
    std::string first;
    bool skipped = false;
    for (size_t node = 0; node < size_; ++node) {
      bool skip = false;
      for (size_t before = 0; before < node; ++before) skip |= edge_[before][node] && bad[before];
      expect(!skip || ran_[node] == 0, "a node has run although one that it depends on has not");
      expect(skip || cancelled || ran_[node] == 1, "a node has not run");
      bad[node] = skip || fails_[node] || ran_[node] == 0;
      skipped |= ran_[node] == 0;
      if (ran_[node] == 1 && fails_[node] && first.empty()) first = std::to_string(node);
    }
    try {
      run.get();
      expect(!skipped && first.empty(), "a run that has failed says nothing");
    } catch (const Cancelled&) {
      expect(cancelled && skipped && first.empty(), "a run was cancelled for no reason");
    } catch (const std::runtime_error& error) {
      expect(error.what() == first, "another exception than the first node's comes out");
    }
    for (auto& ran : ran_) ran = 0;
  }

  Graph graph;

 private:
  void run(size_t node) {
    for (size_t before = 0; before < node; ++before) {
      expect(!edge_[before][node] || ran_[before] == 1, "a node runs before one that it depends on");
    }
    expect(locks_held() == 0, "a node runs under a lock");
    Sync::preempt();
    expect(++ran_[node] == 1, "a node runs twice");
    if (random_below(4) == 0) Sync::sleep_for(1ms);
    if (fails_[node]) throw std::runtime_error(std::to_string(node));
  }

  size_t size_;
  std::array<std::array<bool, kMostNodes>, kMostNodes> edge_{};
  std::array<bool, kMostNodes> fails_{};
  std::array<std::atomic<int>, kMostNodes> ran_{};
};

// Waits in one of the ways that there are.
void wait(Graph::Run& run) {
  switch (random_below(3)) {
    case 0: run.wait(); break;
    case 1:
      while (!run.help_until(Sync::now() + 1ms)) {
      }
      break;
    default: static_cast<Completion<Sync>&>(run).wait();  // without help
  }
}

struct Empty final : Job {
  void run() noexcept override { Sync::preempt(); }
};

}  // namespace

TEST_CASE("schedules of a graph: failures, other jobs, run after run") {
  run_schedules(40'000, [](bool) {
    Checked checked(random_below(2) == 0);
    Pool pool(1 + static_cast<int>(random_below(3)));
    Sync::Thread other([&pool] {
      for (int i = 0; i < 3; ++i) {
        pool.post(std::make_shared<Empty>(), Sync::now() - std::chrono::milliseconds(random_below(3)));
      }
    });
    for (uint64_t step = 1 + random_below(2); step > 0; --step) {
      const auto run = checked.graph.run(pool);
      wait(*run);
      checked.check(*run, false);
    }
    other.join();
  });
}

TEST_CASE("schedules of a graph: cancelled by a client or by the pool's stop") {
  run_schedules(40'000, [](bool) {
    Checked checked(random_below(2) == 0);
    Pool pool(1 + static_cast<int>(random_below(3)));
    const auto run = checked.graph.run(pool);
    Sync::Thread client([&] { wait(*run); });
    if (random_below(2) == 0) Sync::sleep_for(1ms);
    const uint64_t how = random_below(3);
    if (how == 0) run->cancel();
    if (how == 1) pool.request_stop(Stop::kCancel);
    if (how == 2) pool.request_stop(Stop::kDrain);
    if (random_below(2) == 0) pool.stop();
    client.join();
    checked.check(*run, how != 2);
  });
}

TEST_CASE("schedules of a graph: nobody waits to the end, and the pool drains") {
  run_schedules(20'000, [](bool) {
    Checked checked(false);
    std::shared_ptr<Graph::Run> run;
    {
      Pool pool(1 + static_cast<int>(random_below(3)));
      run = checked.graph.run(pool);
      Sync::Thread client([&] {
        for (uint64_t i = random_below(3); i > 0; --i) {
          run->help_until(Sync::now() + std::chrono::milliseconds(random_below(2)));
        }
      });
      if (random_below(2) == 0) pool.request_stop(Stop::kDrain);
      client.join();
    }
    checked.check(*run, false);
  });
}

TEST_CASE("schedules of a graph: several clients help one run, and nodes wait for another graph") {
  run_schedules(20'000, [](bool) {
    Checked inner(false), outer(random_below(2) == 0);
    Pool pool(1 + static_cast<int>(random_below(2)));
    outer.graph.add([&] {
      const auto run = inner.graph.run(pool);
      run->get();
      inner.check(*run, false);
    });
    const auto run = outer.graph.run(pool);
    std::vector<Sync::Thread> clients;
    for (int client = 0; client < 2; ++client) clients.emplace_back([&] { wait(*run); });
    for (auto& client : clients) client.join();
    outer.check(*run, false);
  });
}
