"""Detects which state forwards write, and controls writes to layers shared by stages of a pipe or by several pipes.

State is compared before and after every forward that may be recomputed or that shares state with another stage, since
any forward may begin to write: Python values by identity; tensors by version counter and address, and in host memory
also by fingerprints, because many writes bypass the counter.
Small tensors that are not parameters are always copied. State that cannot be restored is compared, too; a stage whose
forward changes it keeps its graphs. :mod:`pymoe.pipe.execution.held_values` says what state is found. The page
docs/concepts/determinism.md lists what is restored, which writes are missed, and what stages and pipes may share.
Writes by other threads count as the forward's own.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy as copy_of
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe._torch_private import unsafe_set_version_counter
from pymoe.pipe.context import is_weighted
from pymoe.pipe.execution.graph import without_history
from pymoe.pipe.execution.held_values import PLAIN, Cell, HeldLayout

_FRESH = 1 << 24
"""Added to a tensor's version while it has earlier contents, so that graphs made meanwhile are invalid afterwards."""

_OF_BATCH_NORMS = "mean", "var"
"""Ends of the names of buffers that batch norms write, in training, without bumping the version counter. In training,
autograd nodes save these buffers but do not read them, so a graph stays valid if their contents change.
"""

_NOT_THE_SAME = (
    "the recomputation of a checkpointed stage has changed {!r}, which its first run has left alone: it must do the "
    "same both times; use checkpoint='never'"
)
_CHANGED_SINCE = (
    "a checkpointed stage is to be recomputed, and {!r} has changed since its first run, which has not changed it and "
    "may have read it: later forwards have begun to write to it, or somebody else has (an optimizer between forward "
    "and backward). Run the step again, or use checkpoint='never'"
)


class HeldSnapshot:
    """The state in a layout at one moment: sizes, values, and stamps (version counters and addresses of tensors)."""

    def __init__(self, layout: HeldLayout) -> None:
        self.layout = layout
        self.sizes = layout.sizes()
        self.values = list(layout.values())
        self.contents = [cell.contents() for cell in layout.cells]
        self.stamps = layout.stamps()

    def written(self, now: Sequence[int] | None = None) -> list[int]:
        """Return the indices of the tensors whose stamps here differ from ``now``; None: from the present stamps."""
        return self.layout.written(self.stamps, self.layout.stamps() if now is None else now)

    def changed_cells(self) -> list[tuple[Cell, Any]]:
        """Return the cells that have changed since the snapshot, with their contents in the snapshot."""
        both = zip(self.layout.cells, self.contents, strict=True)
        return [(cell, contents) for cell, contents in both if not _same(cell.contents(), contents)]

    def differs_in_parameters_alone(self, other: HeldSnapshot | None) -> bool:
        """Return whether the two snapshots differ in nothing except parameters. Return False if ``other`` is None."""
        if other is None or self.values is not other.values:
            return False
        return all([isinstance(self.layout.tensors[number], nn.Parameter) for number in self.written(other.stamps)])


class Seen(NamedTuple):
    """Keeps the part of the state before a forward that a recomputation of the forward needs."""

    state: HeldSnapshot
    """The state before the forward. :meth:`HeldState.after` removes the graphs of tensors that had a history."""
    moment: int
    """The ``moment`` with which :meth:`HeldLayout.fingerprints` was called."""
    fingerprints: Sequence[int]
    """Fingerprints of the memory that the layout watches."""
    copies: dict[int, torch.Tensor]
    """Copies of tensors, by index in the layout."""
    generators: Sequence[Any]
    """The states of random number generators."""

    def rewritten(self) -> set[int]:
        """Return the indices of the watched tensors whose fingerprints have changed since they were recorded here."""
        layout = self.state.layout
        now = layout.fingerprints(self.moment)
        if now == self.fingerprints:
            return set()
        both = zip(layout.watched, self.fingerprints, now, strict=True)
        return {number for number, one, other in both if one != other}


class HeldState:
    """Compares the state of some modules, containers and tensors before and after forwards."""

    def __init__(self, roots: Iterable[tuple[str, Any]], moment: int = 0) -> None:
        """Watch the state that can be reached from ``roots``, pairs of a name and a module, container or tensor.

        ``moment``: :meth:`seen` passes ``moment + 1``, ``moment + 2``, ... to :meth:`HeldLayout.fingerprints`.
        """
        self._roots = [*roots]
        self._state: HeldSnapshot | None = None
        self.written: set[int] = set()
        """Identities of tensors that forwards have written to and that were not copied. Copied from now on, whatever
        their size.
        """
        self.fixed: set[str] = set()
        """Names of state that forwards change, or may change, and that cannot be restored. If there is any, no later
        forward is recomputed.
        """
        self._moment = moment

    def look(self) -> HeldSnapshot:
        """Return the present state: the same object as in the last call unless something has changed."""
        state = self._state
        if state is not None:
            layout = state.layout
            try:
                is_same = layout.holds(state.sizes, state.values)
            except (KeyError, RuntimeError):  # an attribute is gone, or another thread adds attributes to the object
                is_same = False
            if is_same:
                stamps = layout.stamps()
                if stamps != state.stamps:
                    state = copy_of(state)
                    state.stamps = stamps
                    self._state = state
                return state
            if _differ_plainly(state):
                self._state = state = HeldSnapshot(layout)
                return state
        self._state = state = HeldSnapshot(HeldLayout(self._roots))
        return state

    def before(self) -> Seen | None:
        """Return the present state, before a forward; None if forwards change, or may change, state that cannot be
        restored. Give a UserWarning for the first such state.
        """
        layout = self.look().layout
        for name in layout.opaque:
            self._keep_graphs(name, "may change")
        return None if self.fixed else self.seen()

    def seen(self, to_compare: bool = False) -> Seen:
        """Return the present state, with copies of small tensors and of tensors to which forwards write.

        ``to_compare``: the result is only for :meth:`changes`, so copy only small tensors on the CPU.
        """
        state = self.look()
        layout = state.layout
        numbers: Iterable[int] = layout.small
        if to_compare:
            numbers = [number for number in numbers if layout.tensors[number].is_cpu]
        elif self.written:
            numbers = {*numbers, *(n for n in range(len(layout.tensors)) if layout.identity(n) in self.written)}
        copies = {number: layout.tensors[number].detach().clone() for number in numbers}
        generators = [generator.get_state() for generator in layout.generators]
        moment = self._moment = self._moment + 1
        return Seen(state, moment, layout.fingerprints(moment), copies, generators)

    def changes(self, seen: Seen) -> list[str]:
        """Return the names of the state that has changed since ``seen``. Do not wait for a GPU: changes that only its
        memory shows are left out.
        """
        state, layout = seen.state, seen.state.layout
        names = [] if self.look() is state else [_place(cell, old) for cell, old in state.changed_cells()]
        unseen = seen.rewritten() | _differing(seen)
        names += map(layout.name, dict.fromkeys([*state.written(), *sorted(unseen)]))
        return names + [layout.names[id(one)] for one in _drawn(seen)]

    def after(self, seen: Seen | None) -> Seen | None:
        """Return the part of ``seen`` that the forward's recomputation needs; None if ``seen`` is None, or if the state
        cannot be restored.

        Also record what the forward has written, so that later forwards copy it or keep their graphs.
        """
        if seen is None:
            return None
        state, rewritten = seen.state, seen.rewritten()
        if self.look() is state and not rewritten:
            return seen
        layout = state.layout
        for cell, contents in state.changed_cells():
            if cell.is_fixed(contents):
                self._keep_graphs(cell.name, "changes")
        can_be_put_back = not self.fixed
        for number in {*state.written()} | rewritten:
            tensor, copy = layout.tensors[number], seen.copies.get(number)
            if copy is None:
                self.written.add(layout.identity(number))
                can_be_put_back = False
            elif not _alike(tensor, copy):
                can_be_put_back = False  # its shape, dtype or device is no longer the same
        if not can_be_put_back:
            return None
        contents = [_exchanged(one, _without_history) for one in state.contents]
        if all(map(is_, contents, state.contents)):
            return seen
        self._state = None
        kept = copy_of(state)
        kept.values, kept.contents = [], contents
        return seen._replace(state=kept)

    def exchanged(self, seen: Seen) -> set[Any]:
        """Return the keys of tensors and generators, and ids of containers, that a recomputation would restore."""
        state, layout = seen.state, seen.state.layout
        values = [*(layout.tensors[number] for number in {*state.written()} | _differing(seen)), *_drawn(seen)]
        return {*map(layout.key, values), *(id(cell.place) for cell, _ in state.changed_cells())}

    def _keep_graphs(self, name: str, does: str) -> None:
        if self.fixed:
            self.fixed.add(name)
            return
        self.fixed.add(name)
        warnings.warn(
            f"Pipe: a forward {does} {name!r}, which cannot be put back for a recomputation: its stage keeps its "
            "graphs from now on, as under checkpoint='never'. Attributes of modules, lists, dictionaries and tensors "
            "can be put back",
            stacklevel=2,
        )


class PutBack:
    """Puts back the state of the first run for a recomputation, and restores the present state afterwards.

    This is a class, because a context manager made from a generator would be slower.

    Raises:
        RuntimeError: state that was not copied has changed since the first run; or the recomputation has written to
            state to which the first run did not write.
    """

    __slots__ = ("_copies", "_generators", "_held", "_now", "_seen", "_stamps", "_state")

    def __init__(self, held: HeldState, seen: Seen) -> None:
        self._held = held
        self._seen = seen
        self._now: dict[int, Any] = {}  # contents of cells that differ from ``seen``, by ``id(cell.place)``
        self._copies: dict[int, torch.Tensor] = {}  # the tensors' present contents, by index in the layout
        self._generators: list[Any] = []
        self._state: HeldSnapshot | None = None  # the present state, if nothing has to be put back

    def __enter__(self) -> None:
        held, seen = self._held, self._seen
        before, layout, state = seen.state, seen.state.layout, held.look()
        # Fingerprints can miss a write. If a later forward was found to write to a tensor, the first run may have
        # written to it, too; if the first run did not copy the tensor, its earlier contents are lost.
        lost = []
        if held.written:
            lost = [n for n in layout.watched if n not in seen.copies and layout.identity(n) in held.written]
        if state is before and not lost and not seen.copies and not seen.generators:  # nothing to restore, as usual
            self._state, self._stamps = state, state.stamps
            return
        changed = [] if state is before else before.changed_cells()
        self._now = {id(cell.place): cell.contents() for cell, _ in changed}
        stamps = self._stamps = layout.stamps()
        written = before.written(stamps)
        lost += [number for number in written if number not in seen.copies]
        # A changed object that cannot be restored is an error if forwards of this stage change it. If other code has
        # changed it, the recomputation uses its present value.
        fixed = [cell for cell, contents in changed if cell.is_fixed(contents)]
        names = [*map(layout.name, lost), *[cell.name for cell in fixed if cell.name in held.fixed]]
        changed = [(cell, contents) for cell, contents in changed if cell not in fixed]
        if names:
            raise RuntimeError(_CHANGED_SINCE.format(names[0]))
        self._copies = {number: layout.tensors[number].detach().clone() for number in seen.copies}
        self._generators = [generator.get_state() for generator in layout.generators]
        for generator, its_state in zip(layout.generators, seen.generators, strict=True):
            generator.set_state(its_state)
        for cell, contents in changed:
            cell.put(_exchanged(contents, lambda x: without_history(x.tensor) if type(x) is _Past else x))
        for number, copy in seen.copies.items():
            layout.tensors[number].data.copy_(copy)  # .data does not bump the version; versions are set below
        for number in written:
            unsafe_set_version_counter((layout.tensors[number],), (stamps[number] + _FRESH,))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        held, seen, state = self._held, self._seen, self._state
        layout = seen.state.layout
        names: list[str] = []
        if state is None:
            names = self._restore()
            for generator, its_state in zip(layout.generators, self._generators, strict=True):
                generator.set_state(its_state)
        elif kind is None and held.look() is not state:
            names = self._restore()
        if kind is not None:
            return
        if names:
            raise RuntimeError(_NOT_THE_SAME.format(names[0]))
        # Fingerprints reveal writes to memory that the recomputation has read, even writes that autograd misses.
        if lost := [number for number in sorted(seen.rewritten()) if number not in seen.copies]:
            held.written.update(map(layout.identity, lost))
            raise RuntimeError(_CHANGED_SINCE.format(layout.name(lost[0])))

    def _restore(self) -> list[str]:
        """Restore the state as it was just before the recomputation. Return the names of what cannot be restored."""
        stamps, copies, before = self._stamps, self._copies, self._seen.state
        layout = before.layout
        lost = []
        stale = []  # tensors that graphs made by the recomputation may have saved, so their versions must change
        for cell, contents in zip(layout.cells, before.contents, strict=True):
            wanted = self._now.get(id(cell.place), contents)
            if not _same(cell.contents(), wanted) and not cell.is_fixed(wanted):
                cell.put(wanted)
        after = layout.stamps()
        for number, copy in copies.items():
            tensor = layout.tensors[number]
            if not _alike(tensor, copy):
                tensor.data = copy
                continue
            is_read = tensor.is_cpu and not layout.name(number).endswith(_OF_BATCH_NORMS)
            if is_read and stamps[number] == after[number] and not torch.equal(tensor, copy):
                stale.append(number)
            tensor.data.copy_(copy)
        for number in {*layout.written(stamps, after)}:
            tensor = layout.tensors[number]
            if number not in copies:
                lost.append(layout.name(number))
            elif after[number] != stamps[number]:
                unsafe_set_version_counter((tensor,), (stamps[number],))
        for number in stale:
            unsafe_set_version_counter((layout.tensors[number],), (stamps[number] + 1,))
        return lost


def _differ_plainly(state: HeldSnapshot) -> bool:
    """Return whether only numbers, strings and other plain values have changed, so that the layout is still valid."""
    layout = state.layout
    try:
        now = list(layout.values())
    except (KeyError, RuntimeError):
        return False
    return layout.sizes() == state.sizes and all(
        [a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN)) for a, b in zip(state.values, now, strict=True)]
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether two contents of a cell consist of the same values."""
    if isinstance(one, int) or isinstance(other, int):
        return one is other or bool(isinstance(one, int) and isinstance(other, int) and one == other)
    if len(one) != len(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    pairs = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
    return all([a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b) for a, b in pairs])


def _place(cell: Cell, before: Any) -> str:
    """Return the name of a cell's first changed attribute or key; the cell's own name if there is none."""
    now = cell.contents()
    if not isinstance(now, dict) or not isinstance(before, dict):
        return cell.name
    changed = [key for key in {**now, **before} if now.get(key, cell) is not before.get(key, cell)]
    return ".".join([part for part in (cell.name, str(changed[0]) if changed else "") if part])


class _Past(NamedTuple):
    """Stands for a tensor with a history, without keeping the history alive."""

    tensor: torch.Tensor


def _without_history(value: Any) -> Any:
    return _Past(value.detach()) if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _exchanged(contents: Any, exchange: Any) -> Any:
    """Return the contents of a cell with ``exchange`` applied to each value; the same object if no value changes."""
    if isinstance(contents, int):
        return contents
    if isinstance(contents, dict):
        values = [*contents.values()]
        found = list(map(exchange, values))
        return contents if all(map(is_, values, found)) else dict(zip(contents, found, strict=True))
    found = list(map(exchange, contents))
    return contents if all(map(is_, contents, found)) else found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _differing(seen: Seen) -> set[int]:
    """Return the indices of the tensors in host memory whose contents differ from their copies in ``seen``."""
    tensors = seen.state.layout.tensors
    here = [(n, tensors[n], copy) for n, copy in seen.copies.items() if tensors[n].is_cpu]
    return {n for n, tensor, copy in here if not (_alike(tensor, copy) and torch.equal(tensor, copy))}


def _drawn(seen: Seen) -> list[Any]:
    """Return the random number generators whose state differs from that in ``seen``."""
    both = zip(seen.state.layout.generators, seen.generators, strict=True)
    pairs = [(one, one.get_state(), state) for one, state in both]
    return [one for one, a, b in pairs if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)]


# Shared layers.
#
# If forwards write to state that several stages share, these stages must take turns: they run in the order of the
# model, and the first of them starts a micro-batch only when the last has finished the previous one. If the schedule
# does not allow this order (see ``ActionPlan``), no forward may write.
#
# Stages whose forwards wrote nothing in the last step need not take turns, as long as nothing but parameters has
# changed in their shared state since then. If such a forward writes after all, the step fails.

_WRITTEN_UNSEEN = {"running_mean", "running_var", "fake_quant_enabled"}
"""Names of buffers of batch norms and observers. Kernels write to such layers' buffers without bumping the version."""


def turns_of(layouts: Sequence[HeldLayout], known: Sequence[Turns | None] = ()) -> list[Turns | None]:
    """Return, for each stage, the :class:`Turns` that orders its forwards; None for a stage that shares no state.

    Stages that share state, directly or through other stages, get the same object. ``layouts``: the state of each
    stage's modules. ``known``: turns from earlier calls, which are reused where the same stages share the same state.
    """
    users: dict[Any, list[int]] = {}
    for number, layout in enumerate(layouts):
        for key in layout.shareable:
            users.setdefault(key, []).append(number)
    # For each stage, the lowest stage of its group; a group shares state, directly or through other stages.
    group = list(range(len(layouts)))
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
        """Order the forwards of ``stages``. ``roots``: the state that they share, as pairs of a name and a value."""
        self.stages = tuple(stages)
        self.lock = StageLock()
        """Taken by recomputations, by forwards that may be recomputed later, and by forwards that may write: none of
        them runs while a recomputation has replaced the state.
        """
        self.is_ordered = False
        """True if the running plan makes the stages take turns. The engine sets this."""
        self._roots = roots
        self._held = HeldState(roots)
        self._may_write = self._may_write_at_first = not all(_only_reads(root) for _, root in roots)
        self._code: Sequence[Any] = ()
        # A forward changes the scale of auxiliary losses temporarily. So no other stage may run meanwhile, even if
        # the stages need not take turns.
        self._one_at_a_time = any(isinstance(root, nn.Module) and is_weighted(root) for _, root in roots)
        self._wrote = False
        self._checked: HeldSnapshot | None = None  # the state before this step's last forward that wrote nothing

    def is_like(self, other: Turns) -> bool:
        """Return whether ``other`` is for the same stages and the same shared state."""
        pairs = zip(self._roots, other._roots, strict=False)
        same = len(self._roots) == len(other._roots) and all([one is another for (_, one), (_, another) in pairs])
        return same and self.stages == other.stages

    def begin_step(self, code: Sequence[Any]) -> bool:
        """Begin a step. Return True if its forwards may write to the shared state and so have to run in order.

        ``code``: the functions and training modes of the stages. If it differs from that of the last step, forget which
        forwards have written.
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
        """Check whether a stage's forward, which runs in the block, writes to the shared state.

        Raises:
            RuntimeError: the forward has written to shared state, but the stages do not run in order in this step.
        """
        with self.lock if self._may_write or self._one_at_a_time else nullcontext():
            before = self._held.seen(to_compare=True)
            yield
            layout = before.state.layout
            names = self._held.changes(before) + layout.opaque
            names += [layout.names[id(layer)] for layer in _writing_unseen(layout)]
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
    """Return whether to assume that forwards only read ``root``, until one is found to write to it."""
    if isinstance(root, nn.Module):
        return type(root).__module__.startswith("torch.nn.modules") and not any(
            buffer is not None for buffer in root._buffers.values()
        )
    return isinstance(root, nn.Parameter)


def _writing_unseen(layout: HeldLayout) -> list[nn.Module]:
    """Return the layers that are assumed to write to their buffers. (A comparison would have to wait for a device.)"""
    layers = [layer for layer in layout.modules.values() if not _WRITTEN_UNSEEN.isdisjoint(layer._buffers.keys())]
    layers = [layer for layer in layers if layer.training or "fake_quant_enabled" in layer._buffers]
    return [layer for layer in layers if not all([buffer.is_cpu for buffer in layer.buffers()])]


class StageLock:
    """A reentrant lock that can be copied: the copy is a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return StageLock, ()


# While steps of several pipes run at the same time, no forward may write to state that they share. So this state is
# compared at the beginning of the later step and when the first of them ends. If it has changed, or if a recomputation
# has put back other contents meanwhile, both steps fail. The steps of a pipe inside a stage belong to the outer step.

_lock = threading.RLock()
_running: list[RunningStep] = []
_overlaps: list[_Overlap] = []
# seen() adds 1, so its moments are odd and above 1: never powers of two, at which fingerprints read all memory.
_moments = itertools.count(2, 2)


class RunningStep:
    """A running step of a pipe: a training step, a call of the pipe, or the backward pass of a call."""

    def __init__(self, stages: Sequence[HeldState], owner: object) -> None:
        """Begin a step. ``stages``: the state of every stage. ``owner``: identifies the pipe."""
        self.stages = stages
        self.owner = owner
        self.conflict: str | None = None
        """The name of state that this step shares with another step and that was written; None without a conflict."""

    def shareable(self) -> dict[Any, tuple[str, Any]]:
        """Return the state that other steps may share: for each key, the name and the object."""
        found: dict[Any, tuple[str, Any]] = {}
        for held in self.stages:
            found.update(held.look().layout.shareable)
        return found

    def refuse_conflict(self) -> None:
        """Raise RuntimeError if state was written that this step shares with a step that ran at the same time."""
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
        layout = self._seen.state.layout
        self._names = {layout.key(one): layout.names[id(one)] for one in [*layout.tensors, *layout.generators]}
        self._names.update((id(cell.place), cell.name) for cell in layout.cells)

    def end(self) -> None:
        """Call this when one of the two steps has ended. Make both steps fail if their shared state has changed."""
        if names := self._held.changes(self._seen):
            self.fail(names[0])

    def note(self, exchanged: set[Any]) -> None:
        """Make both steps fail if they share any of the state in ``exchanged``, keys of :meth:`HeldState.exchanged`."""
        if names := [self._names[one] for one in exchanged if one in self._names]:
            self.fail(names[0])

    def fail(self, name: str) -> None:
        for step in self.steps:
            step.conflict = step.conflict or name


@contextmanager
def running_step(stages: Sequence[HeldState], owner: object, around: Sequence[object]) -> Iterator[RunningStep]:
    """Register a step that runs in the block. The caller calls :meth:`RunningStep.refuse_conflict` after the block.

    ``around``: the owners of the outer steps that contain this step.
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
            if step in _running:  # false in a child process that was forked within the block
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
    """Make overlapping steps of two pipes fail if they share state that a recomputation replaces temporarily.

    Call this before the recomputation and, because other steps may have begun meanwhile, after it. During the
    recomputation it finds nothing, because the state is then that of the first run.
    """
    if _overlaps:
        exchanged = held.exchanged(seen)
        with _lock:
            for overlap in _overlaps:
                overlap.note(exchanged)


def _forget() -> None:
    """Forget all steps in a forked child: their threads exist only in the parent, and one may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _overlaps.clear()


os.register_at_fork(after_in_child=_forget)
