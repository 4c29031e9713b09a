"""Values outside of a model that its code may read: global variables, those of enclosing functions, defaults.

They are found in the bytecode, not seen when it runs: variables by name, and of Python modules and classes the
attributes that the code takes of them.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import nn

from pymoe.pipe.capture.errors import is_library, is_users_file
from pymoe.pipe.capture.snapshots import CONSTANTS, CONTAINERS, MISSING, freeze, is_users_object, restorer
from pymoe.pipe.module_hooks import FORWARD_HOOKS

_CACHE = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class ExternalValue(NamedTuple):
    """The place of such a value: a dictionary and a key, or a cell of a function."""

    label: str
    where: Any
    key: str | None

    def value(self, missing: Any = None) -> Any:
        """Return what is there now."""
        if self.key is not None:
            return self.where.get(self.key, missing)
        try:
            return self.where.cell_contents
        except ValueError:  # nothing yet
            return missing

    def assign(self, value: Any) -> None:
        """Put another value there."""
        if self.key is None:
            self.where.cell_contents = value
        else:
            self.where[self.key] = value

    def frozen(self) -> Any:
        """Return a snapshot of what is there now."""
        return freeze(self.value(MISSING))

    def restorer(self) -> Callable[[], None]:
        """Return a function that puts back what is there now, with what that holds now."""
        value = self.value()
        restore_contents = restorer(value)

        def restore() -> None:
            self.assign(value)
            restore_contents()

        return restore


class ClassAttributes:
    """The attributes of a class as a dictionary."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def get(self, name: str, missing: Any) -> Any:
        return getattr(self._kind, name, missing)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)


def is_within(path: str, outer: Collection[str]) -> bool:
    """Return whether a module, by its qualified name, is one of ``outer``, or in one of them."""
    return any(path == each or path.startswith(f"{each}.") for each in outer)


def users_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the forward hooks of a module that neither torch nor a split point has put there."""
    for kind in FORWARD_HOOKS:
        for hook in module.__dict__[kind].values():
            if not getattr(hook, "is_boundary", False) and not _module_of(hook).startswith("torch."):
                yield hook


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    named = function if isinstance(function, (types.FunctionType, types.MethodType)) else type(function)
    return str(named.__module__)


class ExternalValues:
    """What the code of a model, without that of its opaque modules, may read outside of the model."""

    def __init__(self, model: nn.Module, opaque: Collection[str] = ()) -> None:
        self.places: list[ExternalValue] = []
        self.caches: dict[int, Any] = {}
        """The functions with ``functools.lru_cache`` that it calls, by their ids."""
        self.files: set[str] = set()
        """Those of the model's classes."""
        self._functions: set[int] = set()
        self._seen: dict[tuple[int, str], Any] = {}
        self._labels: Counter[str] = Counter()
        for path, module in model.named_modules():
            if is_within(path, opaque):
                continue
            # None for classes that make one for every module, as those of TorchScript.
            forward = getattr(type(module), "forward", None)
            if not is_library(file := _file_of(forward)):
                self.files.add(file)
            self._function(module.__dict__.get("forward", forward), type(module))
            for hook in users_hooks(module):
                self._function(hook, type(module))
            for value in module.__dict__.values():
                if isinstance(value, _FUNCTIONS):
                    self._function(value, None)

    def _function(self, function: Any, kind: type | None) -> None:
        """Search a function, and those that it names. ``kind``: the class of its ``self``."""
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, types.MethodType):
            self._object(type(function.__self__).__name__, function.__self__)
            function, kind = function.__func__, type(function.__self__)
        while (wrapped := getattr(function, "__wrapped__", None)) is not None:
            if isinstance(function, _CACHE) and self._is_users(_file_of(wrapped)):
                self.caches[id(function)] = function
            function = wrapped
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if not isinstance(function, types.FunctionType):
            call = vars(type(function)).get("__call__")
            if isinstance(call, types.FunctionType) and not isinstance(function, (type, nn.Module)):
                self._object(type(function).__name__, function)
                self._function(call, type(function))
            return
        if id(function) in self._functions or not self._is_users(_file_of(function)):
            return
        self._functions.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._place(ExternalValue(name, cell, None))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(default, (list, dict, set)):
                self._place(ExternalValue(f"a default of {function.__name__}", {"default": default}, "default"))
        self._code(function.__code__, function.__globals__, kind)

    def _code(self, code: types.CodeType, variables: dict[str, Any], kind: type | None) -> None:
        steps = list(dis.get_instructions(code))
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
                taken = after.argval if after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
                self._name(str(step.argval), variables, taken)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") and kind is not None:
                for base in kind.__mro__:  # super() may call those that others override
                    method = vars(base).get(str(step.argval))
                    method = method.fget if isinstance(method, property) else method
                    if isinstance(method, (types.FunctionType, staticmethod, classmethod, _CACHE)):
                        self._function(method, kind)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, variables, kind)

    def _name(self, name: str, variables: dict[str, Any], taken: str | None) -> None:
        """Search a global variable, of which the code takes the attribute ``taken``."""
        if name not in variables:
            return
        value = variables[name]
        if isinstance(value, types.ModuleType):
            if taken is not None and self._is_users(getattr(value, "__file__", None) or "<"):
                self._name(taken, vars(value), None)
        elif isinstance(value, type):
            home = getattr(sys.modules.get(value.__module__), "__file__", None) or "<"
            if taken is not None and (self._is_users(home) or value.__module__ == "__main__"):
                self._place(ExternalValue(f"{name}.{taken}", ClassAttributes(value), taken))
        else:
            self._place(ExternalValue(name, variables, name))

    def _place(self, place: ExternalValue) -> None:
        value = place.value()
        if (id(place.where), place.label) in self._seen or isinstance(value, (types.ModuleType, nn.Module)):
            return
        self._seen[id(place.where), place.label] = place.where
        if isinstance(value, (*_FUNCTIONS, _CACHE)):
            self._function(value, None)
            is_read = place.key is not None and self._is_users(_file_of(value))
        elif callable(value) and is_users_object(value):
            is_read = True
            if id(value) not in self._functions:
                self._functions.add(id(value))
                self._function(value, None)
        else:
            is_read = not callable(value) and (isinstance(value, (*CONSTANTS, *CONTAINERS)) or _is_watched(value))
        if is_read:
            self._labels[place.label] += 1
            count = self._labels[place.label]
            self.places.append(place if count == 1 else place._replace(label=f"{place.label} ({count})"))

    def _object(self, name: str, value: Any) -> None:
        if getattr(value, "__dict__", None) and not isinstance(value, nn.Module):
            self._place(ExternalValue(name, {"self": value}, "self"))

    def _is_users(self, file: str) -> bool:
        return file in self.files or is_users_file(file)


def _is_watched(value: Any) -> bool:
    """Return whether a value is an object of a class of the user's, or a random generator, or an array."""
    home = type(value).__module__
    return home == "random" or home.startswith("numpy") or is_users_object(value)


def _file_of(function: Any) -> str:
    """Return the file of a function's code; of one without code, something that is not a user's file."""
    code = getattr(function, "__code__", None)
    return "<" if code is None else str(code.co_filename)
