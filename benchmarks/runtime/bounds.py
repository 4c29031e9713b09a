"""Measures the bound on every batching system: direct calls of the expert, without clients, queues or threads."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.runtime.clients import Effort, Sample
from benchmarks.runtime.scenario import Cell, Expert, call, is_right, prepared


class Direct:
    """Calls the expert in a plain loop, once for each request or, with ``ready_batch``, once for one request of every
    client.

    A ready batch is concatenated beforehand and its output is not split, so the costs of batching are left out.
    """

    def __init__(self, expert: Expert, ready_batch: bool) -> None:
        self.expert, self.ready_batch = expert, ready_batch

    def measure(self, cell: Cell, effort: Effort) -> Sample:
        asked, expected = prepared(cell)
        if self.ready_batch:
            calls = [tuple(torch.cat(column) for column in zip(*one, strict=True)) for one in zip(*asked, strict=True)]
            right = [torch.cat(one) for one in zip(*expected, strict=True)]
        else:
            calls = [request for client in asked for request in client]
            right = [answer for client in expected for answer in client]
        wrong = sum(not is_right(call(self.expert, calls[i]), right[i]) for i in range(min(2, len(calls))))
        took, cpu = [], -time.process_time()
        begin = last = time.perf_counter()
        while len(took) < effort.cycles or last - begin < effort.seconds:
            call(self.expert, calls[len(took) % len(calls)])
            now = time.perf_counter()
            took.append(now - last)
            last = now
        cpu += time.process_time()
        each = cell.clients if self.ready_batch else 1
        took.sort()
        return Sample(
            rate=each * len(took) / (last - begin),
            p50=statistics.median(took),
            p99=took[min(len(took) - 1, int(0.99 * len(took)))],
            cpu=cpu / (each * len(took)),
            requests=each * len(took),
            wrong=wrong,
        )

    def close(self) -> None:
        """Do nothing: nothing was started."""
