"""Lists the systems that train a captured model.

They are the model alone, pymoe's pipe in one process, and stages of pymoe and of torch in one process per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import pymoe
from benchmarks.pipeline import torch_orders
from benchmarks.pipeline.systems import SEQUENTIAL, Check, InProcess, System
from benchmarks.pipeline.torch_peer import OnRanks, Ranks
from benchmarks.pipeline.traced_work import TracedCase, loss
from benchmarks.pipeline.work import sequential
from pymoe.pipe.schedules import Schedule, build

RANK = "benchmarks.pipeline.traced_rank"
OURS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved-1f1b"}
"""The names of torch's schedules, and of the same schedules in pymoe."""


class There(OnRanks):
    """Runs steps of a captured model in the processes of ``ranks``."""

    def __init__(self, system: str, name: str, case: TracedCase, ranks: Ranks) -> None:
        stages = torch_orders.stages_of(name, case.workers)
        opening = {"open": asdict(case), "system": system, "schedule": name, "stages": stages}
        super().__init__(ranks, f"{system} {name} {case}", opening)
        self.planned = planned(name, case)

    def check(self) -> Check:
        return Check(max(answer["error"] for answer in self._ask("check")), [])


def planned(name: str, case: TracedCase) -> Schedule | None:
    """Return the schedule if the times of its actions are known, as they are for sleeping layers; otherwise None."""
    if case.work != "sleep":
        return None
    return build(OURS[name], torch_orders.stages_of(name, case.workers), case.micro_batches)


def open_alone(case: TracedCase) -> InProcess:
    """Return the sequential run, to which speed-ups are relative."""
    model = case.model()
    return InProcess(case, [model], lambda x, y: sequential(case, model, x, y))


def open_threads(name: str, case: TracedCase) -> InProcess:
    """Return a pipe that runs in this process, with one thread per worker."""
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
    step = lambda x, y: pipe.step(x, target=y, loss_fn=loss, schedule=plan)  # noqa: E731
    return InProcess(case, [model], step, planned(name, case))


def systems(ranks: dict[int, Ranks], schedules: Sequence[str]) -> list[System]:
    """Return all systems, the model alone first.

    ``ranks`` maps a number of workers to its processes; missing entries are added.
    """

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
