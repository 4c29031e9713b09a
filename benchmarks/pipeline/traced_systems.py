"""Who trains a captured model: the model alone, pymoe in one process, and stages in processes, ours and torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pymoe
from benchmarks.pipeline import torch_orders
from benchmarks.pipeline.systems import SEQUENTIAL, Check, System
from benchmarks.pipeline.torch_peer import OnRanks, Ranks
from benchmarks.pipeline.traced_work import TracedCase, gradients, largest_error, loss, reference, sequential
from benchmarks.pipeline.work import time_of
from pymoe.pipe.schedules import Schedule, build

RANK = "benchmarks.pipeline.traced_rank"
OURS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved-1f1b"}
"""torch's schedules, and what the same is called in pymoe."""


class Here:
    """Steps in this process."""

    def __init__(self, case: TracedCase, model: nn.Module, step: Callable[[Tensor, Tensor], object]) -> None:
        self.case, self.model = case, model
        self.x, self.y = case.batch()
        self.planned: Schedule | None = None
        self._step: Callable[[Tensor, Tensor], object] | None = step

    def run(self) -> None:
        assert self._step is not None, "closed"
        self._step(self.x, self.y)

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def check(self) -> Check:
        self.clear()
        self.run()
        return Check(largest_error(gradients(self.model), reference(self.case)), [])

    def step(self) -> tuple[float, float]:
        return time_of(self.clear, self.run, self.case.repeats)

    def close(self) -> None:
        self._step = None


class There(OnRanks):
    """Steps in the processes of ``ranks``."""

    def __init__(self, system: str, name: str, case: TracedCase, ranks: Ranks) -> None:
        stages = torch_orders.stages_of(name, case.workers)
        opening = {"open": asdict(case), "system": system, "schedule": name, "stages": stages}
        super().__init__(ranks, f"{system} {name} {case}", opening)
        self.planned = planned(name, case)

    def check(self) -> Check:
        return Check(max(answer["error"] for answer in self._ask("check")), [])


def planned(name: str, case: TracedCase) -> Schedule | None:
    """The schedule where its ideal is known: times of sleeping layers are."""
    if case.work != "sleep":
        return None
    return build(OURS[name], torch_orders.stages_of(name, case.workers), case.micro_batches)


def open_alone(case: TracedCase) -> Here:
    """The bound that speed-ups are taken over."""
    model = case.model()
    return Here(case, model, lambda x, y: sequential(case, model, x, y))


def open_threads(name: str, case: TracedCase) -> Here:
    """A pipe in this process."""
    model = case.model()
    count = torch_orders.stages_of(name, case.workers)
    x, _ = case.batch()
    spec: dict[str, Any] = dict.fromkeys(case.beginnings(count), pymoe.SplitPoint.BEGINNING)
    pipe = pymoe.pipeline(
        model,
        (x[: len(x) // case.micro_batches],),
        split_spec=spec,
        chunks=case.micro_batches,
        checkpoint="never",
    )
    plan = build(OURS[name], count, case.micro_batches)
    running = Here(case, model, lambda x, y: pipe.step(x, target=y, loss_fn=loss, schedule=plan))
    running.planned = planned(name, case)
    return running


def systems(ranks: dict[int, Ranks], schedules: Sequence[str]) -> list[System]:
    """The model alone first; ``ranks`` gets the processes for each number of workers."""

    def there(system: str, name: str, case: TracedCase) -> There:
        of_size = ranks.setdefault(case.workers, Ranks(case.workers, (sys.executable, "-m", RANK)))
        return There(system, name, case, of_size)

    found = [System(SEQUENTIAL, "the model alone, one micro-batch after the other, in one process", open_alone)]
    version = partial(str, pymoe.build_info()["pymoe"])
    for name in schedules:
        title = name.removeprefix("Schedule")
        found += [
            System(
                f"pymoe {title}, threads",
                f"`pymoe.pipeline(...).step(schedule='{OURS[name]}')`, in one process",
                partial(open_threads, name),
                version,
            ),
            System(
                f"pymoe {title}, processes",
                f"`pymoe.pipeline(...).build_stage(...)` under `{name}`, a process a rank, over gloo",
                partial(there, "pymoe", name),
                version,
            ),
            System(
                f"torch {title}, processes",
                f"`torch.distributed.pipelining.pipeline(...).build_stage(...)` under `{name}`, likewise",
                partial(there, "torch", name),
                lambda: torch.__version__,
            ),
        ]
    return found
