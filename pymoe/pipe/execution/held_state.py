"""Finds out what a forward writes: compares the contents of a stage's modules before and after it.

Every forward is compared, since one may begin to write at any time. Python values are compared by identity; tensors by
version counter and address, and tensors in host memory also by fingerprints of the memory, because many writes bypass
the counter (``parameter.data.mul_()``, numpy, kernels of batch norms and observers). Small tensors that are not
parameters are always copied. :mod:`pymoe.pipe.execution.held_values` describes what is found in modules.

State that cannot be put back for a recomputation (attributes of objects other than modules, closures of functions,
attributes of classes, iterators) is compared, but never changed: a stage that changes such state keeps its graphs.

Some writes that change no version are missed: writes to a part of a tensor of more than 4 KiB, in forwards whose sample
of the memory misses that part (the first, second, fourth, eighth... forward of a stage reads everything, and a part
that is written every time is found eventually); writes to CUDA tensors, because reading them would wait for the device;
and writes to tensors of classes other than torch's own. Writes by other threads count as the forward's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from copy import copy as copy_of
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe._torch_private import unsafe_set_version_counter
from pymoe.pipe.execution.graph import without_history
from pymoe.pipe.execution.held_values import PLAIN, Cell, HeldLayout

_FRESH = 1 << 24
"""Added to a tensor's version while it holds earlier contents, so that graphs made then are invalid afterwards."""

_OF_BATCH_NORMS = "mean", "var"
"""Last characters of the names of buffers that batch norms write unnoticed by autograd. Autograd nodes save these
buffers but do not read them, so a graph stays right if their contents change.
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
    """The contents, sizes and stamps of a layout at one time."""

    def __init__(self, layout: HeldLayout) -> None:
        self.layout = layout
        self.sizes = layout.sizes()
        self.values = list(layout.values())
        self.contents = [cell.contents() for cell in layout.cells]
        self.stamps = layout.stamps()

    def differs_in_parameters_alone(self, other: HeldSnapshot | None) -> bool:
        """Return whether nothing except parameters has changed between the two snapshots."""
        if other is None or self.values is not other.values:
            return False
        written = self.layout.written(self.stamps, other.stamps)
        return all([isinstance(self.layout.tensors[number], nn.Parameter) for number in written])


class Seen(NamedTuple):
    """Keeps the part of the state before a forward that a recomputation of the forward needs."""

    state: HeldSnapshot | None
    """The state before the forward; None if it had tensors with a history, whose graphs must not be kept alive."""
    layout: HeldLayout
    contents: Sequence[Any]
    stamps: Sequence[int]
    moment: int
    """The number of the reading that took the fingerprints."""
    fingerprints: Sequence[int]
    """Fingerprints of the memory that the layout watches."""
    copies: dict[int, torch.Tensor]
    """Copies of tensors, by their number in the layout."""
    generators: Sequence[Any]
    """The states of random number generators."""

    def rewritten(self) -> set[int]:
        """Return the numbers of watched tensors whose memory has changed since, as far as it was read."""
        now = self.layout.fingerprints(self.moment)
        if now == self.fingerprints:
            return set()
        both = zip(self.layout.watched, self.fingerprints, now, strict=True)
        return {number for number, one, other in both if one != other}


class HeldState:
    """Compares the contents of some modules before and after the forwards of one stage."""

    def __init__(self, roots: Iterable[tuple[str, Any]], moment: int = 0) -> None:
        """Begin at ``roots``: modules, containers and tensors, with names for messages.

        ``moment``: the number before the first reading of fingerprints.
        """
        self._roots = [*roots]
        self._state: HeldSnapshot | None = None
        self.written: set[int] = set()
        """The tensors that forwards have written to. They are copied regardless of size."""
        self.fixed: set[str] = set()
        """Names of state that forwards change and that cannot be restored. If there is any, no forward is
        recomputed.
        """
        self._moment = moment

    def look(self) -> HeldSnapshot:
        """Return the present state: the same object as long as nothing has changed."""
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
        """Return the state before the next forward; None if the forward cannot be recomputed in any case."""
        layout = self.look().layout
        for name in layout.opaque:
            self._keep_graphs(name, "may change")
        return None if self.fixed else self.seen()

    def seen(self, to_compare: bool = False) -> Seen:
        """Return the present state. ``to_compare``: only for :meth:`changes`; copies no tensors on devices."""
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
        return Seen(
            state, layout, state.contents, state.stamps, moment, layout.fingerprints(moment), copies, generators
        )

    def changes(self, seen: Seen) -> list[str]:
        """Return the names of state changed since ``seen``, except what only a wait for a device would show."""
        layout = seen.layout
        names = [] if self.look() is seen.state else [_place(cell, old) for cell, old in self.changed_cells(seen)]
        written = layout.written(seen.stamps, layout.stamps())
        unseen = seen.rewritten() | _differing(seen)
        names += map(layout.name, dict.fromkeys([*written, *sorted(unseen)]))
        return names + [layout.names[id(one)] for one in _drawn(seen)]

    def after(self, seen: Seen | None) -> Seen | None:
        """Return the part of ``seen`` that the forward's recomputation needs; None: it cannot be restored."""
        if seen is None:
            return None
        rewritten = seen.rewritten()
        if self.look() is seen.state and not rewritten:
            return seen
        layout = seen.layout
        for cell, contents in self.changed_cells(seen):
            if cell.is_fixed(contents):
                self._keep_graphs(cell.name, "changes")
        can_be_put_back = not self.fixed
        for number in {*layout.written(seen.stamps, layout.stamps())} | rewritten:
            tensor, copy = layout.tensors[number], seen.copies.get(number)
            if copy is None:
                self.written.add(layout.identity(number))
                can_be_put_back = False
            elif not _alike(tensor, copy):
                can_be_put_back = False  # the tensor may have another shape now
        if not can_be_put_back:
            return None
        contents = [_exchanged(one, _without_history) for one in seen.contents]
        if all(map(is_, contents, seen.contents)):
            return seen
        self._state = None
        return seen._replace(state=None, contents=contents)

    def exchanged(self, seen: Seen) -> set[Any]:
        """Return the keys of tensors and generators, and ids of containers, that a recomputation would put back."""
        layout = seen.layout
        written = {*layout.written(seen.stamps, layout.stamps())} | _differing(seen)
        values = [*(layout.tensors[number] for number in written), *_drawn(seen)]
        return {*map(layout.key, values), *(id(cell.place) for cell, _ in self.changed_cells(seen))}

    def changed_cells(self, seen: Seen | HeldSnapshot) -> list[tuple[Cell, Any]]:
        """Return the cells that have changed since ``seen`` was made, with their earlier contents."""
        return [
            (cell, contents)
            for cell, contents in zip(seen.layout.cells, seen.contents, strict=True)
            if not _same(cell.contents(), contents)
        ]

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
    """The context of a recomputation: the state is that of the first run, and is restored afterwards.

    A class, because a generator would be slower.

    Raises:
        RuntimeError: state that was not copied has begun to change; or the recomputation has written to state that the
            first run has not written to.
    """

    __slots__ = ("_copies", "_generators", "_held", "_now", "_seen", "_stamps", "_state")

    def __init__(self, held: HeldState, seen: Seen) -> None:
        self._held = held
        self._seen = seen
        self._now: dict[int, Any] = {}  # contents of cells that differ from ``seen``, by ``id(cell.place)``
        self._copies: dict[int, torch.Tensor] = {}  # of present tensors, by their number in the layout
        self._generators: list[Any] = []
        self._state: HeldSnapshot | None = None  # the present state, if nothing has to be put back

    def __enter__(self) -> None:
        held, seen = self._held, self._seen
        layout, state = seen.layout, held.look()
        # Tensors that a later run was found to write may have been written in the first run, too, unnoticed by its
        # fingerprints. They are lost if the first run did not copy them.
        lost = []
        if held.written:
            lost = [n for n in layout.watched if n not in seen.copies and layout.identity(n) in held.written]
        if state is seen.state and not lost and not seen.copies and not seen.generators:  # most forwards write nothing
            self._state, self._stamps = state, state.stamps
            return
        changed = [] if state is seen.state else held.changed_cells(seen)
        self._now = {id(cell.place): cell.contents() for cell, _ in changed}
        stamps = self._stamps = layout.stamps()
        written = layout.written(seen.stamps, stamps)
        lost += [number for number in written if number not in seen.copies]
        # An object that cannot be put back is an error if forwards of this stage change it. Otherwise other code has
        # changed it.
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
            layout.tensors[number].data.copy_(copy)  # autograd must not count this as a change: versions are set below
        for number in written:
            unsafe_set_version_counter((layout.tensors[number],), (stamps[number] + _FRESH,))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        held, seen, state = self._held, self._seen, self._state
        names: list[str] = []
        if state is None:
            names = self._restore()
            for generator, its_state in zip(seen.layout.generators, self._generators, strict=True):
                generator.set_state(its_state)
        elif kind is None and held.look() is not state:
            names = self._restore()
        if kind is not None:
            return
        if names:
            raise RuntimeError(_NOT_THE_SAME.format(names[0]))
        # Memory that the recomputation has read may have been changed without autograd's knowledge.
        if lost := [number for number in sorted(seen.rewritten()) if number not in seen.copies]:
            held.written.update(map(seen.layout.identity, lost))
            raise RuntimeError(_CHANGED_SINCE.format(seen.layout.name(lost[0])))

    def _restore(self) -> list[str]:
        """Restore the state from just before the recomputation. Return the names of state that cannot be restored."""
        stamps, copies, layout = self._stamps, self._copies, self._seen.layout
        lost = []
        stale = []  # graphs made in between may have saved these, so their versions must change
        for cell, contents in zip(layout.cells, self._seen.contents, strict=True):
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
    """Return whether only numbers, strings and the like have changed, so that there are no new objects to walk."""
    layout = state.layout
    try:
        now = list(layout.values())
    except (KeyError, RuntimeError):
        return False
    return layout.sizes() == state.sizes and all(
        [a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN)) for a, b in zip(state.values, now, strict=True)]
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether two contents of a cell are the same values."""
    if isinstance(one, int) or isinstance(other, int):
        return one is other or bool(isinstance(one, int) and isinstance(other, int) and one == other)
    if len(one) != len(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    pairs = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
    return all([a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b) for a, b in pairs])


def _place(cell: Cell, before: Any) -> str:
    """Return the name of the first attribute that has changed in a cell; for a cell without names, the cell's name."""
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
    """Return the contents of a cell with values exchanged; the same object if no value differs."""
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
    """Return the numbers of the copied tensors in host memory whose contents differ now."""
    tensors = seen.layout.tensors
    here = [(n, tensors[n], copy) for n, copy in seen.copies.items() if tensors[n].is_cpu]
    return {n for n, tensor, copy in here if not (_alike(tensor, copy) and torch.equal(tensor, copy))}


def _drawn(seen: Seen) -> list[Any]:
    """Return the random number generators that are in another state now."""
    both = [(one, one.get_state(), state) for one, state in zip(seen.layout.generators, seen.generators, strict=True)]
    return [one for one, a, b in both if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)]
