"""Runs every schedule of pymoe in one process, with one thread per worker."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.pipeline.systems import VIRTUAL_STAGES, InProcess, System
from benchmarks.pipeline.work import LOSS, Case
from pymoe import build_info
from pymoe.pipe import Pipe, schedules
from pymoe.pipe.schedules import Schedule


def open_pipe(name: str, case: Case) -> InProcess:
    """Return a ``Pipe`` that takes steps under the schedule ``name``, with as many workers as the case has."""
    per_worker = VIRTUAL_STAGES if "virtual_stages" in schedules.options(name) else 1
    return open_plan(schedules.build(name, case.stages_of(per_worker), case.micro_batches), case)


def open_plan(plan: Schedule, case: Case) -> InProcess:
    """Return a ``Pipe`` that takes steps under ``plan``."""
    stages = case.stages(plan.stages)
    pipe = Pipe(nn.Sequential(*stages), chunks=case.micro_batches, checkpoint="never")
    return InProcess(
        case,
        stages,
        lambda x, y: pipe.step(x, target=y, loss_fn=LOSS, schedule=plan),
        plan,
        lambda: pipe.last_run,
    )


def pymoe_systems() -> list[System]:
    """Return a system for every registered schedule."""
    return [
        System(
            f"pymoe {name}",
            f"`Pipe(checkpoint='never').step(schedule='{name}')`, in one process",
            partial(open_pipe, name),
            lambda: str(build_info()["pymoe"]),
        )
        for name in schedules.names()
    ]
