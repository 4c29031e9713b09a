"""Faults planted in the runtime's headers, which the seeded schedules must notice. Run by run.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from planted_fault import PlantedFault

COMPLETION = "csrc/runtime/completion.h"
WORKER_POOL = "csrc/runtime/worker_pool.h"
PARALLEL_FOR = "csrc/runtime/parallel_for.h"
CYCLE = "csrc/runtime/cycle.h"
PIPELINE_RUN = "csrc/runtime/pipeline_run.h"
REQUEST_QUEUE = "csrc/runtime/request_queue.h"
STRAND = "csrc/runtime/strand.h"
TASK_POOL = "csrc/runtime/task_pool.h"
EXECUTOR = "csrc/runtime/executor.h"


@dataclass(frozen=True)
class Fault(PlantedFault):
    """What notices it."""

    schedules: str
    """The test file: ``workers`` for test_schedules_workers.cpp."""
    case: str = ""
    """A part of the test case's name; without it, the file's first that notices."""


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
        "while (!done()) ended_.wait(lock);",
        "if (!done()) ended_.wait(lock);",
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
        "        self.wake.wait(lock);\n      } else",
        "        self.wake.wait(lock);\n        self.called = true;\n      } else",
        "workers",
        "very time",
    ),
    Fault(
        "a post does not call the worker who waits for a time",
        WORKER_POOL,
        "    if (called == nullptr) called = call_timekeeper();\n",
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
        "        successor = call_idle();\n        if (successor == nullptr) call_watcher();\n",
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
        "while (!timed_.empty()) dropped.push_back(timed_.pop());",
        "while (!timed_.empty()) timed_.pop();",
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
        "    if (running_ > 0) return;\n    std::exception_ptr error;",
        "    if (next_ < count_ || this->done()) return;\n    std::exception_ptr error;",
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
        REQUEST_QUEUE,
        "    expire(now, expired);\n    Slices batch;",
        "    Slices batch;",
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
        "whoever found only expired requests declares the strand free",
        STRAND,
        "    if (runs) {\n      running_ = false;",
        "    {\n      running_ = false;",
        "batching",
        "clients that cancel",
    ),
    Fault(
        "a worker that waits for a request does not look for the batch that becomes ready",
        STRAND,
        "changed_.wait_until(lock, workers_ ? std::min(until, ready_at()) : until);",
        "changed_.wait_until(lock, until);",
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
    Fault(
        "a node starts before what it depends on has ended",
        PIPELINE_RUN,
        "return before_[index(order[started])] == 0 ? order[started] : kLater;",
        "return order[started];",
        "pipeline",
    ),
    Fault(
        "a worker stays at the node that it has started",
        PIPELINE_RUN,
        "    ++worker.started;\n",
        "",
        "pipeline",
    ),
    Fault(
        "a node is ready when the first before it has ended",
        PIPELINE_RUN,
        "if (--before_[index(after)] > 0) continue;",
        "before_[index(after)] = 0;",
        "pipeline",
    ),
    Fault(
        "a worker is not told that its next node is ready",
        PIPELINE_RUN,
        "      worker.to_wake.push_back(number);\n",
        "",
        "pipeline",
    ),
    Fault(
        "only the first worker whose next node an end made ready is told",
        PIPELINE_RUN,
        "      worker.to_wake.push_back(number);\n",
        "      if (worker.to_wake.empty()) worker.to_wake.push_back(number);\n",
        "pipeline",
    ),
    Fault(
        "a worker that has woken for nothing is not woken again",
        PIPELINE_RUN,
        "    for (bool in_time = true; node == kLater && in_time; node = answer(number)) {\n"
        "      worker.waits = true;\n",
        "    worker.waits = node == kLater;\n"
        "    for (bool in_time = true; node == kLater && in_time; node = answer(number)) {\n",
        "pipeline",
    ),
    Fault(
        "whoever waits does not look before",
        PIPELINE_RUN,
        "    Lock lock(mutex_);\n    Node node = answer(number);",
        "    Lock lock(mutex_);\n    Node node = kLater;",
        "pipeline",
    ),
    Fault(
        "a worker whose thread has left is never free",
        PIPELINE_RUN,
        "    workers_[index(number)].asked = false;\n",
        "",
        "pipeline",
    ),
    Fault(
        "a cancel is not told to who waits",
        PIPELINE_RUN,
        "    for (Worker& worker : workers_) worker.changed.notify_one();\n",
        "",
        "pipeline",
        "cancelled",
    ),
    Fault(
        "a run is cancelled without its lock",
        PIPELINE_RUN,
        "      const Lock lock(mutex_);\n      cancelled_ = true;\n",
        "      cancelled_ = true;\n",
        "pipeline",
        "cancelled",
    ),
    Fault(
        "a cancelled run starts nodes",
        PIPELINE_RUN,
        "const Node node = cancelled_ ? kNone : front(number);",
        "const Node node = front(number);",
        "pipeline",
        "cancelled",
    ),
    Fault(
        "what ends in a cancelled run is forgotten",
        PIPELINE_RUN,
        "      if (finished) end(worker);\n",
        "      if (finished && !cancelled_) end(worker);\n",
        "pipeline",
        "cancelled",
    ),
    Fault(
        "the orders of the workers are not part of a cycle",
        PIPELINE_RUN,
        "    refuse_cycle(orders_);\n",
        "    refuse_cycle({});\n",
        "pipeline",
        "whatever edges",
    ),
    Fault(
        "a cycle is not found if a node is free",
        CYCLE,
        "if (free.size() == index(size)) return {};",
        "if (!free.empty()) return {};",
        "pipeline",
        "whatever edges",
    ),
]
