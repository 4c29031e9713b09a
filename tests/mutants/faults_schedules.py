"""Faults planted in the runtime's headers, which the seeded schedules must notice."""

from __future__ import annotations

from planting import ScheduleFault as Fault

COMPLETION = "csrc/runtime/completion.h"
WORKER_POOL = "csrc/runtime/worker_pool.h"
PARALLEL_FOR = "csrc/runtime/parallel_for.h"
REQUEST_QUEUE = "csrc/runtime/request_queue.h"
STRAND = "csrc/runtime/strand.h"
TASK_POOL = "csrc/runtime/task_pool.h"
EXECUTOR = "csrc/runtime/executor.h"

FAULTS = [
    Fault(
        "a claim is not exclusive",
        COMPLETION,
        "return stage_.compare_exchange_strong(expected, Stage::kRunning, std::memory_order_acq_rel);",
        "if (stage_.load() != expected) return false;\n    Sync::preempt();\n"
        "    stage_.store(Stage::kRunning);\n    return true;",
        "workers",
        "claimed by many",
    ),
    Fault(
        "whoever waits for a task looks once: `if` for `while`",
        COMPLETION,
        "while (!done())",
        "if (!done())",
        "workers",
        "nest and post",
    ),
    Fault(
        "whoever waits for a task does not look under the lock",
        COMPLETION,
        "      stage_.store(Stage::kDone, std::memory_order_release);\n      wakers.swap(wakers_);\n"
        "      callbacks.swap(callbacks_);\n    }\n",
        "      wakers.swap(wakers_);\n      callbacks.swap(callbacks_);\n    }\n"
        "    stage_.store(Stage::kDone, std::memory_order_release);\n",
        "workers",
    ),
    Fault(
        "a worker that wakes for nothing believes that it was called",
        WORKER_POOL,
        "          self.wake.wait(lock);\n        } else",
        "          self.wake.wait(lock);\n          self.called = true;\n        } else",
        "workers",
        "very time",
    ),
    Fault(
        "a post does not call the worker who waits for a time",
        WORKER_POOL,
        "      if (called == nullptr) called = call_timekeeper();\n",
        "",
        "workers",
        "very time",
    ),
    Fault(
        "a post for an earlier time does not call the worker who waits for a later one",
        WORKER_POOL,
        "if (first) called = timekeeper_ != nullptr ? call_timekeeper() : call_idle();",
        "if (first && timekeeper_ == nullptr) called = call_idle();",
        "workers",
        "very time",
    ),
    Fault(
        "nobody waits for the next time when who did has a job",
        WORKER_POOL,
        "          successor = call_idle();\n          if (successor == nullptr) call_watcher();\n",
        "",
        "workers",
        "very time",
    ),
    Fault(
        "a pool that stops drops its tail",
        WORKER_POOL,
        "for (release_due(); ready_.empty(); release_due()) {",
        "for (release_due(); ready_.empty() || stopping_; release_due()) {",
        "workers",
        "a drain",
    ),
    Fault(
        "jobs whose time has not come are forgotten by a stop",
        WORKER_POOL,
        "while (!timed_.empty()) dropped.push_back(pop(timed_));",
        "while (!timed_.empty()) pop(timed_);",
        "workers",
    ),
    Fault(
        "two threads make the same call",
        PARALLEL_FOR,
        "      const int call = next_++;\n      call_workers(lock);\n      lock.unlock();\n",
        "      lock.unlock();\n      const int call = next_;\n      Sync::preempt();\n      ++next_;\n",
        "parallel_for",
    ),
    Fault(
        "a run ends when its last call has started",
        PARALLEL_FOR,
        "if (running_ > 0)",
        "if (next_ < count_ || this->done())",
        "parallel_for",
    ),
    Fault(
        "the exception of the last call comes out",
        PARALLEL_FOR,
        "return a.first < b.first;",
        "return a.first > b.first;",
        "parallel_for",
    ),
    Fault(
        "a cancelled run looks like one whose calls were all made",
        PARALLEL_FOR,
        "    cancelled_ = true;\n",
        "",
        "parallel_for",
    ),
    Fault(
        "a stop of the pool drops the workers of a run, and not the run",
        PARALLEL_FOR,
        "        --owner.tickets_;\n      }\n      owner.cancel();\n",
        "        --owner.tickets_;\n      }\n",
        "parallel_for",
        "cancelled",
    ),
    Fault(
        "nobody calls workers for a run whose calls nobody makes",
        PARALLEL_FOR,
        "        if (owner.watch_later()) return;\n        lock.lock();\n      }\n      owner.let_go(lock);\n",
        "        if (owner.watch_later()) return;\n        lock.lock();\n      }\n",
        "parallel_for",
    ),
    Fault(
        "a thread that stops helping leaves calls to nobody",
        PARALLEL_FOR,
        "if (next_ == count_ || tickets_ > 0) return;",
        "return;",
        "parallel_for",
        "nobody waits",
    ),
    Fault(
        "a batch is over the limit",
        REQUEST_QUEUE,
        "int64_t room = options_.max_batch_size;",
        "int64_t room = options_.max_batch_size + 1;",
        "batching",
    ),
    Fault(
        "a deadline is looked at by the timer alone",
        STRAND,
        "if (queue->next_deadline() <= start) {",
        "if (false) {",
        "batching",
        "clients that cancel",
    ),
    Fault(
        "a request that was cancelled runs",
        REQUEST_QUEUE,
        "request.claim()) return false;\n    drop(request);",
        "request.claim()) return false;",
        "batching",
    ),
    Fault(
        "the rest of a request that was given up runs",
        REQUEST_QUEUE,
        "if (ends_now) --running_;\n    drop(request);",
        "if (ends_now) --running_;",
        "batching",
    ),
    Fault(
        "a batch that was put back has lost its rows",
        REQUEST_QUEUE,
        "      request->next_row_ = begin;\n",
        "",
        "batching",
    ),
    Fault(
        "a strand is not exclusive",
        STRAND,
        "if (running_ || !workers_) return false;",
        "if (!workers_) return false;",
        "batching",
    ),
    Fault(
        "a worker that waits for a request does not look for the batch that becomes ready",
        STRAND,
        "workers_ ? std::min(until, ready_at()) : until",
        "until",
        "batching",
        "ask another",
    ),
    Fault(
        "the last references go under the lock",
        STRAND,
        "void run_taken(Taken taken) {",
        "void run_taken(const Taken& taken) {",
        "batching",
        "go in the middle",
    ),
    Fault(
        "a strand is posted once",
        STRAND,
        "    posted_ = false;\n    if (armed_",
        "    if (armed_",
        "batching",
    ),
    Fault(
        "the second half of a batch that failed is not run again",
        STRAND,
        "    execute(pool, batch.subspan(half), outcomes.subspan(half));\n",
        "",
        "batching",
        "that wait",
    ),
    Fault(
        "after one deadline the timer is not set again",
        STRAND,
        "      armed_deadline_ = kNever;\n      pools = owners();",
        "      pools = owners();",
        "batching",
        "clients that cancel",
    ),
    Fault(
        "who waits for room is not told of it",
        TASK_POOL,
        "    if (waiting_for_room_ > 0) room_.notify_all();\n",
        "",
        "batching",
    ),
    Fault(
        "a pool that goes forgets the request of which a part has run",
        TASK_POOL,
        "clear(left, true);",
        "clear(left);",
        "batching",
        "go in the middle",
    ),
    Fault(
        "the workers stop before the strands have ended",
        EXECUTOR,
        "if (!wait_released_until(strand, until)) return false;",
        "wait_released_until(strand, Sync::now());",
        "batching",
    ),
]
