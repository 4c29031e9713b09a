"""Steps of several pipes that run at the same time, in several threads, and share layers: no forward may write there.

Which of them would have come first, nobody knows; updates would be lost, and a step would see what another has put back
for a recomputation. So what they share is looked at when the second step begins and when the first one ends. If it has
changed, or was put back meanwhile, both steps fail. Steps that share what nobody writes to run concurrently; those of
one pipe run one after the other anyway, and pipes in a stage of another belong to its step.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pymoe.pipe.execution.held_state import HeldState

_lock = threading.RLock()
_running: list[RunningStep] = []
_overlaps: list[_Overlap] = []
_moments = itertools.count(2, 2)  # seen() takes the number after it, which is no power of two: it reads samples alone


class RunningStep:
    """A step, or a part of one, that is running."""

    def __init__(self, stages: Sequence[HeldState], owner: object) -> None:
        """``owner``: that of the pipe's threads."""
        self.stages = stages
        self.owner = owner
        self.conflict: str | None = None
        """The name of what it shares with another that ran at the same time, and one of them has written to."""

    def shareable(self) -> dict[Any, tuple[str, Any]]:
        """Return what other steps may have, too."""
        found: dict[Any, tuple[str, Any]] = {}
        for held in self.stages:
            found.update(held.look().layout.shareable)
        return found

    def refuse_conflict(self) -> None:
        """Raise RuntimeError if there was a conflict."""
        if self.conflict is not None:
            raise RuntimeError(
                f"two pipes that ran at the same time, in two threads, share {self.conflict!r}, which was written to "
                "meanwhile: updates may be lost, and one may have read what the other was about to change. No gradient "
                "is added. Run them one after the other, or give each layers of its own (copy.deepcopy)"
            )


class _Overlap:
    """Two steps while both are running, and what they share."""

    def __init__(self, steps: tuple[RunningStep, RunningStep], roots: Sequence[tuple[str, Any]]) -> None:
        self.steps = steps
        self._held = HeldState(roots, next(_moments))
        self._seen = self._held.seen(to_compare=True)
        layout = self._seen.layout
        self._names = {id(tensor): layout.name(number) for number, tensor in enumerate(layout.tensors)}
        self._names.update((id(cell.place), cell.name) for cell in layout.cells)

    def end(self) -> None:
        """Note that one of the steps has ended."""
        if names := self._held.changes(self._seen):
            self.fail(names[0])

    def note(self, exchanged: set[int]) -> None:
        """Note what was put back for a recomputation: the ids of tensors and containers."""
        if names := [self._names[one] for one in exchanged if one in self._names]:
            self.fail(names[0])

    def fail(self, name: str) -> None:
        for step in self.steps:
            step.conflict = step.conflict or name


@contextmanager
def running_step(stages: Sequence[HeldState], owner: object, around: Sequence[object]) -> Iterator[RunningStep]:
    """Let a step run in the block; :meth:`RunningStep.refuse_conflict` is for after it.

    ``around``: the owners of steps that this one is a part of.
    """
    step = RunningStep(stages, owner)
    with _lock:
        others = [other for other in _running if other.owner not in around]
        _running.append(step)
    try:
        if others:
            _watch(step, others)
        yield step
    finally:
        with _lock:
            if step in _running:  # not so in the child of a fork
                _running.remove(step)
            mine = [one for one in _overlaps if step in one.steps]
            _overlaps[:] = [one for one in _overlaps if one not in mine]
            for overlap in mine:
                overlap.end()


def _watch(step: RunningStep, others: Sequence[RunningStep]) -> None:
    mine = step.shareable()
    for other in others:
        roots = [root for key, root in other.shareable().items() if key in mine]
        if roots:
            with _lock:
                if other in _running:
                    _overlaps.append(_Overlap((step, other), roots))


def note_put_back(held: HeldState, seen: Any) -> None:
    """Note that what was seen earlier has been put back, and is no longer."""
    if _overlaps:
        exchanged = held.exchanged(seen)
        with _lock:
            for overlap in _overlaps:
                overlap.note(exchanged)


def _forget() -> None:
    """In the child of a fork: the threads of these steps are the parent's, and one of them may hold the lock."""
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _overlaps.clear()


os.register_at_fork(after_in_child=_forget)
