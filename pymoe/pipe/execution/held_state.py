"""Finds out what a forward writes: compares what the modules of a stage hold before it with what they hold after it.

Nothing is learnt about a stage, since a forward may begin to write at any time. Python values are compared by identity,
tensors by version counter and address. Kernels that write behind the counter's back (batch norms, observers of
quantisation, ``x.data``) are why small tensors are copied in any case.

Attributes of modules are followed, and what lists, dictionaries, sets, deques and tuples among them hold, modules
included. Attributes of objects of other classes are compared, but never changed. Not seen are closures, globals,
``__slots__``, arrays of numpy, and the items of containers of more than a thousand, of which the number alone counts.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe._torch_private import unsafe_set_version_counter
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.execution.graph import memory_of, version_of, without_history

SMALL_BYTES = 1 << 16
"""Tensors of modules up to this size, parameters excepted, are copied before every forward that may run again."""
MANY = 1000
"""Of containers with more items only the number of items is compared."""

_PLAIN = (int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_REGISTRIES = {"_parameters", "_buffers", "_modules"}
# Hooks, which are no state of a forward.
_NOT_FOLLOWED = {*vars(nn.Module())} - _REGISTRIES - {"training"}
_OTHERS_CODE = {"torch", *sys.stdlib_module_names} - {"__main__"}
_FRESH = 1 << 24
"""Added to the version of a tensor while it holds what it held earlier: graphs made then are of no use afterwards."""

_NOT_THE_SAME = (
    "the recomputation of a checkpointed stage has changed {!r}, which its first run has left alone: it must do the "
    "same both times; use checkpoint='never'"
)

_version = attrgetter("_version")


class Cell(NamedTuple):
    """A mutable collection of values: the attributes of a module or an object, or a container."""

    place: Any
    name: str
    keys: tuple[str, ...] = ()
    """The attributes of a module that are followed."""
    is_foreign: bool = False
    """It belongs to an object that is no module, and is not changed from here."""

    def contents(self) -> Any:
        """Return a copy of what is in it."""
        place = self.place
        if len(place) > MANY and not self.keys:
            return len(place)
        if self.keys:
            return {key: value for key, value in place.items() if key not in _NOT_FOLLOWED}
        return dict(place) if isinstance(place, dict) else list(place)

    def is_fixed(self, contents: Any) -> bool:
        """Return whether these contents of another time cannot be put back."""
        return self.is_foreign or isinstance(contents, int) or (len(self.place) > MANY and not self.keys)

    def put(self, contents: Any) -> None:
        """Give it the contents of another time."""
        place = self.place
        if self.keys:
            for key in [key for key in place if key not in contents and key not in _NOT_FOLLOWED]:
                del place[key]
        else:
            place.clear()
        (place.extend if isinstance(place, (list, deque)) else place.update)(contents)


class Layout:
    """The cells and tensors that a walk from ``roots`` finds: modules, containers, tensors."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.names: dict[int, str] = {}  # of modules, tensors and containers, by id
        self.shareable: dict[Any, tuple[str, Any]] = {}
        """What other stages may have, too: modules, tensors (by their memory) and containers, with their names."""
        self.generators: list[torch.Generator] = []
        self._found: dict[int, Any] = {}  # also keeps the ids
        self._cells: tuple[list[Cell], list[Cell], list[Cell], list[Cell]] = [], [], [], []
        tensors: list[torch.Tensor] = []
        pending = deque((root, name, False) for name, root in roots)
        while pending:
            value, name, foreign = pending.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._found:
                continue
            self._found[id(value)] = value
            if not isinstance(value, torch.Tensor):
                pending.extend(self._visit(value, name, foreign))
            elif value.grad_fn is None and not nn.parameter.is_lazy(value):
                self.names[id(value)] = name
                self.shareable["memory of", memory_of(value)] = name, value
                tensors.append(value)
        attributes, dicts, others, large = self._cells
        self.cells = [*attributes, *dicts, *others, *large]
        self._places = [cell.place for cell in self.cells]
        self._attributes = [(itemgetter(*cell.keys), cell.place) for cell in attributes]
        self._dicts = [cell.place for cell in dicts]
        self._others = [cell.place for cell in others]
        self._plain = [tensor for tensor in tensors if _is_plain(tensor)]
        self._odd = [tensor for tensor in tensors if not _is_plain(tensor)]
        self.tensors = self._plain + self._odd
        self.small = [number for number, tensor in enumerate(self._plain) if _is_small(tensor)]

    def _visit(self, value: Any, name: str, foreign: bool) -> Iterator[tuple[Any, str, bool]]:
        """Note a cell, and yield what is in it."""
        attributes, dicts, others, large = self._cells
        path = f"{name}." if name else ""
        if isinstance(value, DeferredBatchNorm):
            return  # it knows recomputations
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return
        if isinstance(value, nn.Module):
            self.modules[id(value)] = value
            followed = {key: item for key, item in value.__dict__.items() if key not in _NOT_FOLLOWED}
            cell = Cell(value.__dict__, name or type(value).__name__, tuple(followed))
            attributes.append(cell)
            self.names[id(value)] = cell.name
            self.shareable[id(value)] = cell.name, value
            for key, item in followed.items():
                if key not in _REGISTRIES:
                    yield item, path + key, False
                    continue
                if id(item) not in self._found:
                    self._found[id(item)] = item
                    dicts.append(Cell(item, cell.name))
                for child, held in item.items():
                    yield held, path + child, False
            return
        module = type(value).__module__.partition(".")[0]
        if module == "pymoe":
            return
        if isinstance(value, (tuple, frozenset)):
            yield from ((item, f"{name}[{number}]", foreign) for number, item in enumerate(value))
            return
        if not isinstance(value, (dict, list, set, deque)):
            inside = getattr(value, "__dict__", None)
            if type(inside) is not dict or isinstance(value, type):
                return
            if module in _OTHERS_CODE and type(value) is not SimpleNamespace:
                return
            value, foreign = inside, True
            self._found[id(inside)] = inside
        cell = Cell(value, name, is_foreign=foreign)
        self.names[id(value)] = name
        if not foreign:
            self.shareable[id(value)] = name, value
        if len(value) > MANY:
            large.append(cell)
        elif isinstance(value, dict):
            dicts.append(cell)
            yield from ((item, name if foreign else f"{name}[{key!r}]", foreign) for key, item in [*value.items()])
        else:
            others.append(cell)
            inside = enumerate([*value])
            yield from ((item, name if foreign else f"{name}[{number}]", foreign) for number, item in inside)

    def sizes(self) -> list[int]:
        return list(map(len, self._places))

    def values(self) -> Iterator[Any]:
        """Iterate over all values; raises KeyError if an attribute is gone."""
        return chain(
            chain.from_iterable([getter(place) for getter, place in self._attributes]),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(self._others),
        )

    def stamps(self) -> list[int]:
        """Return numbers that differ from those of another time where a tensor was written to."""
        plain = self._plain
        stamps = [*map(_version, plain), *map(torch.Tensor.data_ptr, plain)]
        return stamps if not self._odd else stamps + list(map(version_of, self._odd))

    def cheaply_compared(self) -> list[torch.Tensor]:
        """Return the tensors whose contents may be looked at: small ones in memory."""
        return [tensor for number in self.small if (tensor := self.tensors[number]).is_cpu]

    def written(self, before: Sequence[int], now: Sequence[int]) -> list[int]:
        """Return the numbers of the tensors whose stamps differ."""
        if before == now:
            return []
        count = len(self._plain)
        differ = [place for place, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]
        return sorted({place if place < count else place - count for place in differ})


class State:
    """What was there at one time."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sizes = layout.sizes()
        self.values = list(layout.values())
        self.contents = [cell.contents() for cell in layout.cells]
        self.stamps = layout.stamps()

    def with_stamps(self, stamps: list[int]) -> State:
        other = State.__new__(State)
        other.__dict__ = {**self.__dict__, "stamps": stamps}
        return other

    def is_but_for_parameters(self, other: State | None) -> bool:
        """Return whether nothing but parameters has been changed between the two."""
        if other is None or self.values is not other.values:
            return False
        written = self.layout.written(self.stamps, other.stamps)
        return all([isinstance(self.layout.tensors[number], nn.Parameter) for number in written])


class Seen(NamedTuple):
    """What a forward saw: what its recomputation needs."""

    state: State | None
    """As it was then; None: it had tensors with a history, whose graphs are not kept alive."""
    layout: Layout
    contents: Sequence[Any]
    stamps: Sequence[int]
    copies: dict[int, torch.Tensor]
    """Of tensors, by their number in the layout."""
    generators: Sequence[torch.Tensor]
    """The states of random number generators."""


class HeldState:
    """What some modules hold, for the forwards of one stage."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        """``roots``: modules, containers and tensors, with names that messages begin with."""
        self._roots = [*roots]
        self._state: State | None = None
        self._written: set[int] = set()  # tensors that forwards have written to: these are copied, whatever their size
        self._fixed: set[str] = set()  # what forwards change and nobody can put back: no forward is recomputed any more

    def look(self) -> State:
        """Return what is there now: the same object as long as nothing is changed."""
        state = self._state
        if state is not None:
            layout = state.layout
            try:
                is_same = layout.sizes() == state.sizes and all(map(is_, state.values, layout.values()))
            except (KeyError, RuntimeError):  # an attribute is gone; another thread adds to an object's
                is_same = False
            if is_same:
                stamps = layout.stamps()
                if stamps != state.stamps:
                    self._state = state = state.with_stamps(stamps)
                return state
            if _differ_plainly(state):
                self._state = state = State(layout)
                return state
        self._state = state = State(Layout(self._roots))
        return state

    def changes(self, since: State) -> list[str]:
        """Return the names of what has changed since."""
        layout = since.layout
        written = layout.written(since.stamps, layout.stamps())
        names = [layout.names[id(layout.tensors[number])] for number in written]
        return names + [_place(cell, contents) for cell, contents in self._changed_cells(since)]

    def before(self) -> Seen:
        """Return what the forward that is about to run will see."""
        state = self.look()
        layout = state.layout
        numbers: Iterable[int] = layout.small
        if self._written:
            numbers = {*numbers, *(n for n, tensor in enumerate(layout.tensors) if id(tensor) in self._written)}
        copies = {number: layout.tensors[number].detach().clone() for number in numbers}
        generators = [generator.get_state() for generator in layout.generators]
        return Seen(state, layout, state.contents, state.stamps, copies, generators)

    def after(self, seen: Seen) -> Seen | None:
        """Return what a recomputation needs after the forward that saw this; None: it cannot see the same again."""
        if self.look() is seen.state and not self._fixed:
            return seen
        layout = seen.layout
        for cell, contents in self._changed_cells(seen):
            if cell.is_fixed(contents):
                self._keep_graphs(cell)
        can_be_put_back = not self._fixed
        for number in layout.written(seen.stamps, layout.stamps()):
            tensor, copy = layout.tensors[number], seen.copies.get(number)
            if copy is None:
                self._written.add(id(tensor))
                can_be_put_back = False
            elif not _alike(tensor, copy):
                can_be_put_back = False  # it has another shape now, say
        if not can_be_put_back:
            return None
        contents = [_without_histories(one) for one in seen.contents]
        if all(map(is_, contents, seen.contents)):
            return seen
        self._state = None
        return seen._replace(state=None, contents=contents)

    @contextmanager
    def put_back(self, seen: Seen) -> Iterator[None]:
        """A context in which a forward is recomputed: it sees what it has seen, and leaves no trace.

        Raises:
            RuntimeError: something has begun to change since that was not copied; or the recomputation has written to
                what the first run has left alone.
        """
        layout, state = seen.layout, self.look()
        if state is seen.state and not seen.copies and not seen.generators:  # most stages write to nothing
            yield
            if self.look() is not state and (lost := self._restore(seen, {}, state.stamps, {})):
                raise RuntimeError(_NOT_THE_SAME.format(lost[0]))
            return
        changed = [] if state is seen.state else self._changed_cells(seen)
        now = {id(cell.place): cell.contents() for cell, _ in changed}
        stamps = layout.stamps()
        written = layout.written(seen.stamps, stamps)
        lost = [layout.names[id(layout.tensors[number])] for number in written if number not in seen.copies]
        # Others may have changed an object; if this stage does, it keeps the graphs of all forwards that follow.
        fixed = [cell for cell, contents in changed if cell.is_fixed(contents)]
        lost += [cell.name for cell in fixed if cell.name in self._fixed]
        changed = [(cell, contents) for cell, contents in changed if cell not in fixed]
        if lost:
            raise RuntimeError(
                f"a checkpointed stage is to be recomputed, and {lost[0]!r} has changed since its first run, which has "
                "not changed it and may have read it: later forwards have begun to write to it, or somebody else has "
                "(an optimizer between forward and backward). Run the step again, or use checkpoint='never'"
            )
        copies = {number: layout.tensors[number].detach().clone() for number in seen.copies}
        generators = [generator.get_state() for generator in layout.generators]
        for generator, its_state in zip(layout.generators, seen.generators, strict=True):
            generator.set_state(its_state)
        for cell, contents in changed:
            cell.put(_with_new_histories(contents))
        for number, copy in seen.copies.items():
            layout.tensors[number].data.copy_(copy)  # not an edit as autograd counts them: see what follows
        for number in written:
            unsafe_set_version_counter((layout.tensors[number],), (stamps[number] + _FRESH,))
        try:
            yield
        finally:
            lost = self._restore(seen, now, stamps, copies)
            for generator, its_state in zip(layout.generators, generators, strict=True):
                generator.set_state(its_state)
        if lost:
            raise RuntimeError(_NOT_THE_SAME.format(lost[0]))

    def _restore(
        self,
        seen: Seen,
        now: dict[int, Any],
        stamps: Sequence[int],
        copies: dict[int, torch.Tensor],
    ) -> list[str]:
        """Put back what was there before the recomputation; return the names of what cannot be.

        ``now``: the contents of cells, by id of the place; of others they were what the first run saw. ``stamps`` and
        ``copies`` are those of the tensors in the layout.
        """
        lost, layout = [], seen.layout
        for cell, contents in zip(layout.cells, seen.contents, strict=True):
            wanted = now.get(id(cell.place), contents)
            if _same(cell.contents(), wanted):
                continue
            if not cell.is_fixed(wanted):
                cell.put(wanted)
        after = layout.stamps()
        for number, copy in copies.items():
            tensor = layout.tensors[number]
            if not _alike(tensor, copy):
                tensor.data = copy
            else:
                tensor.data.copy_(copy)
        for number in {*layout.written(stamps, after)}:
            tensor = layout.tensors[number]
            if number not in copies:
                lost.append(layout.names[id(tensor)])
            elif after[number] != stamps[number]:
                unsafe_set_version_counter((tensor,), (stamps[number],))
        return lost

    def _changed_cells(self, seen: Seen | State) -> list[tuple[Cell, Any]]:
        """Return the cells that have changed since, and what was in them."""
        return [
            (cell, contents)
            for cell, contents in zip(seen.layout.cells, seen.contents, strict=True)
            if not _same(cell.contents(), contents)
        ]

    def _keep_graphs(self, cell: Cell) -> None:
        if cell.name in self._fixed:
            return
        self._fixed.add(cell.name)
        warnings.warn(
            f"Pipe: a forward changes {cell.name!r}, which cannot be put back for a recomputation: its stage keeps its "
            "graphs from now on, as under checkpoint='never'. Attributes of modules, lists, dictionaries and tensors "
            "can be put back",
            stacklevel=2,
        )


def _differ_plainly(state: State) -> bool:
    """Return whether numbers, strings and the like are all that has changed: then there is nothing new to follow."""
    layout = state.layout
    try:
        now = list(layout.values())
    except (KeyError, RuntimeError):
        return False
    return layout.sizes() == state.sizes and all(
        [a is b or (isinstance(a, _PLAIN) and isinstance(b, _PLAIN)) for a, b in zip(state.values, now, strict=True)]
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether contents of a cell are the same values."""
    if isinstance(one, int) or isinstance(other, int):
        return one is other or bool(isinstance(one, int) and isinstance(other, int) and one == other)
    if len(one) != len(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    pairs = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
    return all([a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b) for a, b in pairs])


def _place(cell: Cell, before: Any) -> str:
    """Return how what has changed in a cell is called."""
    now = cell.contents()
    if not isinstance(now, dict) or not isinstance(before, dict):
        return cell.name
    changed = [key for key in {**now, **before} if now.get(key, cell) is not before.get(key, cell)]
    return ".".join([part for part in (cell.name, str(changed[0]) if changed else "") if part])


class _Past(NamedTuple):
    """Stands for a tensor with a history, without it."""

    tensor: torch.Tensor


def _without_histories(contents: Any) -> Any:
    return _exchanged(contents, lambda x: _Past(x.detach()) if _has_history(x) else x)


def _with_new_histories(contents: Any) -> Any:
    return _exchanged(contents, lambda x: without_history(x.tensor) if type(x) is _Past else x)


def _exchanged(contents: Any, exchange: Any) -> Any:
    """Return the contents of a cell with other values; the same object if none differs."""
    if isinstance(contents, int):
        return contents
    if isinstance(contents, dict):
        values = [*contents.values()]
        found = list(map(exchange, values))
        return contents if all(map(is_, values, found)) else dict(zip(contents, found, strict=True))
    found = list(map(exchange, contents))
    return contents if all(map(is_, contents, found)) else found


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_inference() or tensor.is_quantized or tensor.is_nested)
    )


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether it is copied before every forward. Parameters are not: kernels that write to them are counted."""
    overlaps = any([step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
    return not tensor.requires_grad and type(tensor) is torch.Tensor and tensor.nbytes <= SMALL_BYTES and not overlaps


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
