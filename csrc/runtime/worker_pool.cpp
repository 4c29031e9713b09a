#include "runtime/worker_pool.h"

#include <string>

namespace pymoe::runtime {
namespace {

thread_local const WorkerPool* current_pool = nullptr;

int checked_workers(int workers) {
  if (workers < 1) {
    throw std::invalid_argument("WorkerPool: workers must be at least 1, got " + std::to_string(workers));
  }
  return workers;
}

}  // namespace

WorkerPool::WorkerPool(int workers, Around around) : workers_(checked_workers(workers)), around_(std::move(around)) {
  threads_.reserve(static_cast<size_t>(workers));
  try {
    for (int i = 0; i < workers; ++i) {
      {
        const std::lock_guard lock(mutex_);
        ++running_;
      }
      try {
        threads_.emplace_back([this] { work(); });
      } catch (...) {
        const std::lock_guard lock(mutex_);
        --running_;
        throw;
      }
    }
  } catch (...) {
    stop(Stop::kCancel);
    throw;
  }
}

WorkerPool::~WorkerPool() { stop(Stop::kDrain); }

void WorkerPool::enqueue(std::shared_ptr<Task> task) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw StoppedError("WorkerPool: submit after the pool was stopped");
    queue_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void WorkerPool::work() {
  current_pool = this;
  const std::function<void()> loop = [this] {
    for (;;) {
      std::shared_ptr<Task> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;  // stopping, and nothing is left
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      task->run();
    }
  };
  if (around_) {
    around_(loop);
  } else {
    loop();
  }
  const std::lock_guard lock(mutex_);
  if (--running_ == 0) ended_.notify_all();
}

void WorkerPool::request_stop(Stop how) {
  std::deque<std::shared_ptr<Task>> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (how == Stop::kCancel) dropped.swap(queue_);
  }
  changed_.notify_all();
  for (const auto& task : dropped) task->cancel();
}

bool WorkerPool::wait_stopped_for(std::chrono::milliseconds duration) {
  refuse_on_worker();
  {
    std::unique_lock lock(mutex_);
    if (!ended_.wait_for(lock, duration, [&] { return running_ == 0; })) return false;
  }
  join();
  return true;
}

void WorkerPool::stop(Stop how) {
  refuse_on_worker();
  request_stop(how);
  join();
}

void WorkerPool::join() {
  const std::lock_guard lock(join_mutex_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool WorkerPool::on_worker() const { return current_pool == this; }

void WorkerPool::refuse_on_worker() const {
  if (on_worker()) throw std::logic_error("WorkerPool: a worker cannot wait for the end of its own pool");
}

}  // namespace pymoe::runtime
