"""Schedules as data: the actions of every worker in order, and the check that they can run."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Kind(enum.Enum):
    """The kind of an action; the value is its letter in pictures and messages.

    A backward is one action (``BACKWARD``) or two (``BACKWARD_INPUT``, then ``BACKWARD_WEIGHT``, for which no other
    action waits). The letters F, B and W of the zero-bubble paper are F, I and W here: B is the whole.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Members are compared by identity, and the inherited hash of the name takes five times as long.
    __hash__ = object.__hash__

    @property
    def frees(self) -> bool:
        """Return whether the end of this action frees the activations of its forward."""
        return self is Kind.BACKWARD or self is Kind.BACKWARD_WEIGHT


class Action(NamedTuple):
    """One micro-batch in one stage. ``str`` gives stage, letter, micro-batch: ``2F5``; all are counted from 0.

    If a worker has several (virtual) stages, ``stage`` is still the number of the stage in the model.
    """

    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class ScheduleError(ValueError):
    """An invalid schedule. ``worker``, ``position`` and ``action`` are None if no single one is at fault."""

    def __init__(
        self, message: str, *, worker: int | None = None, position: int | None = None, action: Action | None = None
    ) -> None:
        """Prefix the message with worker, position in its order (from 0), and action."""
        self.worker, self.position, self.action = worker, position, action
        place = [f"worker {worker}"] * (worker is not None) + [f"position {position}"] * (position is not None)
        place += [f"action {action}"] * (action is not None)
        super().__init__(f"{', '.join(place)}: {message}" if place else message)


@dataclass(frozen=True)
class Schedule:
    """An immutable table of actions. It is not checked when it is made: :func:`pymoe.pipe.schedules.validate` does
    that.

    Stages form a chain: the forward of a stage needs the forward of the stage before, and its backward needs the
    backward of the stage after. Skips add no dependencies, because they only go from earlier stages to later ones.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    """The worker of every stage."""
    orders: tuple[tuple[Action, ...], ...]
    """The actions of every worker, in the order in which it runs them."""
    live_limits: tuple[int, ...] | None = None
    """The number of activations that every worker may hold at once; None: no promise."""

    @property
    def stages(self) -> int:
        """Return the number of stages of the model."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return len(self.orders)

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """Return (worker, position) of every action."""
        return {action: (w, i) for w, order in enumerate(self.orders) for i, action in enumerate(order)}

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that must end before ``action`` may start, apart from earlier actions of its worker."""
        stage, micro_batch, kind = action
        if kind is Kind.FORWARD:
            return (Action(stage - 1, micro_batch, Kind.FORWARD),) if stage else ()
        if kind is Kind.BACKWARD_WEIGHT:
            return (Action(stage, micro_batch, Kind.BACKWARD_INPUT),)
        forward = Action(stage, micro_batch, Kind.FORWARD)
        if stage == self.stages - 1:
            return (forward,)
        split = Action(stage + 1, micro_batch, Kind.BACKWARD_INPUT)
        after = split if split in self.places else Action(stage + 1, micro_batch, Kind.BACKWARD)
        return forward, after

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches"]
        lines += [f"worker {w}: {' '.join(map(str, order))}" for w, order in enumerate(self.orders)]
        return "\n".join(lines)


def live_counts(actions: Iterable[Action]) -> Iterator[int]:
    """Yield the number of activations that a worker holds after each of its actions.

    An activation is what the backward of one micro-batch through one stage needs. It is live from the end of its
    forward to the end of the action that frees it: the whole backward or, if the backward is split, the backward of
    weights (which still needs the inputs of the layers and the gradients of their outputs).
    """
    live = 0
    for action in actions:
        live += (action.kind is Kind.FORWARD) - action.kind.frees
        yield live


def peak_live(actions: Iterable[Action]) -> int:
    """Return the maximum number of activations that a worker holds at once if it runs ``actions`` in this order."""
    return max(live_counts(actions), default=0)


# Validation.


def validate(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError`, which names worker, position and action, unless

    - every action is on the worker of its stage, and its stage and micro-batch exist;
    - every micro-batch has one forward and one backward in every stage, the backward whole or split into its two parts;
    - no deadlock: all workers reach the end when each waits for the dependencies of its next action;
    - no worker ever holds more activations than its live limit, where there are limits.
    """
    for _ in run(schedule):
        pass


def run(
    schedule: Schedule, others: Mapping[Action, tuple[Action, ...]] | None = None
) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Validate, and meanwhile yield (worker, action, its dependencies) in a possible order: each action after its
    dependencies and after earlier actions of its worker. ``others``: further dependencies of actions.

    A worker that has to wait is visited again only when the action that it waits for has ended, so the time is
    proportional to the number of actions.
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
    """Follow the chain of waiting workers from ``worker`` until it comes back to one of them. Return an error that
    names the waits.
    """
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
