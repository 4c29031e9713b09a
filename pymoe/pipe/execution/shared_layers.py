"""Controls writes to layers that several stages of a pipe, or several pipes, share.

**Stages of a pipe** run concurrently. They may share parameters freely, and tables that forwards read. But state that
their forwards write (running statistics, a scale, a cache) has to be written and read by one stage after the other, and
by one micro-batch after the other. So the first of these stages starts a micro-batch only after the last of them has
finished the previous one, if the schedule allows that (:class:`pymoe.pipe.execution.plan.ActionPlan`); otherwise no
forward may write. Each step finds out which stages write. Stages whose forwards have written nothing in the last step
take no turns as long as their shared state, except parameters, has not changed since; if a stage writes nevertheless,
the step fails.

**Steps of several pipes** may run at the same time, in several threads, but then no forward may write to what they
share. The order of their writes would be undefined, updates would be lost, and a step would see state that another step
has restored for a recomputation. So the second step compares the shared state at its own beginning and at the end of
the first step. If the state has changed, or was restored in between, both steps fail. Steps of one pipe run one after
the other anyway, and the steps of a pipe inside a stage belong to the outer step.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from pymoe.pipe.auxiliary import is_weighted
from pymoe.pipe.execution.held_state import HeldSnapshot, HeldState
from pymoe.pipe.execution.held_values import HeldLayout

_WRITTEN_UNSEEN = {"running_mean", "running_var", "fake_quant_enabled"}
"""Buffers of batch norms and observers, which kernels write to without changing the version counter."""


def turns_of(layouts: Sequence[HeldLayout], known: Sequence[Turns | None] = ()) -> list[Turns | None]:
    """Return, for each stage, the :class:`Turns` that orders its forwards; None for a stage that shares no state.

    Stages that share state, directly or through other stages, get the same object.

    Args:
        layouts: what the modules of each stage hold.
        known: turns from earlier calls, which are used again where the same stages share the same state.
    """
    users: dict[Any, list[int]] = {}
    for number, layout in enumerate(layouts):
        for key in layout.shareable:
            users.setdefault(key, []).append(number)
    group = list(range(len(layouts)))  # the lowest stage that shares state with each stage
    shared = {key: stages for key, stages in users.items() if len(stages) > 1}
    for stages in shared.values():
        joined = {group[stage] for stage in stages}
        group = [min(joined) if least in joined else least for least in group]
    turns: list[Turns | None] = [None] * len(layouts)
    for least in {group[stages[0]] for stages in shared.values()}:
        roots: dict[int, tuple[str, Any]] = {}
        for key, stages in shared.items():
            if group[stages[0]] == least:
                for stage in stages:
                    name, root = layouts[stage].shareable[key]
                    roots.setdefault(id(root), (name, root))
        made = Turns([stage for stage, other in enumerate(group) if other == least], [*roots.values()])
        made = next((one for one in known if one is not None and one.is_like(made)), made)
        for stage in made.stages:
            turns[stage] = made
    return turns


class Turns:
    """Orders the forwards of stages that share state."""

    def __init__(self, stages: Sequence[int], roots: Sequence[tuple[str, Any]]) -> None:
        """Begin with ``roots``: modules, containers and tensors, with their names."""
        self.stages = tuple(stages)
        self.lock = StageLock()
        """A lock that forwards that may write and recomputations hold, so that no other stage runs while state is
        restored.
        """
        self.is_ordered = False
        """True if the running schedule keeps the order. The engine sets this."""
        self._roots = roots
        self._held = HeldState(roots)
        self._may_write = self._may_write_at_first = not all(_only_reads(root) for _, root in roots)
        self._code: Sequence[Any] = ()
        # Auxiliary losses are changed and restored. No other stage may run in between, even in a schedule that keeps
        # the order.
        self._one_at_a_time = any(isinstance(root, nn.Module) and is_weighted(root) for _, root in roots)
        self._wrote = False
        self._checked: HeldSnapshot | None = None  # the state when it was last checked that forwards write nothing

    def is_like(self, other: Turns) -> bool:
        """Return whether ``other`` is for the same stages, and these share the same state."""
        pairs = zip(self._roots, other._roots, strict=False)
        same = len(self._roots) == len(other._roots) and all([one is another for (_, one), (_, another) in pairs])
        return same and self.stages == other.stages

    def begin_step(self, code: Sequence[Any]) -> bool:
        """Begin a step with forwards; return whether they have to run in order.

        ``code``: the stages' functions and modes; if they differ from the last step's, nothing is known about writes.
        """
        state = self._held.look()
        if code != self._code:
            self._code, self._may_write = code, self._may_write_at_first
        elif self._checked is not None or self._wrote:
            self._may_write = self._wrote or not state.differs_in_parameters_alone(self._checked)
        self._may_write = self._may_write or bool(_writing_unseen(state.layout))
        self._wrote, self._checked = False, None
        return self._may_write

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward of one of the stages in the block.

        Raises:
            RuntimeError: the forward has written to shared state out of turn.
        """
        with self.lock if self._may_write or self._one_at_a_time else nullcontext():
            before = self._held.seen(to_compare=True)
            yield
            names = self._held.changes(before) + before.layout.opaque
            names += [before.layout.names[id(layer)] for layer in _writing_unseen(before.layout)]
            if not names:
                self._checked = before.state
                return
            self._wrote = True
            if not (self._may_write and self.is_ordered):
                raise RuntimeError(self._why(names[0]))

    def _why(self, name: str) -> str:
        shared = f"stages {', '.join(map(str, self.stages))} share state to which a forward has written ({name!r})"
        if not self._may_write:
            return (
                f"{shared}, and none had before: they may have run at the same time. No gradient is added. Run the "
                "step again: from now on they take turns"
            )
        return (
            f"{shared}, and this schedule cannot run them in the order of the model, one micro-batch after the other: "
            "use another ('gpipe' or '1f1b', in one process), put the layers into one stage, or give each a state of "
            "its own"
        )


def _only_reads(root: Any) -> bool:
    """Return whether forwards are first assumed to read a value alone: parameters, and torch's own layers."""
    if isinstance(root, nn.Module):
        return type(root).__module__.startswith("torch.nn.modules") and not any(
            buffer is not None for buffer in root._buffers.values()
        )
    return isinstance(root, nn.Parameter)


def _writing_unseen(layout: HeldLayout) -> list[nn.Module]:
    """Return the layers assumed to be written by kernels: reading their buffers would wait for a device."""
    layers = [layer for layer in layout.modules.values() if not _WRITTEN_UNSEEN.isdisjoint(layer._buffers.keys())]
    layers = [layer for layer in layers if layer.training or "fake_quant_enabled" in layer._buffers]
    return [layer for layer in layers if not all([buffer.is_cpu for buffer in layer.buffers()])]


class StageLock:
    """A reentrant lock; a copied pipe has a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return StageLock, ()


# Steps of several pipes at the same time.

_lock = threading.RLock()
_running: list[RunningStep] = []
_overlaps: list[_Overlap] = []
_moments = itertools.count(2, 2)  # seen() takes the next number, which is not a power of two, so it only reads samples


class RunningStep:
    """A running step, or a part of one."""

    def __init__(self, stages: Sequence[HeldState], owner: object) -> None:
        """Begin a step of the pipe whose threads belong to ``owner``."""
        self.stages = stages
        self.owner = owner
        self.conflict: str | None = None
        """The name of the state over which this step conflicts with another; None without a conflict."""

    def shareable(self) -> dict[Any, tuple[str, Any]]:
        """Return the state that other steps may share."""
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
    """Two steps that are running at the same time, and the state that they share."""

    def __init__(self, steps: tuple[RunningStep, RunningStep], roots: Sequence[tuple[str, Any]]) -> None:
        self.steps = steps
        self._held = HeldState(roots, next(_moments))
        self._seen = self._held.seen(to_compare=True)
        layout = self._seen.layout
        self._names = {layout.key(one): layout.names[id(one)] for one in [*layout.tensors, *layout.generators]}
        self._names.update((id(cell.place), cell.name) for cell in layout.cells)

    def end(self) -> None:
        """Compare the shared state when one of the steps has ended. If it has changed, both steps fail."""
        if names := self._held.changes(self._seen):
            self.fail(names[0])

    def note(self, exchanged: set[Any]) -> None:
        """Make both steps fail if they share state in ``exchanged`` (:meth:`HeldState.exchanged`)."""
        if names := [self._names[one] for one in exchanged if one in self._names]:
            self.fail(names[0])

    def fail(self, name: str) -> None:
        for step in self.steps:
            step.conflict = step.conflict or name


@contextmanager
def running_step(stages: Sequence[HeldState], owner: object, around: Sequence[object]) -> Iterator[RunningStep]:
    """Run a step in the block; call :meth:`RunningStep.refuse_conflict` after it.

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
            if step in _running:  # a forked child has forgotten it
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
    """Record which state a recomputation restores, for steps of other pipes. Called before and after the recomputation,
    because at both times the present state differs from the one to restore.
    """
    if _overlaps:
        exchanged = held.exchanged(seen)
        with _lock:
            for overlap in _overlaps:
                overlap.note(exchanged)


def _forget() -> None:
    """Forget the steps in the child of a fork: their threads are the parent's, and one of them may hold the lock."""
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _overlaps.clear()


os.register_at_fork(after_in_child=_forget)
