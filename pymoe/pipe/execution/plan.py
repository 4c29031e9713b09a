"""A schedule, made ready to be run."""

from __future__ import annotations

from pymoe._runtime import LanePlan, LaneRun
from pymoe.pipe.execution.worth import Worth
from pymoe.pipe.schedules.action import Action, Kind
from pymoe.pipe.schedules.schedule import Schedule
from pymoe.pipe.schedules.validate import run as in_order

__all__ = ["Plan", "Timed"]

Timed = tuple[Action, float, float]
"""An action, and when it started and ended: in seconds, by ``time.perf_counter``."""


class Plan:
    """The actions of a schedule as nodes of a native plan. A worker of the schedule is a lane there."""

    def __init__(self, schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind)) -> None:
        """``kinds``: the actions to run; what others would have made is there already.

        Raises:
            ScheduleError: the schedule is not valid.
        """
        self.schedule = schedule
        self.workers = schedule.workers
        self.worth = Worth()
        self.actions: list[Action] = []  # by node
        self._lanes = LanePlan(schedule.workers)
        numbers: dict[Action, int] = {}
        for worker, order in enumerate(schedule.orders):
            for action in order:
                if action.kind in kinds:
                    numbers[action] = self._lanes.add(
                        worker,
                        queue=action.stage * len(Kind) + list(Kind).index(action.kind),
                        live=(action.kind is Kind.FORWARD) - action.kind.frees,
                        overtakes=action.kind in schedule.overtakes,
                    )
                    self.actions.append(action)
            if schedule.live_limits is not None and Kind.FORWARD in kinds and len(kinds) > 1:
                self._lanes.set_limit(worker, schedule.live_limits[worker])
        self.in_order: list[Action] = []  # an order for one thread
        for _, action, dependencies in in_order(schedule):
            if action in numbers:
                self.in_order.append(action)
                for needed in dependencies:
                    if needed in numbers:
                        self._lanes.add_edge(numbers[needed], numbers[action])

    def run(self) -> LaneRun:
        """A run of it, for the threads of its workers to ask."""
        return self._lanes.run()
