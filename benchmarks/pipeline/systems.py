"""The systems that run a step of the work: the sequential run, pymoe, and the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.pipeline.live import watched
from benchmarks.pipeline.work import LOSS, Case, gradients, largest_error, reference, sequential, time_of
from pymoe.pipe import schedules
from pymoe.pipe.schedules import Record, Schedule

SEQUENTIAL, TORCHGPIPE = "sequential", "torchgpipe"
VIRTUAL_STAGES = 2
"""Stages per worker, for schedules that place several on each."""


class AbsentError(Exception):
    """Raised when a peer is not installed or does not support a case."""


@dataclass(frozen=True)
class Check:
    """The results of a step that was run before any timing."""

    error: float
    """The largest relative error of a parameter's gradient, compared with the sequential run."""
    live: list[int]
    """For every stage of a sequential model, the most micro-batches whose saved tensors were alive at once."""


class Running(Protocol):
    """A system that has been set up for a case."""

    planned: Schedule | None
    """The planned actions of its workers, if the system has such a plan."""

    def check(self) -> Check:
        """Run a step without timing it, and check its results."""

    def step(self) -> tuple[float, float]:
        """Run a step; return its wall seconds and the processor seconds of all threads (nan if the system cannot
        tell).
        """

    def close(self) -> None:
        """Release what the system holds."""


@dataclass(frozen=True)
class System:
    """A named implementation that can run steps."""

    name: str
    about: str
    open: Callable[[Case], Running]
    version: Callable[[], str] = lambda: torch.__version__


class InProcess:
    """Runs ``step(inputs, targets)`` in this process; it must leave gradients in the stages' parameters."""

    def __init__(
        self,
        case: Case,
        stages: Sequence[nn.Module],
        step: Callable[[Tensor, Tensor], object],
        planned: Schedule | None = None,
        record: Callable[[], Record] | None = None,
    ) -> None:
        self.case, self.stages, self.planned = case, stages, planned
        self.x, self.y = case.batch()
        self.record = record
        """Returns the record of the last step's actions; None if the system keeps none."""
        self._step: Callable[[Tensor, Tensor], object] | None = step

    def run(self) -> None:
        assert self._step is not None, "closed"
        self._step(self.x, self.y)

    def clear(self) -> None:
        for stage in self.stages:
            for parameter in stage.parameters():
                parameter.grad = None

    def check(self) -> Check:
        with watched([stage for stage in self.stages if isinstance(stage, nn.Sequential)]) as counters:
            self.clear()
            self.run()
        found = {name: grad for stage in self.stages for name, grad in gradients(stage).items()}
        return Check(largest_error(found, reference(self.case)), [live.peak for live in counters])

    def step(self) -> tuple[float, float]:
        return time_of(self.clear, self.run, self.case.repeats)

    def close(self) -> None:
        self._step = self.record = None


def open_sequential(case: Case) -> InProcess:
    """Return the sequential run, to which speed-ups are relative."""
    stages = case.stages(case.workers)
    model = nn.Sequential(*(layer for stage in stages for layer in stage))
    return InProcess(case, stages, lambda x, y: sequential(case, model, x, y))


def open_torchgpipe(case: Case) -> InProcess:
    """Return torchgpipe's pipe, with the CPU as the device of every stage."""
    try:
        from torchgpipe import GPipe
    except ImportError as error:
        raise AbsentError(f"not installed ({error}): pip install -e '.[peers]'") from error
    stages = case.stages(case.workers)
    balance = [len(stage) for stage in stages]
    model = nn.Sequential(*(layer for stage in stages for layer in stage))
    pipe = GPipe(model, balance, devices=["cpu"] * len(stages), chunks=case.micro_batches, checkpoint="never")
    # With equally large micro-batches, the mean over all rows is the mean of the micro-batches' means.
    plan = schedules.build("gpipe", case.workers, case.micro_batches)
    return InProcess(case, stages, lambda x, y: LOSS(pipe(x), y).backward(), plan)


def in_process() -> list[System]:
    """Return the systems of this process, the sequential run first."""
    return [
        System(SEQUENTIAL, "forward and backward of one micro-batch after the other", open_sequential),
        System(
            TORCHGPIPE,
            "`GPipe(checkpoint='never', devices=['cpu', ...])` and `loss.backward()`, in one process",
            open_torchgpipe,
            lambda: metadata.version("torchgpipe"),
        ),
    ]
