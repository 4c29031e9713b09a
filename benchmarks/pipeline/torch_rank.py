"""One rank of torch's schedules: ``python -m benchmarks.pipeline.torch_rank RANK WORLD FILE``.

It is asked on standard input and answers on standard output, one JSON object a line. ``FILE`` is where the ranks meet.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from benchmarks.common.children import serve
from benchmarks.pipeline import torch_orders
from benchmarks.pipeline.live import watched
from benchmarks.pipeline.work import LOSS, Case, gradients, largest_error, reference, sequential, time_of

RENDEZVOUS_LIMIT = timedelta(seconds=300)
"""A rank that waits longer for another gives up."""


class Pipelined:
    """A schedule's steps, as this rank runs them."""

    def __init__(self, case: Case, name: str, stages: int, rank: int, world: int) -> None:
        self.case, self.rank = case, rank
        self.x, self.y = case.batch()
        self.count = stages
        self.own = [i for i in range(stages) if torch_orders.rank_of(name, world, i) == rank]
        whole = case.stages(stages)
        self.stages = [whole[i] for i in self.own]
        self.cpu = torch.device("cpu")
        parts = [
            pipelining.PipelineStage(one, i, stages, self.cpu) for i, one in zip(self.own, self.stages, strict=True)
        ]
        schedule = getattr(torch_schedules, name)
        single = issubclass(schedule, torch_schedules.PipelineScheduleSingle)
        self.schedule = schedule(parts[0] if single else parts, case.micro_batches, loss_fn=LOSS)
        self.inputs = (self.x,) if 0 in self.own else ()
        self.target = {"target": self.y} if stages - 1 in self.own else {}
        orders = self.schedule.pipeline_order or {}
        self.orders = [torch_orders.actions(orders[i]) for i in sorted(orders)]

    def run(self) -> None:
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)

    def clear(self) -> None:
        for stage in self.stages:
            for parameter in stage.parameters():
                parameter.grad = None

    def check(self) -> dict[str, Any]:
        """Check the second step: the first runs an additional forward to learn shapes."""
        self.run()
        self.clear()
        with watched(self.stages) as counters:
            self.run()
        expected = reference(self.case)
        errors = [largest_error(gradients(stage), expected) for stage in self.stages]
        live = {i: counter.peak for i, counter in zip(self.own, counters, strict=True)}
        return {"error": max(errors), "live": live, "orders": self.orders}

    def step(self) -> dict[str, Any]:
        """Return what :func:`spans_of` does."""
        return spans_of(self.clear, self.run, self.case.repeats)

    def plain(self) -> dict[str, Any]:
        """Time the sequential run of the same stages in this process: processor and other seconds."""
        model = torch.nn.Sequential(*(layer for stage in self.stages for layer in stage))
        run = partial(sequential, self.case, model, self.x, self.y)
        wall, cpu = time_of(self.clear, run, self.case.repeats)
        return {"wall": wall, "cpu": cpu}


def spans_of(clear: Callable[[], None], run: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Start and end of steps on the clock that all processes share, and processor seconds of one."""
    gc.collect()
    spans = []
    cpu = 0.0
    for _ in range(repeats):
        clear()
        dist.barrier()
        cpu -= time.process_time()
        start = time.perf_counter()
        run()
        spans.append((start, time.perf_counter()))
        cpu += time.process_time()
    return {"spans": spans, "cpu": cpu / repeats}


def serve_rank(opened_by: Callable[[dict[str, Any], int, int], Any]) -> None:
    """Answer until the input ends; ``opened_by`` makes what is asked of a request, the rank, and their number."""
    rank, world, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    opened: dict[str, Any] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        key = request["key"]
        if "open" in request:
            opened[key] = opened_by(request, rank, world)
        elif "close" in request:
            opened.pop(key, None)
        else:
            return getattr(opened[key], request["do"])()
        return {}

    def start() -> Callable[[dict[str, Any]], dict[str, Any]]:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        dist.init_process_group("gloo", f"file://{file}", timeout=RENDEZVOUS_LIMIT, rank=rank, world_size=world)
        gc.freeze()  # what has been imported is not looked at again
        gc.disable()
        return answer

    serve(start)


if __name__ == "__main__":
    serve_rank(
        lambda asked, rank, world: Pipelined(Case(**asked["open"]), asked["schedule"], asked["stages"], rank, world)
    )
