"""What goes wrong on a rank, as the other ranks are told of it."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["Failure", "Position", "RankError"]


class Position(NamedTuple):
    """What a rank is doing: ``phase`` is "forward", "backward", "loss", or any other word for it. A micro-batch of -1
    is all of them.
    """

    phase: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        of = "" if self.micro_batch < 0 else f" of micro-batch {self.micro_batch}"
        return f"{self.phase}{of} in stage {self.stage}"


class RankError(RuntimeError):
    """Another rank of a pipeline has failed, and this one cannot go on. The process group is of no use any more.

    Attributes:
        rank: of the group; who has failed. None: it is not known who.
        stage: where that rank was; None: outside of a stage, or not known.
        micro_batch: as ``stage``.
        phase: "forward", "backward", "loss", or as the rank calls it; None: as ``stage``.
        error: what it raised, with its traceback; empty if its process has ended.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.rank = failure.rank
        at = failure.at
        self.phase = None if at is None else at.phase
        self.stage = None if at is None else at.stage
        self.micro_batch = None if at is None else at.micro_batch
        self.error = failure.error


@dataclass(frozen=True)
class Failure:
    """Who failed, where, and how."""

    what: str
    """A sentence without its end: "rank 1 failed"."""
    rank: int | None = None
    at: Position | None = None
    error: str = ""

    @classmethod
    def by(cls, error: BaseException, rank: int, at: Position | None) -> Failure:
        """Of a rank that has raised ``error``."""
        one_line = "".join(traceback.format_exception_only(type(error), error)).strip()
        where = f"in the {at}" if at is not None else "between its steps"
        full = "".join(traceback.format_exception(error)).strip()
        return cls(f"rank {rank} failed {where}: {one_line}", rank, at, full)

    def __str__(self) -> str:
        return f"{self.what}\n\nOn rank {self.rank}:\n{self.error}" if self.error else self.what

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """From the store."""
        found = json.loads(text)
        at = found.pop("at")
        return cls(at=None if at is None else Position(*at), **found)
