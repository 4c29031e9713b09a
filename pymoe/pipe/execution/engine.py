"""What a pipe keeps from one mini-batch to the next: threads, schedules, plans, what is known of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymoe.autograd import random_streams
from pymoe.pipe.execution.checkpoint import Checkpoints
from pymoe.pipe.execution.plan import Plan, Timed
from pymoe.pipe.execution.run import OnOutput, Run
from pymoe.pipe.execution.turns import turns_of
from pymoe.pipe.execution.workers import Workers
from pymoe.pipe.loss import LossFunction, Structure, holds_no_tensors, with_loss
from pymoe.pipe.micro_batches import MicroBatches
from pymoe.pipe.schedules import Kind, Record, Schedule, as_run, build
from pymoe.pipe.stages import Pipeline

__all__ = ["ALL", "BACKWARD", "FORWARD", "Engine"]

ALL, FORWARD, BACKWARD = frozenset(Kind), frozenset({Kind.FORWARD}), frozenset({Kind.BACKWARD})
REMEMBERED = 64  # schedules, and plans made of them


class Engine:
    """Runs schedules on the stages of one model. A copy has threads and plans of its own."""

    def __init__(self) -> None:
        self._workers = Workers()
        self._schedules: dict[tuple[str, int, int], Schedule] = {}
        self._plans: dict[tuple[int, frozenset[Kind]], Plan] = {}
        self._checkpoints: tuple[Pipeline | None, Sequence[Checkpoints]] = None, ()
        self._last: tuple[Schedule, list[Timed]] | None = None
        self._ended: tuple[tuple[Any, ...], Pipeline | None] = (), None

    def run(
        self,
        pipeline: Pipeline,
        micro_batches: MicroBatches,
        *,
        graphs: bool,
        checkpointed: int,
        ended: Pipeline | None = None,
        on_output: OnOutput | None = None,
    ) -> Run:
        """A mini-batch, about to go through a pipeline; or through ``ended``, which is that and goes on to a loss."""
        random_streams.install()
        if self._checkpoints[0] is not pipeline:
            made = [Checkpoints(stage.modules, turns_of(stage.function)) for stage in pipeline.stages]
            self._checkpoints = pipeline, made
        return Run(
            ended or pipeline,
            micro_batches,
            graphs=graphs,
            checkpoints=self._checkpoints[1],
            checkpointed=range(checkpointed),
            on_output=on_output,
        )

    def with_loss(
        self, pipeline: Pipeline, loss_fn: LossFunction | None, has_target: bool, structure: Structure
    ) -> Pipeline:
        """The pipeline, going on to the loss; most training steps have the arguments of the one before."""
        arguments = pipeline, loss_fn, has_target, structure
        known, made = self._ended
        if made is None or known != arguments:
            made = with_loss(*arguments)
            self._ended = (arguments, made) if holds_no_tensors(loss_fn) else ((), None)
        return made

    def schedule(self, schedule: str | Schedule, stages: int, micro_batches: int) -> Schedule:
        """The schedule of that name; or the given one, if it fits.

        Raises:
            ValueError: it does not fit, or there is none of that name.
        """
        if isinstance(schedule, str):
            key = schedule, stages, micro_batches
            if (built := self._schedules.get(key)) is None:
                built = build(schedule, stages, micro_batches)
                _remember(self._schedules, key, built)
            return built
        if (schedule.stages, schedule.micro_batches) != (stages, micro_batches):
            raise ValueError(
                f"Pipe.step: the schedule is for {schedule.stages} stages and {schedule.micro_batches} micro-batches, "
                f"there are {stages} and {micro_batches}"
            )
        return schedule

    def plan(self, schedule: Schedule, kinds: frozenset[Kind]) -> Plan:
        """The actions of these kinds, for the threads."""
        key = id(schedule), kinds
        plan = self._plans.get(key)
        if plan is None or plan.schedule is not schedule:
            plan = Plan(schedule, kinds)
            _remember(self._plans, key, plan)
        return plan

    def perform(self, run: Run, schedule: Schedule, kinds: frozenset[Kind]) -> None:
        """Do the actions of these kinds."""
        # On a thread of autograd's own for a device the stages could not get at that device's nodes.
        here = kinds is BACKWARD and not run.is_on_host
        self._last = schedule, self._workers.run(self.plan(schedule, kinds), run.perform, run.around, here=here)

    def forget(self) -> None:
        """The modules may behave otherwise from now on."""
        for checkpoints in self._checkpoints[1]:
            checkpoints.forget()

    @property
    def last_run(self) -> Record | None:
        """When every action of the last :meth:`perform` started and ended; None before."""
        return None if self._last is None else as_run(*self._last)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_last": None, "_ended": ((), None)}


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to ``known``, and forgets what is oldest."""
    while len(known) >= REMEMBERED:
        known.pop(next(iter(list(known))), None)
    known[key] = value
