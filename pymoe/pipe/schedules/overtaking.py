"""What a schedule would take whose workers, instead of waiting, run what is ready: the rule of the pipeline's lanes."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pymoe.pipe.schedules.action import Action, Kind
from pymoe.pipe.schedules.record import Record, Span
from pymoe.pipe.schedules.schedule import Schedule

__all__ = ["simulate_overtaking"]


def simulate_overtaking(schedule: Schedule, times: Callable[[Action], float], communication: float) -> Record:
    """As :func:`pymoe.pipe.schedules.simulate`, for schedules with actions that overtake. The schedule is valid.

    A worker that is free starts the first of its actions that has not started, if it can start now. If not, the first
    that can, may overtake, and is the first of its stage and kind; a forward also needs room below the live limit, for
    itself and for the forwards that it passes. If there is none the worker waits.
    """
    orders = [list(order) for order in schedule.orders]  # what has not started
    limits = schedule.live_limits or (None,) * schedule.workers
    live = [0] * schedule.workers
    running: list[Action | None] = [None] * schedule.workers
    spans: list[list[Span]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    now = 0.0
    moments: list[float] = [now]  # at which something ends or arrives
    while moments:
        now = heapq.heappop(moments)
        for worker, action in enumerate(running):
            if action is not None and ends[action] <= now:
                running[worker] = None
                live[worker] -= action.kind.frees

        def can_start(action: Action) -> bool:
            worker = schedule.placement[action.stage]
            for needed in schedule.dependencies(action):
                travel = communication if schedule.placement[needed.stage] != worker else 0.0
                if needed not in ends or ends[needed] + travel > now:  # noqa: B023
                    return False
            return True

        for worker, order in enumerate(orders):
            if running[worker] is not None or not order:
                continue
            position = _next(schedule, order, live[worker], limits[worker], can_start)
            if position is None:
                continue
            action = running[worker] = order.pop(position)
            live[worker] += action.kind is Kind.FORWARD
            ends[action] = now + times(action)
            spans[worker].append(Span(action, now, ends[action]))
            heapq.heappush(moments, ends[action])
            if communication:
                heapq.heappush(moments, ends[action] + communication)
    return Record(schedule.name, schedule.placement, tuple(map(tuple, spans)))


def _next(
    schedule: Schedule, order: list[Action], live: int, limit: int | None, can_start: Callable[[Action], bool]
) -> int | None:
    """The position in ``order`` of what a free worker starts."""
    queues: set[tuple[int, Kind]] = set()
    passed = 0  # forwards
    for position, action in enumerate(order):
        queue = action.stage, action.kind
        if queue not in queues and (position == 0 or action.kind in schedule.overtakes) and can_start(action):
            has_room = limit is None or action.kind is not Kind.FORWARD or live + passed + 1 <= limit
            if position == 0 or has_room:
                return position
        queues.add(queue)
        passed += action.kind is Kind.FORWARD
    return None
