"""Snapshots of Python values. They tell whether values and their contents, at any depth, are still the same, and can
restore them.
"""

from __future__ import annotations

import array
import builtins
import copy
import enum
import functools
import marshal
import math
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from pymoe.pipe.capture.contents import (
    CONSTANTS,
    SCALARS,
    Holder,
    contents,
    dict_of,
    has_many_scalars,
    holder_of,
    is_users_object,
)
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.python_values import MISSING, is_numpy_array


class _Contents(NamedTuple):
    """A container and a copy of its contents."""

    name: str
    container: Any
    before: Any

    def changes(self) -> list[str]:
        """Return the names of what has changed: the keys of a dictionary, or the container."""
        now, before = self.container, self.before
        if isinstance(now, dict):
            keys = [key for key in {**before, **now} if now.get(key, MISSING) is not before.get(key, MISSING)]
            return [f"{self.name}.{key}".lstrip(".") for key in keys]
        if isinstance(now, set):
            return [] if now == before else [self.name]
        if is_array(now):
            return [] if bytes(now) == bytes(before) else [self.name]
        is_same = len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
        return [] if is_same else [self.name]

    def restore(self) -> None:
        if isinstance(self.container, list) or is_array(self.container):
            self.container[:] = self.before
        elif isinstance(self.container, deque):
            self.container.clear()
            self.container.extend(self.before)
        else:
            self.container.clear()
            self.container.update(self.before)


def is_array(value: Any) -> bool:
    """Return whether a value is a ``bytearray``, an ``array.array``, or a numpy array of numbers, not a scalar."""
    if isinstance(value, (bytearray, array.array)):
        return True
    return is_numpy_array(value) and value.ndim > 0 and not value.dtype.hasobject


class Changes(list[str]):
    """A list to which :meth:`restore` adds the names of changed values. Keeps containers' contents, to undo changes."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, _Contents] = {}

    def remember(self, container: Any, name: str) -> None:
        """Remember the present contents of a container named ``name``, and of the containers in it, at any depth."""
        queue = [(name, container)]
        for name, container in queue:
            if id(container) in self._memory or type(container) in SCALARS:
                continue
            copied: Any = None
            if isinstance(container, dict):
                copied = dict(container)
                queue += [(f"{name}.{key}".lstrip("."), value) for key, value in container.items()]
            elif isinstance(container, (list, tuple, deque)):
                copied = None if isinstance(container, tuple) else list(container)
                queue += [(name, value) for value in container]
            elif isinstance(container, set):
                copied = set(container)
            elif is_array(container):
                copied = copy.copy(container)
            elif is_users_object(container):
                queue.append((name, container.__dict__))
            elif isinstance(container, (types.FunctionType, types.MethodType, functools.partial)):
                queue += [(name, held) for held in contents(container) if not isinstance(held, type)]
            if copied is not None:
                self._memory[id(container)] = _Contents(name, container, copied)

    def now(self) -> list[str]:
        """Return the names of the values that have changed so far."""
        return [name for each in self._memory.values() for name in each.changes()]

    def restore(self) -> None:
        """Undo the changes, and add the names of the changed values to this list."""
        for each in self._memory.values():
            if names := each.changes():
                each.restore()
                self += names


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[Changes]:
    """Yield a list, and after the block restore the attributes of all modules of ``model``.

    The attributes refer to the same objects again, and lists, deques, dicts, sets, arrays and objects of the user's
    classes have their earlier contents again, at any depth. Changes inside tensors and other objects stay. When the
    block ends, the names of the values that have changed are added to the list.
    """
    changes = Changes()
    for path, module in model.named_modules():
        changes.remember(module.__dict__, path)
    try:
        yield changes
    finally:
        changes.restore()


def restorer(value: Any) -> Callable[[], None]:
    """Return a function that restores the contents that a container or a user's object has now, at any depth."""
    changes = Changes()
    changes.remember(value, "")
    return changes.restore


@contextmanager
def patched(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of objects, given as (owner, name, value), during the block."""
    before = [(owner, name, vars(owner).get(name, MISSING)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is not MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


# Comparison of values with earlier ones.

_MAX_VALUES = 1_000_000


class Unwatchable(Exception):
    """Carries the name of a value, and the reason why changes of the value cannot be noticed."""


class Same:
    """Compares a value by identity: two instances are equal if they contain the very same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


Tokens = list[Any]
"""The tokens of a value and of everything in it, in order, which are equal only for equal values. Numbers and strings
are compared by type and value, containers and objects by class and contents, functions and classes by identity and
contents, modules and tensors by identity.
"""


def freeze(
    value: Any,
    own: Collection[int] = (),
    watch: Watch | None = None,
    names: list[str] | None = None,
    is_strict: bool = False,
) -> Tokens:
    """Return the tokens of a value and of everything in it, at any depth. Equal tokens mean equal values.

    ``own``: ids of objects whose contents are ignored, because they are checked elsewhere. ``watch``: gets the values
    that may change. ``names``: a list with the name of the value; the names of the values in it are appended, in the
    order of the tokens. Raises Unwatchable if the value contains more than a million others or, with ``is_strict``, if
    the value, or one in its containers, is of a class that hides its state.
    """
    tokens: Tokens = []
    seen: dict[int, int] = {}
    queue, strict = [value], [is_strict]
    for number, value in enumerate(queue):
        kind = type(value)
        if kind in SCALARS:
            tokens.append(_scalar(value))
            continue
        if id(value) in own:
            tokens.append((Same(value),))
            continue
        before = seen.setdefault(id(value), number)
        if before != number:
            tokens.append(("again", before))
            continue
        if isinstance(value, CONSTANTS) and not isinstance(value, enum.Enum):
            held = [more] if (more := dict_of(value)) else []
            tokens.append((_scalar(value), len(held)))
            suffixes = ["."]
            is_plain = False
        else:
            holder = holder_of(value)
            if holder.is_opaque and strict[number]:
                raise Unwatchable(
                    _name(names, number), f"a {kind.__module__}.{kind.__qualname__} does not show its state"
                )
            held = [] if holder.read is None else holder.read(value)
            state = None if holder.state is None else holder.state(value)
            if watch is not None:
                watch.add(value, holder, held, state)
            # ``pickle`` does not find some of Python's own classes, such as the class of code objects.
            is_found = kind.__module__ != "builtins" or hasattr(builtins, kind.__name__)
            of_kind = Same(value) if holder.by_identity else kind if is_found else kind.__name__
            tokens.append((of_kind, len(held), state))
            if has_many_scalars(held):
                tokens[-1] = *tokens[-1], marshal.dumps(held, 2)
                continue
            suffixes = [] if names is None or holder.names is None else holder.names(value)
            is_plain = holder.is_plain and strict[number]
        queue += held
        strict += [is_plain] * len(held)
        if len(queue) > _MAX_VALUES:
            raise Unwatchable(_name(names, number), f"it holds more than {_MAX_VALUES:,} values")
        if names is not None:
            _name_held(names, names[number], suffixes, len(held))
    return tokens


def _scalar(value: Any) -> tuple[Any, ...]:
    if isinstance(value, float):
        return type(value), "nan" if math.isnan(value) else float(value).hex()  # all NaN are equal, 0.0 is not -0.0
    if isinstance(value, complex):
        return type(value), _scalar(value.real), _scalar(value.imag)
    if isinstance(value, slice):
        return slice, repr(value)
    return type(value), value


def _name(names: list[str] | None, number: int) -> str:
    return "" if names is None else names[number].removesuffix(".")


def _name_held(names: list[str], name: str, suffixes: list[str], count: int) -> None:
    """Append to ``names`` a name for each of the ``count`` values within the value named ``name``.

    A name that ends with a dot is that of an object's dictionary of attributes.
    """
    if name.endswith("."):
        suffixes = [suffix.strip("[]'\"") for suffix in suffixes]
    names += [name + suffix for suffix in suffixes] + [name] * (count - len(suffixes))


def name_within(name: str, get: Callable[[Any], Any], wanted: Any) -> str | None:
    """Return the name of ``wanted`` within a value, or None if the value does not contain it.

    ``name`` is the name of the value; ``get`` takes a default and returns the value, or the default if there is none.
    """
    names = [name]
    tokens = freeze(get(MISSING), names=names)
    where = (number for number, token in enumerate(tokens) if isinstance(token[0], Same) and token[0].value is wanted)
    return next((names[number].removesuffix(".") for number in where), None)


class Watch:
    """Detects cheaply that watched values may have changed, by comparing the identities of the objects in them."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Any, Any, list[Any], Any, Any]] = {}

    def add(self, value: Any, holder: Holder, held: list[Any], state: Any) -> None:
        """Watch ``value``. ``held`` and ``state`` are the contents and the state that ``holder`` has read from it."""
        if holder.is_fixed:
            return
        if holder.glance is not None:
            if held:
                self._watched[id(value)] = value, holder.glance, holder.glance(value), None, None
        elif holder.read is not None or holder.state is not None:
            self._watched[id(value)] = value, holder.read, held, holder.state, state

    def is_untouched(self) -> bool:
        """Return whether all watched values still have their earlier contents."""
        for value, read, held, state_of, state in self._watched.values():
            if read is not None:
                now = read(value)
                if len(now) != len(held) or not all(map(is_, now, held)):
                    return False
            if state_of is not None and state_of(value) != state:
                return False
        return True


NEVER = object()
"""Stands for a value that has not been read yet; no variable of a model contains this object."""

Place = tuple[str, Callable[[Any], Any], str]
"""The name of a value; a function that takes a default and returns the value, or the default if there is none; and a
format string for messages, which takes the name of the value or of something in it."""


class Snapshots:
    """Snapshots of the values at several places, at any depth. ``tokens``: the tokens of earlier values, to be used
    instead of the present values.

    Raises:
        CaptureError: with ``is_strict``, if later changes of a value could not be noticed.
    """

    def __init__(
        self,
        places: Sequence[Place],
        own: Collection[int],
        tokens: Sequence[Tokens] | None = None,
        is_strict: bool = True,
    ) -> None:
        self._own = own
        self._watch = Watch()
        self._now: list[list[Any]] = []
        if tokens is not None:
            self._now = [[*place, NEVER, kept] for place, kept in zip(places, tokens, strict=True)]
            return
        made: dict[int, Tokens] = {}
        for place in places:
            value = place[1](MISSING)
            if id(value) not in made:
                made[id(value)] = self._freeze(place[0], value, is_strict)
            self._now.append([*place, value, made[id(value)]])

    @property
    def tokens(self) -> list[Tokens]:
        """Return the tokens of the snapshots, in the order of the places."""
        return [entry[4] for entry in self._now]

    def change(self) -> str | None:
        """Return a description of a value that has changed since the snapshots were made; None if none has changed."""
        for entry in self._now:
            if entry[1](MISSING) is not entry[3] and (name := self._look_into(entry, self._watch)) is not None:
                return name
        if self._watch.is_untouched():
            return None
        watch = Watch()
        for entry in self._now:
            if (name := self._look_into(entry, watch)) is not None:
                return name
        self._watch = watch
        return None

    def _look_into(self, entry: list[Any], watch: Watch) -> str | None:
        name, get, words, _, before = entry
        value = get(MISSING)
        names = [name]
        try:
            if freeze(value, self._own, watch) == before:
                entry[3] = value
                return None
            now = freeze(value, self._own, names=names)
        except Unwatchable:
            return str(words.format(name))
        differs = (number for number, (one, other) in enumerate(zip(now, before, strict=False)) if one != other)
        return str(words.format(names[next(differs, 0)].removesuffix(".")))

    def _freeze(self, name: str, value: Any, is_strict: bool) -> Tokens:
        try:
            return freeze(value, self._own, self._watch, is_strict=is_strict)
        except Unwatchable:
            if not is_strict:
                return []
        try:
            return freeze(value, self._own, names=[name], is_strict=True)
        except Unwatchable as error:
            where, why = error.args
            raise CaptureError(
                f"it reads {where!r}, whose later changes could not be noticed: {why}. Keep what the forward needs of "
                "it in an attribute of its own"
            ) from None
