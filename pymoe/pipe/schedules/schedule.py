"""A schedule is data: for every worker, the actions it runs, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pymoe.pipe.schedules.action import Action, Kind

Orders = Sequence[Sequence[Action]]


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
