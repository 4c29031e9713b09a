"""What the ranks of a group write down for each other, in the store of the process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pymoe.pipe.distributed.failure import Failure
from pymoe.pipe.distributed.peers import Beat

__all__ = ["Board", "BoardIsGoneError"]

T = TypeVar("T")


class BoardIsGoneError(RuntimeError):
    """The store cannot be reached any more: its process has ended, or its host has."""


class Board:
    """Raises :class:`BoardIsGoneError` from every method once the store is gone. For several threads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._keep = group.get_group_store()  # the store's server ends with the last of those who know it
        # A connection of its own: others may be blocked for as long as one waits.
        self._store = PrefixStore("pymoe.pipe.watch", self._keep.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=30))
        self._lost: str | None = None

    def settle(self, failure: Failure) -> Failure:
        """Write a failure, if there is none yet; the first one."""
        return Failure.from_json(self._try(lambda: self._store.compare_set("failure", "", failure.to_json())))

    def failure(self) -> Failure | None:
        """What has failed."""
        if not self._try(lambda: self._store.check(["failure"])):
            return None
        return Failure.from_json(self._try(lambda: self._store.get("failure")))

    def confirm(self) -> None:
        """That this rank has read of the failure."""
        self._try(lambda: self._store.add("confirmed", 1))

    def confirmed(self) -> int:
        """How many ranks have."""
        return self._try(lambda: self._store.add("confirmed", 0))

    def tell(self, rank: int, beat: Beat) -> None:
        """Write where a rank is. It is there when this returns."""
        key, text = f"rank {rank}", beat.to_json()
        self._try(lambda: self._store.set(key, text))
        self._try(lambda: self._store.check([key]))  # writing alone does not wait for the store

    def beat(self, rank: int) -> Beat | None:
        """Where a rank is; None: it has told nothing yet."""
        key = f"rank {rank}"
        if not self._try(lambda: self._store.check([key])):
            return None
        return Beat.from_json(self._try(lambda: self._store.get(key)))

    def _try(self, ask: Callable[[], T]) -> T:
        if self._lost is None:
            try:
                return ask()
            except RuntimeError as error:
                self._lost = str(error)
        # Another try would fail as well, and print a page about it.
        raise BoardIsGoneError(self._lost)
