"""The words of a schedule: what a worker does for one micro-batch in one stage."""

from __future__ import annotations

import enum
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
