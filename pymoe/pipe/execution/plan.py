"""A schedule, made ready to be run."""

from __future__ import annotations

from pymoe._runtime import PipelinePlan, PipelineRun
from pymoe.pipe.execution.worth import Worth
from pymoe.pipe.schedules.action import Action, Kind
from pymoe.pipe.schedules.schedule import Schedule
from pymoe.pipe.schedules.validate import run as in_order

__all__ = ["Plan", "Timed"]

Timed = tuple[Action, float, float]
"""An action, and when it started and ended: in seconds, by ``time.perf_counter``."""


class Plan:
    """The actions of a schedule as nodes of a native plan."""

    def __init__(self, schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind)) -> None:
        """``kinds``: the actions to run; what others would have made is there already.

        Raises:
            ScheduleError: the schedule is not valid.
        """
        self.schedule = schedule
        self.workers = schedule.workers
        self.worth = Worth()
        self.actions: list[Action] = []  # by node
        self._nodes = PipelinePlan(schedule.workers)
        numbers: dict[Action, int] = {}
        for worker, order in enumerate(schedule.orders):
            for action in order:
                if action.kind in kinds:
                    numbers[action] = self._nodes.add(worker)
                    self.actions.append(action)
        self.in_order: list[Action] = []  # an order for one thread
        for _, action, dependencies in in_order(schedule):
            if action in numbers:
                self.in_order.append(action)
                for needed in dependencies:
                    if needed in numbers:
                        self._nodes.add_edge(numbers[needed], numbers[action])

    def run(self) -> PipelineRun:
        """A run of it, for the threads of its workers to ask."""
        return self._nodes.run()
