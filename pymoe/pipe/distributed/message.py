"""What one rank tells another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from pymoe.pipe.distributed.wire import layouts_of

__all__ = ["Key", "Message", "Subject"]


class Subject(IntEnum):
    """What a message is about."""

    VALUES = 0  # that a stage has made for a micro-batch
    GRADIENTS = 1  # of these values
    TIED_GRADIENTS = 2  # of parameters that a stage shares with others
    COPY = 3  # of such parameters


class Key(NamedTuple):
    """Which message."""

    step: int
    subject: Subject
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """In words."""
        of = f"of stage {self.stage}"
        if self.subject in (Subject.VALUES, Subject.GRADIENTS):
            what = "the values" if self.subject is Subject.VALUES else "the gradients of the values"
            return f"{what} {of} for micro-batch {self.micro_batch}"
        return (
            f"the gradients of shared parameters {of}"
            if self.subject is Subject.TIED_GRADIENTS
            else (f"the shared parameters {of}")
        )


@dataclass
class Message:
    """What one rank tells another."""

    key: Key
    description: bytes
    tensors: list[torch.Tensor]
    notes: tuple[int, int, int] = (0, 0, 0)
    """Three numbers that go with it."""

    def read(self) -> Any:
        """The object of the description that :mod:`.wire` reads values from."""
        return layouts_of(self.description)[1]
