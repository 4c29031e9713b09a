"""Validation: a schedule can run, and does everything that has to be done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from pymoe.pipe.schedules.schedule import Action, Kind, Schedule, ScheduleError, live_counts


def validate(schedule: Schedule) -> None:
    """Raises :class:`ScheduleError`, which names worker, position and action, unless

    - every action is on the worker of its stage, and its stage and micro-batch exist;
    - every micro-batch has in every stage one forward and one backward, whole or split into its two parts;
    - workers that run their orders, each waiting for what its next action needs, all reach the end;
    - no worker ever holds more activations than its live limit, where there are limits.
    """
    for _ in run(schedule):
        pass


def run(
    schedule: Schedule, others: Mapping[Action, tuple[Action, ...]] | None = None
) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Validates, and meanwhile yields (worker, action, its dependencies) in an order in which all can run: each action
    after its dependencies and after its worker's predecessors. ``others``: dependencies of actions besides.

    A worker that has to wait is looked at again when what it waits for has ended, so this takes time proportional to
    the number of actions.
    """
    others = others or {}
    _check_places(schedule)
    _check_complete(schedule)
    position = [0] * schedule.workers
    ended: set[Action] = set()
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = list(reversed(range(schedule.workers)))
    while ready:
        worker = ready.pop()
        order = schedule.orders[worker]
        while position[worker] < len(order):
            action = order[position[worker]]
            dependencies = schedule.dependencies(action) + others.get(action, ())
            missing = [needed for needed in dependencies if needed not in ended]
            if missing:
                waiting[missing[0]].append(worker)
                break
            yield worker, action, dependencies
            ended.add(action)
            position[worker] += 1
            if action in waiting:
                ready += waiting.pop(action)
    for worker, order in enumerate(schedule.orders):
        if position[worker] < len(order):
            raise _deadlock(schedule, position, worker, ended, others)
    _check_live_limits(schedule)


def _check_places(schedule: Schedule) -> None:
    if schedule.micro_batches < 1 or not schedule.stages:
        raise ScheduleError(f"{schedule.stages} stages, {schedule.micro_batches} micro-batches: at least one of each")
    for stage, worker in enumerate(schedule.placement):
        if not 0 <= worker < schedule.workers:
            raise ScheduleError(f"stage {stage} is placed on worker {worker}, there are {schedule.workers} workers")
    seen: dict[Action, int] = {}
    for worker, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            if not 0 <= action.stage < schedule.stages:
                message = f"there are {schedule.stages} stages"
            elif not 0 <= action.micro_batch < schedule.micro_batches:
                message = f"there are {schedule.micro_batches} micro-batches"
            elif schedule.placement[action.stage] != worker:
                message = f"stage {action.stage} is placed on worker {schedule.placement[action.stage]}"
            elif action in seen:
                message = f"done before, at position {seen[action]}"
            else:
                seen[action] = position
                continue
            raise ScheduleError(message, worker=worker, position=position, action=action)


def _check_complete(schedule: Schedule) -> None:
    places = schedule.places
    for stage, worker in enumerate(schedule.placement):
        for micro_batch in range(schedule.micro_batches):
            forward, whole, *parts = [Action(stage, micro_batch, kind) for kind in Kind]
            there = [part for part in parts if part in places]
            missing = [part for part in parts if part not in places]
            if forward not in places:
                raise ScheduleError("missing", worker=worker, action=forward)
            if whole in places and there:
                message = f"the whole backward {whole} is there too"
                raise ScheduleError(message, worker=worker, position=places[there[0]][1], action=there[0])
            if whole not in places and not there:
                raise ScheduleError("missing, and so are its two parts", worker=worker, action=whole)
            if there and missing:
                raise ScheduleError(f"missing, while {there[0]} is there", worker=worker, action=missing[0])


def _check_live_limits(schedule: Schedule) -> None:
    if schedule.live_limits is None:
        return
    if len(schedule.live_limits) != schedule.workers:
        raise ScheduleError(f"{len(schedule.live_limits)} live limits for {schedule.workers} workers")
    for worker, (order, limit) in enumerate(zip(schedule.orders, schedule.live_limits, strict=True)):
        for position, (action, live) in enumerate(zip(order, live_counts(order), strict=True)):
            if live > limit:
                message = f"holds {live} activations, the limit is {limit}"
                raise ScheduleError(message, worker=worker, position=position, action=action)


def _deadlock(
    schedule: Schedule,
    position: list[int],
    worker: int,
    ended: set[Action],
    others: Mapping[Action, tuple[Action, ...]],
) -> ScheduleError:
    """Follows from ``worker`` who waits for whom until the chain closes, and blames a link of the ring."""
    chain: dict[int, str] = {}
    while worker not in chain:
        head = schedule.orders[worker][position[worker]]
        dependencies = schedule.dependencies(head) + others.get(head, ())
        missing = next(needed for needed in dependencies if needed not in ended)
        home, place = schedule.places[missing]
        chain[worker] = f"{head} waits for {missing}, at position {place} of worker {home}"
        worker = home
    links = "; ".join([*chain.values()][[*chain].index(worker) :])
    head = schedule.orders[worker][position[worker]]
    return ScheduleError(f"deadlock: {links}", worker=worker, position=position[worker], action=head)
