"""A schedule is data: for every worker, the actions it runs, in order."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Kind(enum.Enum):
    """What is done; the value is the letter in pictures and messages.

    A backward is done at once (``BACKWARD``) or in two actions (``BACKWARD_INPUT``, then ``BACKWARD_WEIGHT``, which
    no other action waits for). The letters F, B and W of the zero-bubble paper are F, I and W here: B is the whole.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Members are compared by identity; the inherited hash is that of the name, and five times as slow.
    __hash__ = object.__hash__

    @property
    def frees(self) -> bool:
        """Whether its end frees the activations of its forward."""
        return self is Kind.BACKWARD or self is Kind.BACKWARD_WEIGHT


class Action(NamedTuple):
    """One micro-batch in one stage. ``str`` gives stage, letter, micro-batch: ``2F5``; all are counted from 0.

    Where a worker has several (virtual) stages, ``stage`` still is the number of the stage in the model.
    """

    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class ScheduleError(ValueError):
    """An invalid schedule. ``worker``, ``position`` and ``action`` are None where no single one is at fault."""

    def __init__(
        self, message: str, *, worker: int | None = None, position: int | None = None, action: Action | None = None
    ) -> None:
        """The message gets the place in front of it: worker, position in its order (from 0), action."""
        self.worker, self.position, self.action = worker, position, action
        place = [f"worker {worker}"] * (worker is not None) + [f"position {position}"] * (position is not None)
        place += [f"action {action}"] * (action is not None)
        super().__init__(f"{', '.join(place)}: {message}" if place else message)


@dataclass(frozen=True)
class Schedule:
    """An immutable table of actions. It holds what it was given: :func:`pymoe.pipe.schedules.validate` judges it.

    Stages form a chain: the forward of a stage needs that of the stage before, its backward that of the stage after.
    Skips do not add to this, because they only run from earlier stages to later ones.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    """The worker of every stage."""
    orders: tuple[tuple[Action, ...], ...]
    """The actions of every worker, in the order in which it runs them."""
    live_limits: tuple[int, ...] | None = None
    """For every worker, how many activations it may hold at once; None: no promise."""

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.orders)

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """(worker, position) of every action."""
        return {action: (w, i) for w, order in enumerate(self.orders) for i, action in enumerate(order)}

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return what must have ended before ``action`` may start, apart from its predecessors on its worker."""
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
    """Yield how many activations a worker holds after each of its actions.

    An activation is what the backward of one micro-batch through one stage needs. It is live from the end of its
    forward to the end of the backward that frees it: the whole one, or, where the backward is split, the weights'
    (which still needs the inputs of the layers and the gradients of their outputs).
    """
    live = 0
    for action in actions:
        live += (action.kind is Kind.FORWARD) - action.kind.frees
        yield live


def peak_live(actions: Iterable[Action]) -> int:
    """Return the most activations held at once by the worker that runs ``actions`` in this order."""
    return max(live_counts(actions), default=0)
