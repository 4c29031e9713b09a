"""Reads the contents of Python values of any class: containers, functions, classes, and objects with attributes."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import io
import pathlib
import pickle
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe.pipe.capture.errors import is_users_file
from pymoe.pipe.python_values import MISSING, is_installed, value_in_cell, value_in_slot

CONSTANTS = (
    *(int, float, complex, str, bytes, enum.Enum, slice, range, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that never change: numbers, strings, None and the like."""


class Holder(NamedTuple):
    """Describes how to read the contents of values of one class."""

    read: Callable[[Any], list[Any]] | None = None
    """Returns the objects that a value contains: the same objects as long as nothing has changed."""
    state: Callable[[Any], Any] | None = None
    """Returns the rest of a value's state, to be compared by ``==``."""
    names: Callable[[Any], list[str]] | None = None
    """Returns, for each item of ``read``, the suffix to the value's name with which code accesses it; a single dot
    stands for the attribute dictionary.
    """
    by_identity: bool = False
    """True if another object with the same contents is a different value."""
    is_opaque: bool = False
    """True if the contents cannot be read."""
    is_plain: bool = False
    """True for a container or function whose contents all count as read."""
    is_fixed: bool = False
    """True if the value always contains the same objects."""
    glance: Callable[[Any], list[Any]] | None = None
    """A faster variant of ``read`` that may return more objects."""


_LEAF = Holder(by_identity=True)

_WATCHED_ELSEWHERE = (
    "_asyncio _io _random _socket _thread asyncio ast concurrent inspect io logging numpy pymoe random re socket "
    "subprocess torch typing"
)
_BY_IDENTITY = frozenset(_WATCHED_ELSEWHERE.split())
"""Packages whose objects (locks, files, loggers, random generators) are compared by identity. The use of random
generators is watched elsewhere.
"""
_LOOKED_INTO = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.utils.data.")
"""Modules of torch whose objects are read all the same, because users change numbers in them."""

SCALARS = frozenset({int, str, bytes, bool, float, type(None)})


def is_users_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, of a class that the user wrote or of ``SimpleNamespace``."""
    kind = type(value)
    if kind.__module__ in ("builtins", "torch") or isinstance(value, _NO_OBJECTS):
        return False
    if not isinstance(getattr(value, "__dict__", None), dict):
        return False
    home = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
    return kind is types.SimpleNamespace or is_users_file(home) or kind.__module__ == "__main__"


_NO_OBJECTS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(torch.Tensor, nn.Module),
)


def holder_of(value: Any) -> Holder:
    """Return the :class:`Holder` that reads ``value``. Constants are not allowed, except for members of enums."""
    kind = type(value)
    try:
        found = _holders.get(kind)
        if found is None:
            found = _holders[kind] = _make_holder(kind, value)
    except TypeError:  # a class that cannot be hashed
        found = _make_holder(kind, value)
    return found


_holders: weakref.WeakKeyDictionary[type, Holder] = weakref.WeakKeyDictionary()


def contents(value: Any) -> list[Any]:
    if isinstance(value, CONSTANTS) and not isinstance(value, enum.Enum):
        return []
    read = holder_of(value).read
    return [] if read is None else read(value)


def reachable(values: list[Any], own: Collection[int], seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the values and all objects in them, at any depth, and add these objects to ``seen``, by id.

    Numbers and strings are left out, and so are objects whose ids are in ``own`` or ``seen``, with everything in them.
    """
    queue = list(values)
    for value in queue:
        if type(value) in SCALARS or id(value) in own or id(value) in seen:
            continue
        seen[id(value)] = value  # keeps the value alive, so that its id stays unique
        yield value
        if not has_many_scalars(held := contents(value)):
            queue += held


def has_many_scalars(held: list[Any]) -> bool:
    """Return whether a container's contents, ``held``, are only numbers and strings, and too many to read singly."""
    return len(held) >= 32 and set(map(type, held)) <= SCALARS


# Kinds of containers and objects.


def _make_holder(kind: type, value: Any) -> Holder:
    for types_, holder in _KINDS:
        if issubclass(kind, types_):
            return holder
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, (numpy.generic, numpy.ndarray)):
        return _ARRAY
    if kind in _VIEWS:
        return _VIEWS[kind]
    base = next((holder for each, holder in _CONTAINERS.items() if issubclass(kind, each)), None)
    by_identity = kind is object or kind.__module__.partition(".")[0] in _BY_IDENTITY
    if base is None and by_identity and not kind.__module__.startswith(_LOOKED_INTO):
        return _LEAF
    slots = [
        member
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for member in vars(each).values()
        if isinstance(member, types.MemberDescriptorType)
    ]
    has_dict = isinstance(dict_of(value), dict)
    if base is None and not has_dict and not slots:
        return _pickled(value)
    return _composed(kind, base or Holder(), slots, has_dict)


def _composed(kind: type, base: Holder, slots: list[Any], has_dict: bool) -> Holder:
    """Return a :class:`Holder` that reads what ``base`` reads, attributes and, if it may change, the value's class."""
    about_class = [] if _is_finished(kind) else [kind]
    if not slots and not has_dict and not about_class:
        return base

    def read(value: Any) -> list[Any]:
        found = base.read(value) if base.read is not None else []
        if has_dict:
            found.append(dict_of(value))
        return [*found, *[value_in_slot(slot, value) for slot in slots], *about_class]

    def names(value: Any) -> list[str]:
        found = base.names(value) if base.names is not None else []
        return found + ["."] * has_dict + [f".{slot.__name__}" for slot in slots] + [""] * len(about_class)

    return base._replace(read=read, names=names, is_fixed=False)


def dict_of(value: Any) -> Any:
    """Return an object's dictionary of attributes, without running its class's code; None if it has no dictionary."""
    try:
        if isinstance(value, threading.local):
            return value.__dict__  # a thread-local object: this thread's attributes
        return object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None


def _pickled(value: Any) -> Holder:
    """Return a :class:`Holder` for the class of ``value``, which is written in C and shows no attributes.

    The state of its objects is what ``pickle`` saves. If ``pickle`` cannot save ``value``, they count as unreadable.
    """
    try:
        _bytes_of(value)
    except Exception:
        return Holder(by_identity=True, is_opaque=True)
    return Holder(state=_bytes_of)


def _bytes_of(value: Any) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # iterators of itertools warn that later versions of Python cannot pickle them
        return pickle.dumps(value, 4)


def _is_finished(kind: type) -> bool:
    """Return whether a class is part of Python, torch, numpy or pymoe. Such classes are assumed not to change."""
    home: Any = kind.__module__
    return not isinstance(home, str) or is_installed(home)  # for a metaclass written in C, ``home`` is a descriptor


def _class_attributes(kind: type) -> dict[str, Any]:
    """Return those attributes of a class that can have state: all except ``_abc_*`` and dunders that are no functions.

    Return {} for classes of Python, torch, numpy and pymoe.
    """
    if _is_finished(kind):
        return {}
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_abc_") and (name[:2] != "__" or isinstance(value, types.FunctionType))
    }


def _of_class(value: type) -> list[Any]:
    metaclass = [] if _is_finished(type(value)) else [type(value)]
    return [*_class_attributes(value).values(), *value.__bases__, *metaclass]


def _glance_at_function(function: Any) -> list[Any]:
    return [
        *(function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__),
        *(function.__closure__ or ()),
    ]


def _of_builtin(function: Any) -> list[Any]:
    return [] if isinstance(function.__self__, (types.ModuleType, type(None))) else [function.__self__]


def _of_dict(value: Any) -> list[Any]:
    return [*dict.keys(value), *dict.values(value)]


def _of_ordered(value: Any) -> list[Any]:
    keys = [*collections.OrderedDict.keys(value)]
    return keys + [dict.__getitem__(value, key) for key in keys]


def _names_of_mapping(value: Any) -> list[str]:
    return [""] * len(value) + [f"[{key!r:.80}]" for key in value]


def _attributes_of(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [getattr(value, name, None) for name in names]


def _numbered(value: Any) -> list[str]:
    return [f"[{number}]" for number in range(len(value))]


_CONTAINERS: dict[type, Holder] = {
    collections.OrderedDict: Holder(_of_ordered, names=_names_of_mapping, is_plain=True),
    collections.defaultdict: Holder(
        lambda value: [*_of_dict(value), value.default_factory],
        names=lambda value: [*_names_of_mapping(value), ".default_factory"],
        is_plain=True,
    ),
    dict: Holder(_of_dict, names=_names_of_mapping, is_plain=True),
    list: Holder(list.copy, names=_numbered, is_plain=True),
    tuple: Holder(lambda value: list(tuple.__iter__(value)), names=_numbered, is_plain=True, is_fixed=True),
    collections.deque: Holder(
        lambda value: list(collections.deque.__iter__(value)), lambda value: value.maxlen, _numbered, is_plain=True
    ),
    set: Holder(lambda value: list(set.__iter__(value)), is_plain=True),
    frozenset: Holder(lambda value: list(frozenset.__iter__(value)), is_plain=True, is_fixed=True),
    bytearray: Holder(state=bytes),
    array.array: Holder(state=lambda value: (value.typecode, value.tobytes())),
    weakref.ref: Holder(lambda value: [weakref.ref.__call__(value)]),
    threading.local: Holder(),
}
"""Containers, and how to read them. Subclasses may have more attributes. Derived classes come before their bases,
because the first match counts.
"""

_VIEWS: dict[type, Holder] = {
    types.MappingProxyType: Holder(
        lambda value: [*value.keys(), *value.values()], names=_names_of_mapping, is_plain=True
    ),
    **dict.fromkeys(
        [type({}.keys()), type({}.values()), type({}.items())], Holder(lambda value: [value.mapping], is_plain=True)
    ),
    memoryview: Holder(state=lambda value: (value.format, value.shape, value.tobytes())),
}

# Holders are chosen only by class, so this one has to read numpy arrays of every dtype.
_ARRAY = Holder(
    lambda value: list(value.ravel()) if value.dtype.hasobject else [],
    lambda value: (str(value.dtype), value.shape, None if value.dtype.hasobject else value.tobytes()),
    is_plain=True,
)
_OF_FUNCTION = (".__code__", ".__defaults__", ".__kwdefaults__", ".")
_FUNCTION = Holder(
    # Functions of packages are assumed not to change.
    lambda one: _glance_at_function(one) if is_users_file(one.__code__.co_filename) else [],
    names=lambda one: [*_OF_FUNCTION, *[f".{name}" for name in one.__code__.co_freevars]],
    by_identity=True,
    is_plain=True,
    glance=_glance_at_function,
)
_OF_CODE = attrgetter(
    *["co_code", "co_names", "co_varnames", "co_freevars", "co_filename", "co_firstlineno", "co_name"]
)

_KINDS: tuple[tuple[Any, Any], ...] = (
    (
        type,
        Holder(
            *(_of_class, lambda value: tuple(_class_attributes(value))),
            lambda value: [f".{name}" for name in _class_attributes(value)],
            by_identity=True,
            glance=lambda value: [*vars(value), *vars(value).values(), value.__mro__],
        ),
    ),
    (types.FunctionType, _FUNCTION),
    (types.CodeType, Holder(lambda value: list(value.co_consts), _OF_CODE, is_fixed=True)),
    (types.CellType, Holder(lambda cell: [value_in_cell(cell)], names=lambda value: [""], is_plain=True)),
    (
        types.MethodType,
        Holder(_attributes_of("__self__", "__func__"), names=lambda value: [".__self__", ""], is_fixed=True),
    ),
    (
        (types.BuiltinMethodType, types.MethodWrapperType),
        Holder(_of_builtin, names=lambda value: [".__self__"] * len(_of_builtin(value)), by_identity=True),
    ),
    (
        functools.partial,
        Holder(
            _attributes_of("func", "args", "keywords", "__dict__"),
            names=lambda value: [".func", ".args", ".keywords", "."],
            is_plain=True,
            is_fixed=True,
        ),
    ),
    (type(functools.lru_cache(lambda: None)), Holder(_attributes_of("__wrapped__"), by_identity=True, is_fixed=True)),
    (property, Holder(_attributes_of("fget"), by_identity=True, is_fixed=True)),
    ((staticmethod, classmethod), Holder(_attributes_of("__func__"), by_identity=True, is_fixed=True)),
    (weakref.ProxyTypes, Holder(lambda proxy: [proxy.__repr__.__self__])),
    (
        contextvars.ContextVar,
        Holder(lambda one: [one.get(MISSING)], names=lambda one: [".get()"], by_identity=True, is_plain=True),
    ),
    (
        types.GeneratorType,
        Holder(
            lambda value: list(value.gi_frame.f_locals.values()) if value.gi_frame else [],
            lambda value: value.gi_frame and value.gi_frame.f_lasti,
        ),
    ),
    (torch.Tensor, Holder(_attributes_of("__dict__"), names=lambda value: ["."], by_identity=True)),
    (pathlib.PurePath, Holder(state=str, is_fixed=True)),
    (ctypes.c_int.__mro__[2], Holder(state=bytes)),
    ((types.ModuleType, io.IOBase, type(str.join), type(int.__add__), type(vars(type)["__dict__"])), _LEAF),
)
