"""The time that a schedule would take, from the times of its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from pymoe.pipe.schedules.record import Record, Span
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule
from pymoe.pipe.schedules.validate import run

Duration = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """The duration of every action: a number, or a sequence with one number for every stage."""

    forward: Duration = 1.0
    backward_input: Duration = 1.0
    backward_weight: Duration = 1.0
    backward: Duration | None = None
    """Of a backward done at once; None: that of its two parts together."""

    def __post_init__(self) -> None:
        """Raises ValueError for a time below 0."""
        for field in fields(self):
            given = getattr(self, field.name)
            for duration in given if isinstance(given, Sequence) else (0.0 if given is None else given,):
                if not duration >= 0:
                    raise ValueError(f"{field.name} must take 0 or longer, got {duration}")

    def __call__(self, action: Action) -> float:
        """Return the duration of ``action``."""
        stage, _, kind = action
        if kind is Kind.BACKWARD and self.backward is None:
            return _of(self.backward_input, stage) + _of(self.backward_weight, stage)
        return _of(getattr(self, kind.name.lower()), stage)


def simulate(schedule: Schedule, times: Callable[[Action], float] | None = None, communication: float = 0.0) -> Record:
    """Return when every action starts and ends if every worker keeps its order and starts actions as soon as it can.

    ``times`` gives an action's duration: :class:`Times` (the default: 1 for forward, backward of inputs and backward of
    weights), or any function of the action. What another worker has to send arrives ``communication`` after its end and
    keeps neither of the two from working. Raises :class:`ScheduleError` if the schedule is not valid, ValueError for a
    time below 0.
    """
    times = Times() if times is None else times
    unit = "forwards of a stage" if times == Times() else ""
    if not communication >= 0:
        raise ValueError(f"communication must take 0 or longer, got {communication}")
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.workers
    spans: list[list[Span]] = [[] for _ in free]
    for worker, action, dependencies in run(schedule):
        start = free[worker]
        for needed in dependencies:
            arrives = ends[needed]
            if schedule.placement[needed.stage] != worker:
                arrives += communication
            start = max(start, arrives)
        duration = times(action)
        if not duration >= 0:
            raise ValueError(f"action {action} must take 0 or longer, got {duration}")
        free[worker] = ends[action] = start + duration
        spans[worker].append(Span(action, start, ends[action]))
    return Record(schedule.name, schedule.placement, tuple(map(tuple, spans)), unit)


def _of(duration: Duration, stage: int) -> float:
    if isinstance(duration, (float, int)):
        return duration
    if stage >= len(duration):
        raise ValueError(f"times for {len(duration)} stages, none for stage {stage}")
    return duration[stage]
