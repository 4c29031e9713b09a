"""Finds the state that modules hold: all tensors, containers and objects that are reachable from their attributes.

The walk follows attributes of modules; items of lists, dictionaries, sets, deques and tuples, including modules;
functions (closures, defaults and attributes), bound methods and partial functions; objects of other classes with their
``__dict__`` and ``__slots__``; and attributes of classes. Numpy arrays count as tensors. The walk reads the state of
random number generators and the position of most iterators. It notes what cannot be compared at all: generators,
iterators without a readable position, and numpy arrays that torch cannot represent.

It does not follow globals, hooks, weak references, caches of ``functools``, or objects whose classes belong to Python,
torch, numpy or pymoe. In TorchScript modules it follows only tensors and submodules. Of a container with more than a
thousand items it reads only the length.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import (
    BuiltinMethodType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe._runtime import memory_fingerprints
from pymoe.autograd.graph_nodes import version_of
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.execution.graph import memory_of
from pymoe.pipe.python_values import foreign_generator, held_by, is_installed, is_numpy_array, value_in_slot

SMALL_BYTES = 1 << 16
"""Tensors up to this size that require no gradients are copied before every forward that may run again."""
MANY = 1000
"""For containers with more items than this, only the number of items is compared."""
PLAIN = (int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, enum.Enum)
"""Types of immutable values, which are compared by ``==`` instead of by identity."""

_REGISTRIES = {"_parameters", "_buffers", "_modules"}
# Hooks are not part of the state of a forward, so they are not followed.
_NOT_FOLLOWED = {*vars(nn.Module())} - _REGISTRIES - {"training"}
_METHODS = (FunctionType, classmethod, staticmethod, property, MemberDescriptorType, GetSetDescriptorType)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)

_version, _nbytes, _is_cpu = attrgetter("_version"), attrgetter("nbytes"), attrgetter("is_cpu")


class View:
    """A read-only sequence of values that are read from an object that is not a container."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


class Cell(NamedTuple):
    """A mutable collection of values: a container, a :class:`View`, or the attributes of a module, object or class."""

    place: Any
    name: str
    keys: tuple[str, ...] = ()
    """The attributes of a module or class that the walk follows."""
    is_foreign: bool = False
    """True if the cell belongs to an object that is not a module. Such a cell is compared, but never restored."""

    def contents(self) -> Any:
        """Return a copy of the contents; of a container with more than MANY items, only their number."""
        place = self.place
        if len(place) > MANY and not self.keys:
            return len(place)
        if self.keys:
            return {key: value for key, value in place.items() if key not in _NOT_FOLLOWED}
        return dict(place) if isinstance(place, dict) else list(place)

    def is_fixed(self, contents: Any) -> bool:
        """Return whether ``contents``, earlier contents of this cell, cannot be put back."""
        return self.is_foreign or isinstance(contents, int) or (len(self.place) > MANY and not self.keys)

    def put(self, contents: Any) -> None:
        """Restore earlier contents of this cell."""
        place = self.place
        if self.keys:
            for key in [key for key in place if key not in contents and key not in _NOT_FOLLOWED]:
                del place[key]
        else:
            place.clear()
        (place.extend if isinstance(place, (list, deque)) else place.update)(contents)


Found = Iterator[tuple[Any, str, bool]]
"""Values still to be visited, each with its name and a flag: true if an object that is not a module holds the value."""


class HeldLayout:
    """The cells and tensors that a walk from ``roots`` (modules, containers, tensors) finds."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.names: dict[int, str] = {}  # names of modules, tensors and containers, by id
        self.shareable: dict[Any, tuple[str, Any]] = {}
        """Values that other stages may hold, too (modules, tensors, containers, generators), with their names. Keys are
        ids of values; for tensors, of their memory.
        """
        self.generators: list[Any] = []
        """Random number generators: they have ``get_state`` and ``set_state``."""
        self.opaque: list[str] = []
        """The names of values that may change unnoticed."""
        self._found: dict[int, Any] = {}  # values by id; keeps them alive, so that ids stay unique
        self._cells: tuple[list[Cell], list[Cell], list[Cell], list[Cell]] = [], [], [], []
        # Numpy arrays and foreign generators, by id of the tensor or ``ForeignGenerator`` that was made here for each.
        self._originals: dict[int, Any] = {}
        self._all_tensors: list[torch.Tensor] = []
        pending = deque((root, name, False) for name, root in roots)
        while pending:
            value, name, foreign = pending.popleft()
            if isinstance(value, PLAIN) or id(value) in self._found:
                continue
            self._found[id(value)] = value
            pending.extend(self._visit(value, name, foreign))
        attributes, dicts, others, large = self._cells
        self.cells = [*attributes, *dicts, *others, *large]
        self._places = [cell.place for cell in self.cells]
        self._attributes = [(itemgetter(*cell.keys), cell.place) for cell in attributes]
        # Empty containers are left out: their size shows when they get items (unless the class defines its own length).
        self._dicts = [cell.place for cell in dicts if cell.place or type(cell.place) is not dict]
        self._others = [cell.place for cell in others]
        self._plain = [tensor for tensor in self._all_tensors if _is_plain(tensor)]
        self._odd = [tensor for tensor in self._all_tensors if not _is_plain(tensor)]
        self.tensors = self._plain + self._odd
        self.small = [number for number, tensor in enumerate(self._plain) if _is_small(tensor)]
        small = {*self.small}
        self.watched = [n for n, tensor in enumerate(self._plain) if n not in small and tensor.is_cpu]
        """The indices of the tensors for which :meth:`fingerprints` are taken."""
        self._watched = [self._plain[number] for number in self.watched]
        self._strided = [(n, span) for n, tensor in enumerate(self._watched) if (span := _span(tensor)) is not None]

    def _visit(self, value: Any, name: str, foreign: bool) -> Found:
        """Record ``value``, and yield the values in it. ``foreign``: it was found in an object that is not a module."""
        if isinstance(value, torch.Tensor):
            if value.grad_fn is None and not nn.parameter.is_lazy(value):
                self.shareable["memory of", memory_of(value)] = name, value
                self._note_tensor(value, name)
        elif isinstance(value, DeferredBatchNorm):
            pass  # this layer handles recomputations itself
        elif isinstance(value, nn.Module):
            yield from self._visit_module(value, name)
        elif type(value).__module__.partition(".")[0] == "pymoe":
            pass  # objects of pymoe itself, such as hooks and handles; models do not compute with them
        elif isinstance(value, (tuple, frozenset)):
            yield from ((item, f"{name}[{number}]", foreign) for number, item in enumerate(value))
        elif isinstance(value, (dict, list, set, deque)):
            yield from self._visit_container(value, name, foreign)
            yield from self._visit_object(value, name)
        elif isinstance(value, functools.partial):
            yield from ((one, name, foreign) for one in (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            yield from ((one, name, foreign) for one in (value.__self__, value.__func__))
        elif isinstance(value, BuiltinMethodType):
            if not isinstance(value.__self__, (type, ModuleType)):
                yield value.__self__, name, foreign
        elif isinstance(value, FunctionType):
            yield from self._visit_function(value, name)
        elif isinstance(value, type):
            yield from self._visit_class(value)
        elif (source := value if isinstance(value, torch.Generator) else foreign_generator(value)) is not None:
            self.generators.append(source)
            self._originals[id(source)] = value
            self.names[id(source)] = name
            self.shareable[id(value)] = name, value
        elif is_numpy_array(value):
            yield from self._visit_array(value, name)
        elif isinstance(value, GeneratorType) or (
            hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")
        ):
            self._visit_iterator(value, name)
        else:
            yield from self._visit_object(value, name)

    def _visit_module(self, value: nn.Module, name: str) -> Found:
        self.modules[id(value)] = value
        path = f"{name}." if name else ""
        followed = {key: item for key, item in value.__dict__.items() if key not in _NOT_FOLLOWED}
        cell = Cell(value.__dict__, name or type(value).__name__, tuple(followed))
        self._cells[0].append(cell)
        self.names[id(value)] = cell.name
        self.shareable[id(value)] = cell.name, value
        for key, item in followed.items():
            if key not in _REGISTRIES:
                yield item, path + key, False
                continue
            if id(item) not in self._found:
                self._found[id(item)] = item
                if isinstance(item, dict):  # not in TorchScript modules, whose keys are fixed
                    self._cells[1].append(Cell(item, cell.name))
            for child, held in item.items():
                yield held, path + child, False
        yield from self._visit_slots(value, cell.name)

    def _visit_container(self, value: Any, name: str, foreign: bool) -> Found:
        _, dicts, others, large = self._cells
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

    def _visit_object(self, value: Any, name: str) -> Found:
        """Yield an object's attribute values and its class; nothing if a library defines the class (unless it is
        ``SimpleNamespace``).
        """
        if not _is_users(type(value)) and type(value) is not SimpleNamespace:
            return
        inside = getattr(value, "__dict__", None)
        if type(inside) is dict and id(inside) not in self._found:
            self._found[id(inside)] = inside
            yield from self._visit_container(inside, name, True)
        yield from self._visit_slots(value, name)

    def _visit_slots(self, value: Any, name: str) -> Found:
        """Yield the values in an object's slots, then its class and base classes, except those of libraries."""
        classes = [one for one in type(value).__mro__ if _is_users(one)]
        slots = [slot for one in classes for slot in vars(one).values() if isinstance(slot, MemberDescriptorType)]
        if slots:
            yield from self._visit_view(lambda: [value_in_slot(slot, value) for slot in slots], name)
        yield from ((one, "", True) for one in classes)

    def _visit_class(self, value: type) -> Found:
        if not _is_users(value):
            return
        name = value.__qualname__.rpartition(".<locals>.")[2]
        named = {key: item for key, item in vars(value).items() if not (key[:2] == "__" == key[-2:])}
        held = {key: item for key, item in named.items() if not isinstance(item, _METHODS)}
        # itemgetter returns a tuple only for two or more keys, so add two keys that every class has.
        self._cells[0].append(Cell(vars(value), name, ("__module__", "__doc__", *held), True))
        yield from ((item, f"{name}.{key}", True) for key, item in held.items())
        functions = [(key, getattr(item, "__func__", item)) for key, item in named.items()]
        yield from ((one, f"{name}.{key}", True) for key, one in functions if _may_hold(one))
        yield from ((one, "", True) for one in value.__bases__)

    def _visit_function(self, value: FunctionType, name: str) -> Found:
        """Yield the values that a function holds. If :func:`is_installed` is true of the Python module that defines the
        function, yield only the functions and ``nn.Module``s among these values.
        """
        held = held_by(value)
        if is_installed(value.__globals__.get("__name__", "")):
            yield from ((one, name, True) for one in held if isinstance(one, (*_FUNCTIONS, nn.Module)))
            return
        if held:
            yield from self._visit_view(lambda: held_by(value), name)
        self._found[id(vars(value))] = vars(value)
        yield from self._visit_container(vars(value), name, True)

    def _visit_array(self, value: Any, name: str) -> Found:
        if value.dtype.hasobject:
            if value.size > MANY:
                self.opaque.append(name)
            else:
                yield from self._visit_view(lambda: value.ravel().tolist(), name)
        elif not value.flags.writeable:
            if is_numpy_array(value.base):  # other code may write to the base array
                yield value.base, name, True
        elif value.size:
            tensor = _as_tensor(value)
            if tensor is None:
                self.opaque.append(name)
            else:
                self._originals[id(tensor)] = value
                self.shareable[id(value)] = name, value
                self._note_tensor(tensor, name)

    def _visit_iterator(self, value: Any, name: str) -> None:
        if isinstance(value, GeneratorType):
            if value.gi_frame is not None:  # the generator has not ended
                self.opaque.append(name)
        elif (read := _progress_of(value)) is not None:
            deque(self._visit_view(read, name), 0)
        else:
            self.opaque.append(name)

    def _visit_view(self, read: Callable[[], Sequence[Any]], name: str) -> Found:
        self._cells[2].append(Cell(View(read), name, is_foreign=True))
        yield from ((item, name, True) for item in read())

    def _note_tensor(self, tensor: torch.Tensor, name: str) -> None:
        self.names[id(tensor)] = name
        self._all_tensors.append(tensor)

    def identity(self, number: int) -> int:
        """Return the id of a tensor, or of the array that the tensor represents. The id is the same in all layouts."""
        tensor = self.tensors[number]
        return id(self._originals.get(id(tensor), tensor))

    def key(self, value: Any) -> Any:
        """Return the key in :attr:`shareable` that identifies a tensor or a generator in all layouts."""
        original = self._originals.get(id(value), value)
        return ("memory of", memory_of(original)) if isinstance(original, torch.Tensor) else id(original)

    def name(self, number: int) -> str:
        """Return the name of a tensor."""
        return self.names[id(self.tensors[number])]

    def sizes(self) -> list[int]:
        return list(map(len, self._places))

    def values(self) -> Iterator[Any]:
        """Iterate over the values in all cells, except in large containers. Raise KeyError if an attribute is gone."""
        attributes = [getter(place) for getter, place in self._attributes]
        return chain.from_iterable([*attributes, *map(dict.values, self._dicts), *self._others])

    def holds(self, sizes: list[int], values: list[Any]) -> bool:
        """Return whether the cells have these sizes and contain these same objects.

        Raises:
            KeyError: an attribute is gone.
        """
        return self.sizes() == sizes and all(map(is_, values, self.values()))

    def stamps(self) -> list[int]:
        """Return the version counters and addresses of the tensors. They change if a tensor is moved, or written to by
        an operation that bumps its version.
        """
        plain = self._plain
        stamps = [*map(_version, plain), *map(torch.Tensor.data_ptr, plain)]
        return stamps if not self._odd else stamps + list(map(version_of, self._odd))

    def fingerprints(self, moment: int) -> list[int]:
        """Return a fingerprint of the memory of each tensor in :attr:`watched`, to find writes that bypass the version.

        Of large memory only a sample is read, at positions that depend on ``moment``, so a write can be missed. If
        ``moment`` is a power of two, all memory is read.
        """
        tensors = self._watched
        if not tensors:
            return []
        memory, sizes = [*map(torch.Tensor.untyped_storage, tensors)], [*map(_nbytes, tensors)]
        for place, span in self._strided:
            sizes[place] = span
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        if not all(map(_is_cpu, tensors)):  # some were moved to a device after the walk
            addresses = [where if tensor.is_cpu else 0 for where, tensor in zip(addresses, tensors, strict=True)]
        allocations, allocated = map(torch.UntypedStorage.data_ptr, memory), map(torch.UntypedStorage.nbytes, memory)
        is_whole = moment & (moment - 1) == 0
        return memory_fingerprints(addresses, sizes, [*allocations], [*allocated], moment, is_whole)

    def written(self, before: Sequence[int], now: Sequence[int]) -> list[int]:
        """Return the indices of the tensors whose stamps in ``before`` and in ``now`` differ."""
        if before == now:
            return []
        count = len(self._plain)
        differ = [place for place, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]
        return sorted({place if place < count else place - count for place in differ})


def _is_users(kind: type) -> bool:
    return not is_installed(kind.__module__)


def _may_hold(value: Any) -> bool:
    """Return whether a class attribute is a callable that may hold state.

    True for bound methods, partial functions, and functions with attributes. Also for functions with a value in their
    closure or defaults that is neither an immutable constant nor a class.
    """
    if not isinstance(value, FunctionType):
        return isinstance(value, (MethodType, functools.partial))
    return bool(vars(value)) or not all([isinstance(one, (*PLAIN, type)) for one in held_by(value)])


def _as_tensor(array: Any) -> torch.Tensor | None:
    """Return a tensor that shares an array's memory, or None if that is impossible."""
    try:
        if array.flags.forc:
            array = array.ravel(order="K").view("u1")
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


def _progress_of(iterator: Any) -> Callable[[], Sequence[Any]] | None:
    """Return a function that reads the position of an iterator, or None if the position is not readable."""
    if isinstance(iterator, itertools.count):
        how_far: Callable[[Any], Any] = repr
    elif hasattr(iterator, "__length_hint__"):
        how_far = _items_left
    else:
        return None
    last = [how_far(iterator)]

    def read() -> Sequence[Any]:
        now = how_far(iterator)
        if now != last[0]:  # keep the same object while the position is unchanged
            last[0] = now
        return last

    return read


def _items_left(iterator: Any) -> int:
    try:
        return operator.length_hint(iterator, -1)
    except (TypeError, RuntimeError):  # an endless itertools.repeat(), or a dictionary that has changed its size
        return -1


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_inference() or tensor.is_quantized or tensor.is_nested)
    )


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is copied before every forward. Parameters never are: there are too many."""
    overlaps = any([step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
    return not tensor.requires_grad and type(tensor) is torch.Tensor and tensor.nbytes <= SMALL_BYTES and not overlaps


def _span(tensor: torch.Tensor) -> int | None:
    """Return the number of bytes from the first element to the end of the last; None if the tensor has no gaps, or no
    elements.
    """
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return None if not tensor.numel() or last + 1 == tensor.numel() else (last + 1) * tensor.itemsize
