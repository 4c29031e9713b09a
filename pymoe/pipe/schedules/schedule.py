"""Schedules as data: the actions of every worker in order, the check that they can run, and the schedules by name.

To add a schedule, decorate a function that builds it::

    @register("gpipe")
    def gpipe(stages: int, micro_batches: int) -> Schedule: ...

Parameters after ``stages`` and ``micro_batches`` are options of that schedule, such as ``virtual_stages`` and
``live_limit``. A user's own schedule is registered when its module is imported.
"""

from __future__ import annotations

import enum
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar


class Kind(enum.Enum):
    """The kind of an action; the value is its letter in pictures and messages.

    A backward is one action (``BACKWARD``) or two (``BACKWARD_INPUT``, then ``BACKWARD_WEIGHT``). No other action
    depends on ``BACKWARD_WEIGHT``. The letters F, B and W of the zero-bubble paper are F, I and W here; B is a whole
    backward.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Members compare by identity. Enum's own hash, that of the member's name, takes five times as long.
    __hash__ = object.__hash__

    @property
    def frees(self) -> bool:
        """Return whether the end of this action frees the activations of its forward."""
        return self is Kind.BACKWARD or self is Kind.BACKWARD_WEIGHT


class Action(NamedTuple):
    """The forward, the backward, or a part of the backward of one micro-batch in one stage.

    ``str`` gives stage, letter and micro-batch: ``2F5``. Stages and micro-batches are counted from 0.

    If a worker has several (virtual) stages, ``stage`` is still the index of the stage in the model.
    """

    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class ScheduleError(ValueError):
    """Says why a schedule is invalid. ``worker``, ``position`` and ``action`` are None if no single one is at fault."""

    def __init__(
        self, message: str, *, worker: int | None = None, position: int | None = None, action: Action | None = None
    ) -> None:
        """Prefix the message with worker, position (from 0, in the worker's order) and action, where they are given."""
        self.worker, self.position, self.action = worker, position, action
        place = [f"worker {worker}"] * (worker is not None) + [f"position {position}"] * (position is not None)
        place += [f"action {action}"] * (action is not None)
        super().__init__(f"{', '.join(place)}: {message}" if place else message)


@dataclass(frozen=True)
class Schedule:
    """An immutable table of actions. The constructor does not check it; :func:`pymoe.pipe.schedules.validate`,
    :func:`~pymoe.pipe.schedules.build`, :func:`~pymoe.pipe.schedules.run` and simulations do.

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
    """The number of activations that every worker may hold at once; None: there are no limits."""

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
        """Return the worker that performs each action, and the position of the action in the worker's order, from 0."""
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
    """Raise :class:`ScheduleError`, which names what is at fault (worker, position and action, if any), unless

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
    """Validate ``schedule``, and yield (worker, action, dependencies of the action) in an order in which the actions
    can run: each after its dependencies and after earlier actions of its worker. ``others``: further dependencies of
    some actions. Raise :class:`ScheduleError` as :func:`validate` does, but for a deadlock only after all actions that
    can run, and for a live limit after all actions.

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
    """Follow the waits from ``worker`` on until a worker recurs; return an error that names the waits of this cycle."""
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


# Schedules by name.

Builder = TypeVar("Builder", bound=Callable[..., Schedule])

_builders: dict[str, Callable[..., Schedule]] = {}

OTHER_NAMES = {
    "filldrain": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "schedulegpipe": "gpipe",
    "schedule1f1b": "1f1b",
    "scheduleinterleaved1f1b": "interleaved-1f1b",
}
"""Other packages' names for these schedules, such as ``torch.distributed.pipelining``'s, in lower case."""
NOT_HERE = {"loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"}
"""Schedules of torch without an equivalent here, in lower case."""


def register(name: str) -> Callable[[Builder], Builder]:
    """Decorate the function that builds the schedule ``name``. Raise ValueError if the name is taken."""

    def remember(builder: Builder) -> Builder:
        if name in _builders:
            raise ValueError(f"schedule {name!r} is registered already, by {_builders[name].__module__}")
        _builders[name] = builder
        return builder

    return remember


def names() -> tuple[str, ...]:
    """Return the names of all schedules, in the order of registration."""
    return tuple(_builders)


def options(name: str) -> tuple[str, ...]:
    """Return the keywords that the schedule ``name`` takes in addition to stages and micro-batches."""
    return tuple(inspect.signature(_builder(name)).parameters)[2:]


def build(name: str, stages: int, micro_batches: int, **chosen: int | None) -> Schedule:
    """Build the schedule ``name`` for the given numbers of stages and micro-batches, and validate it.

    Args:
        name: one of :func:`names`, or as torch spells it ("GPipe", "1F1B", "Interleaved1F1B").
        stages: the number of stages of the model, at least 1.
        micro_batches: the number of micro-batches of a mini-batch, at least 1.
        chosen: options of the schedule, positive numbers; None stands for the default and is accepted for every
            schedule.

    Raises:
        ValueError: the name is not registered, a number is below 1, or the schedule has no such option.
        ScheduleError: (a ValueError) the built schedule cannot run.
    """
    builder = _builder(name)
    chosen = {option: value for option, value in chosen.items() if value is not None}
    for option in chosen:
        if option not in options(name):
            has = ", ".join(options(name)) or "no options"
            raise ValueError(f"schedule {name!r} has no {option}: it has {has}")
    for what, number in {"stages": stages, "micro_batches": micro_batches, **chosen}.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"schedule {name!r}: {what} must be a positive integer, got {number!r}")
    schedule = builder(stages, micro_batches, **chosen)
    if (schedule.stages, schedule.micro_batches) != (stages, micro_batches):
        asked = f"{stages} stages and {micro_batches} micro-batches"
        raise ScheduleError(f"schedule {name!r}: asked for {asked}, got {schedule.stages} and {schedule.micro_batches}")
    validate(schedule)
    return schedule


def _builder(name: str) -> Callable[..., Schedule]:
    small = name.lower()
    for known in (name, small, OTHER_NAMES.get(small)):
        if known in _builders:
            return _builders[known]
    why = ""
    if small.removeprefix("schedule") in NOT_HERE:
        why = (
            ", of which 'zero-bubble' and 'interleaved-1f1b' come nearest; torch's own schedules run the stages that "
            "Pipe.build_stage makes"
        )
    raise ValueError(f"no schedule {name!r}: there are {', '.join(names())}{why}")


# The schedules.


@register("gpipe")
def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Build the schedule of Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism" (2018), arXiv 1811.06965. Each worker has one stage. With p stages and m micro-batches the bubble is (p
    - 1) / (m + p - 1) of the time, and every worker holds all m activations.

    In the paper's figure a stage runs the backward of the last micro-batch first. Here, as in every schedule of this
    package, it begins with the first micro-batch: the bubble is the same, and gradients are summed in the same
    order whatever the schedule.
    """
    orders = tuple(
        tuple(Action(stage, i, kind) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule("gpipe", micro_batches, tuple(range(stages)), orders, live_limits=(micro_batches,) * stages)


@register("1f1b")
def one_forward_one_backward(stages: int, micro_batches: int, *, live_limit: int | None = None) -> Schedule:
    """Build the schedule of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush,
    2021), arXiv 2006.09503. The alternation comes from PipeDream (2019), arXiv 1806.03377, which, unlike this
    schedule, does not flush the pipeline at the end of a step.

    Each worker has one stage. The bubble is GPipe's, (p - 1) / (m + p - 1) of the time for p stages and m
    micro-batches, and worker r holds up to min(m, p - r) activations instead of m. ``live_limit`` further limits the
    activations that any worker holds, which makes the step longer.
    """
    limits = tuple(min(micro_batches, stages - stage, live_limit or stages) for stage in range(stages))
    orders = []
    for stage, warm_up in enumerate(limits):
        order = [Action(stage, i, Kind.FORWARD) for i in range(warm_up)]
        for i in range(micro_batches):
            order.append(Action(stage, i, Kind.BACKWARD))
            if warm_up + i < micro_batches:
                order.append(Action(stage, warm_up + i, Kind.FORWARD))
        orders.append(tuple(order))
    return Schedule("1f1b", micro_batches, tuple(range(stages)), tuple(orders), limits)


@register("interleaved-1f1b")
def interleaved_one_forward_one_backward(stages: int, micro_batches: int, *, virtual_stages: int = 2) -> Schedule:
    """Build the schedule of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021), arXiv 2104.04473, section 2.2.

    Each of p = ceil(stages / v) workers has v = ``virtual_stages`` stages: stage s is on worker s mod p. Compared with
    1F1B of the same model cut into p stages, the idle time is divided by v: for m >= p micro-batches the bubble is
    (p - 1) / (v m + p - 1) of the time.

    Micro-batches form groups; a group goes through all stages of a worker before the next group does. The paper
    requires groups of p, and m to be a multiple of p. Here m is arbitrary: the sizes of groups differ by at most one,
    and no group is smaller than p unless m is. Worker r holds up to min(v m, 2(p - r - 1) + (v - 1) g + 1) activations,
    each of a stage that is 1/v as large; g is the size of the largest group. If the number of stages is not a multiple
    of v, the last workers have one stage fewer.
    """
    workers = -(-stages // virtual_stages)
    rounds = max(1, micro_batches // workers)
    bounds = [micro_batches * i // rounds for i in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(bounds)]
    largest = max(map(len, groups))
    total = micro_batches * virtual_stages
    orders = []
    for worker in range(workers):
        chunks = range(worker, workers * virtual_stages, workers)
        forwards = [Action(s, i, Kind.FORWARD) for group in groups for s in chunks for i in group]
        backwards = [Action(s, i, Kind.BACKWARD) for group in groups for s in reversed(chunks) for i in group]
        warm_up = min(total, 2 * (workers - 1 - worker) + (virtual_stages - 1) * largest + 1)
        order = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + i : warm_up + i + 1]]
        # The last workers may have one stage fewer. Without the actions of that stage the order is still valid, and
        # waits can only be shorter.
        orders.append(tuple(action for action in order if action.stage < stages))
    placement = tuple(stage % workers for stage in range(stages))
    limits = tuple(map(peak_live, orders))
    return Schedule("interleaved-1f1b", micro_batches, placement, tuple(orders), limits)


@register("zero-bubble")
def zero_bubble(stages: int, micro_batches: int, *, live_limit: int | None = None) -> Schedule:
    """Build ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (2023), arXiv 2401.10241, section 2.

    Each worker has one stage. Worker r starts as in 1F1B, and runs the backward of weights r micro-batches after the
    backward of inputs, so every worker holds at most min(m, p) activations (from forward to backward of weights), no
    more than the first worker of 1F1B.

    If forward, backward of inputs and backward of weights take the times F, I and W in every stage, and m >= p, the
    step takes m (F + I + W) + (p - 1) max(F, I, F + I - W). The paper's bubble, (p - 1)(F + I - W), leaves out a
    worker's waits before its first action (F) and after its last gradient (I). With equal times all workers end
    together, and the idle time is a third of 1F1B's. If the update waits for all stages, no schedule is then shorter:
    the last worker gets its first micro-batch after (p - 1) F, and all its work is still to come. That is why H1 is
    offered here: ZB-H2 and the paper's automatic schedules gain only where every stage updates its weights
    independently, and H2 holds 2p - 1 activations.

    The first stage does not split its backward, because nothing waits for the gradients of its inputs. ``live_limit``
    further limits the activations that any worker holds, which makes the step longer.
    """
    limit = min(micro_batches, stages, live_limit or stages)
    orders = []
    for stage in range(stages):
        warm_up = min(stages - stage, limit)
        delay = stage if limit == micro_batches else min(stage, limit - warm_up)
        order = [Action(stage, i, Kind.FORWARD) for i in range(warm_up)]
        for i in range(micro_batches):
            order.append(Action(stage, i, Kind.BACKWARD_INPUT if stage else Kind.BACKWARD))
            if stage and i >= delay:
                order.append(Action(stage, i - delay, Kind.BACKWARD_WEIGHT))
            if warm_up + i < micro_batches:
                order.append(Action(stage, warm_up + i, Kind.FORWARD))
        if stage:
            left = range(max(0, micro_batches - delay), micro_batches)
            order += [Action(stage, i, Kind.BACKWARD_WEIGHT) for i in left]
        orders.append(tuple(order))
    return Schedule("zero-bubble", micro_batches, tuple(range(stages)), tuple(orders), (limit,) * stages)
