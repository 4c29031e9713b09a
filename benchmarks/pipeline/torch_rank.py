"""Runs one rank of torch's schedules: ``python -m benchmarks.pipeline.torch_rank RANK WORLD FILE``.

It reads requests from standard input and writes answers to standard output, one JSON object per line. ``FILE`` is the
rendezvous file of the process group.
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
"""Time-out of the rendezvous and of every collective."""


class Scheduled:
    """Runs this rank's part of the steps of one of torch's schedules.

    Args:
        case: the case to measure.
        name: the name of torch's schedule.
        parts: torch's ``PipelineStage`` objects of this rank, by stage number.
        count: the number of stages on all ranks.
        loss: the loss function.
        modules: the modules of this rank's stages.
    """

    def __init__(self, case: Any, name: str, parts: dict[int, Any], count: int, loss: Any, modules: list[Any]) -> None:
        self.case, self.own, self.modules = case, list(parts), modules
        self.x, self.y = case.batch()
        schedule = getattr(torch_schedules, name)
        single = issubclass(schedule, torch_schedules.PipelineScheduleSingle)
        stages = list(parts.values())
        self.schedule = schedule(stages[0] if single else stages, case.micro_batches, loss_fn=loss)
        self.inputs = (self.x,) if 0 in parts else ()
        self.target = {"target": self.y} if count - 1 in parts else {}

    def run(self) -> None:
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)

    def clear(self) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None

    def check(self) -> dict[str, Any]:
        """Check the gradients of the second step; the first runs an additional forward to infer shapes."""
        self.run()
        self.clear()
        facts = self.observed_run()
        expected = reference(self.case)
        return {"error": max(largest_error(gradients(module), expected) for module in self.modules)} | facts

    def observed_run(self) -> dict[str, Any]:
        """Run a step, and return further observations by name."""
        self.run()
        return {}

    def step(self) -> dict[str, Any]:
        """Return the times of steps; see :func:`spans_of`."""
        return spans_of(self.clear, self.run, self.case.repeats)


class Pipelined(Scheduled):
    """Runs steps of a sequential model."""

    def __init__(self, case: Case, name: str, stages: int, rank: int, world: int) -> None:
        whole = case.stages(stages)
        own = [i for i in range(stages) if torch_orders.rank_of(name, world, i) == rank]
        parts = {i: pipelining.PipelineStage(whole[i], i, stages, torch.device("cpu")) for i in own}
        super().__init__(case, name, parts, stages, LOSS, [whole[i] for i in own])
        orders = self.schedule.pipeline_order or {}
        self.orders = [torch_orders.actions(orders[i]) for i in sorted(orders)]

    def observed_run(self) -> dict[str, Any]:
        """Run a step; return the peak of live micro-batches of each own stage, and the action order of every rank."""
        with watched(self.modules) as counters:
            self.run()
        return {"live": {i: one.peak for i, one in zip(self.own, counters, strict=True)}, "orders": self.orders}

    def plain(self) -> dict[str, Any]:
        """Return wall and processor seconds of the sequential run of the same stages in this process."""
        model = torch.nn.Sequential(*(layer for stage in self.modules for layer in stage))
        run = partial(sequential, self.case, model, self.x, self.y)
        wall, cpu = time_of(self.clear, run, self.case.repeats)
        return {"wall": wall, "cpu": cpu}


def spans_of(clear: Callable[[], None], run: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Run ``repeats`` steps; return the start and end of each in seconds of a clock that all processes share, and the
    mean processor seconds of a step.
    """
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
    """Answer requests until the input ends.

    ``opened_by(request, rank, world)`` returns the object whose methods later requests call.
    """
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
        gc.freeze()  # later collections skip the imported modules
        gc.disable()
        return answer

    serve(start)


if __name__ == "__main__":
    serve_rank(
        lambda asked, rank, world: Pipelined(Case(**asked["open"]), asked["schedule"], asked["stages"], rank, world)
    )
