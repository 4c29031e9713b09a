"""Values outside of a model that its code may read: global variables, variables of enclosing functions, defaults.

They are found by reading bytecode, not by running it: variables by name, and attributes that the code reads from Python
modules and classes. The search covers the code of the model's classes and hooks, the functions that this code names,
the functions in values that it reads, and the methods of objects in these values if any of the code names them.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from pymoe.pipe.capture.contents import CONSTANTS, reachable
from pymoe.pipe.capture.errors import is_library, is_users_file
from pymoe.pipe.capture.snapshots import restorer
from pymoe.pipe.python_values import MISSING, value_in_cell
from pymoe.pipe.stages import FORWARD_HOOKS

_CACHE = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class ExternalValue(NamedTuple):
    """The place of a value outside of a model: a dictionary and a key, an attribute, or a cell of a closure."""

    label: str
    where: Any
    key: str | None

    @property
    def value(self) -> Callable[[Any], Any]:
        """Return a function that takes a default and returns the present value, or the default if there is none."""
        if self.key is None:
            return functools.partial(value_in_cell, self.where)
        if isinstance(self.where, Attributes):
            return functools.partial(getattr, self.where.owner, self.key)
        return functools.partial(self.where.get, self.key)

    def assign(self, value: Any) -> None:
        if self.key is None:
            self.where.cell_contents = value
        elif isinstance(self.where, Attributes):
            setattr(self.where.owner, self.key, value)
        else:
            self.where[self.key] = value

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the present value and its present contents."""
        value = self.value(None)
        restore_contents = restorer(value)

        def restore() -> None:
            self.assign(value)
            restore_contents()

        return restore


class Attributes(NamedTuple):
    """Says that a value is an attribute of ``owner``, a class or a Python module."""

    owner: Any


def is_within(path: str, outer: Collection[str]) -> bool:
    """Return whether the module with this qualified name is one of ``outer``, or inside one of them."""
    return any(path == each or path.startswith(f"{each}.") for each in outer)


def is_boundary(hook: Any) -> bool:
    """Return whether a hook marks a boundary of stages."""
    return getattr(hook, "is_boundary", False)


def users_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the forward hooks of a module, except for those of torch and of split points."""
    for kind in FORWARD_HOOKS:
        for hook in module.__dict__[kind].values():
            function = hook
            while isinstance(function, functools.partial):
                function = function.func
            named = function if isinstance(function, (types.FunctionType, types.MethodType)) else type(function)
            # Call str() because __module__ may be None.
            if not is_boundary(hook) and not str(named.__module__).startswith("torch."):
                yield hook


class ExternalValues:
    """Finds the values outside of a model that its code may read. The code of modules named in ``opaque`` is left out.

    ``read``: the values of the modules' attributes that the code reads; None: the values of all attributes.
    """

    def __init__(self, model: nn.Module, opaque: Collection[str] = (), read: Iterable[Any] | None = None) -> None:
        self.places: list[ExternalValue] = []
        self.functions: list[ExternalValue] = []
        """Places with functions and classes of Python, torch and pymoe, which are assumed not to change."""
        self.caches: dict[int, Any] = {}
        """The user's functions with ``functools.lru_cache`` that the model's code may call, by id."""
        self.files: set[str] = set()
        """The files with the ``forward`` of the model's classes, except for those of torch and pymoe."""
        self.own = frozenset(map(id, model.modules()))
        """The ids of the model's modules, whose attributes are not external values."""
        self._reads_all = read is None
        self._functions: set[int] = set()
        self._seen: dict[tuple[int, str], Any] = {}
        self._searched: dict[int, Any] = {}
        self._labels: Counter[str] = Counter()
        self._names: set[str] = set()
        self._classes: set[type] = set()
        self._methods: dict[str, list[Any]] = {}  # by name: methods that the code has not named so far
        modules = [(path, module) for path, module in model.named_modules() if not is_within(path, opaque)]
        for _, module in modules:
            # Leave out files of libraries, and modules whose forward is not a Python function, such as those of
            # TorchScript.
            if not is_library(file := _file_of(getattr(type(module), "forward", None))):
                self.files.add(file)
        for _, module in modules:
            self._class(type(module), makes_objects=False)
            self._function(module.__dict__.get("forward", getattr(type(module), "forward", None)))
            for hook in users_hooks(module):
                self._search(hook)
            if read is None:
                self._search({name: value for name, value in module.__dict__.items() if name not in MODULES_OWN})
        for value in read or ():
            self._search(value)
        for kind in {type(module): None for _, module in modules}:
            self._data_of_class(kind)

    def _search(self, value: Any) -> None:
        """Search the functions in a value, at any depth, and the classes of the objects in it."""
        for held in reachable([value], self.own, self._searched):
            if isinstance(held, type):
                self._class(held, makes_objects=True)
            elif isinstance(held, (types.FunctionType, _CACHE)):
                self._function(held)
            elif not isinstance(held, CONSTANTS):
                self._class(type(held), makes_objects=False)

    def _class(self, kind: type, makes_objects: bool) -> None:
        """Search those methods of a class that the code names, or that Python calls implicitly. ``makes_objects``:
        whether the code may make objects of the class, so that methods such as ``__init__`` are searched, too.
        """
        for base in kind.__mro__:  # also overridden methods, as super() may call them
            if base not in self._classes and not _is_pythons(base.__module__):
                self._classes.add(base)
                for name, method in vars(base).items():
                    if name in self._names or (name[:2] == "__" and name not in _OF_MAKING):
                        self._method(method)
                    else:
                        self._methods.setdefault(name, []).append(method)
            if makes_objects and not _is_pythons(base.__module__):
                for name in _OF_MAKING:
                    self._method(vars(base).get(name))

    def _data_of_class(self, kind: type) -> None:
        """Search those attributes of a class that the code names, as in ``type(self).name``; descriptors, such as
        methods, are left out.
        """
        for base in kind.__mro__:
            if not _is_pythons(base.__module__):
                for name, value in vars(base).items():
                    if name in self._names and not hasattr(type(value), "__get__"):
                        self._place(ExternalValue(f"{base.__name__}.{name}", Attributes(base), name))

    def _method(self, method: Any) -> None:
        if isinstance(method, property):
            method = method.fget
        elif isinstance(method, functools.cached_property):
            method = method.func
        if isinstance(method, (*_FUNCTIONS, staticmethod, classmethod, functools.partialmethod, _CACHE)):
            self._function(method)

    def _name_attribute(self, name: str) -> None:
        if name not in self._names and name not in _OF_MAKING:
            self._names.add(name)
            for method in self._methods.pop(name, ()):
                self._method(method)

    def _function(self, function: Any) -> None:
        while isinstance(function, (functools.partial, functools.partialmethod)):
            self._search([function.args, function.keywords])
            function = function.func
        if isinstance(function, types.MethodType):
            self._search(function.__self__)
            function = function.__func__
        while (wrapped := getattr(function, "__wrapped__", None)) is not None:
            if isinstance(function, _CACHE) and self._is_users(_file_of(wrapped)):
                self.caches[id(function)] = function
            elif isinstance(function, types.FunctionType):
                self._one_function(function)
            function = wrapped
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if isinstance(function, types.FunctionType):
            self._one_function(function)

    def _one_function(self, function: types.FunctionType) -> None:
        if id(function) in self._functions or not self._is_users(_file_of(function)):
            return
        self._functions.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._place(ExternalValue(name, cell, None))
        if self._reads_all or id(function) not in self._searched:
            self._place(ExternalValue(function.__qualname__.rpartition(".")[2], {"": function}, ""))
        self._code(function.__code__, function.__globals__)

    def _code(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
        for number, step in enumerate(steps):
            name = str(step.argval)
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
                if name in variables or not hasattr(builtins, name):
                    after = itertools.takewhile(lambda step: step.opname in _TAKES_ATTRIBUTE[:2], steps[number + 1 :])
                    self._taken(ExternalValue(name, variables, name), [str(step.argval) for step in after])
            elif step.opname == "IMPORT_NAME":
                self._import(name, steps[number - 2 : number], variables, steps[number + 1 :])
            elif step.opname in _TAKES_ATTRIBUTE:
                self._name_attribute(name)
        looks_up = not _LOOK_UP.isdisjoint(code.co_names)
        for constant in code.co_consts:
            if looks_up and isinstance(constant, str):
                self._look_up(constant, variables)
            if isinstance(constant, types.CodeType):
                self._code(constant, variables)
            elif isinstance(constant, str) and constant.isidentifier():  # as in getattr(object, "name")
                self._name_attribute(constant)

    def _look_up(self, text: str, variables: dict[str, Any]) -> None:
        """Search the values that ``text``, a string in code that looks up names, may name: a module, or variables."""
        module = sys.modules.get(text)
        if module is not None and self._is_users(getattr(module, "__file__", None) or "<"):
            self._taken(ExternalValue(text, {text: module}, text), [])
        with contextlib.suppress(SyntaxError, ValueError):
            self._code(compile(text, "<text>", "exec"), variables)

    def _import(
        self, name: str, arguments: list[dis.Instruction], variables: dict[str, Any], after: list[dis.Instruction]
    ) -> None:
        """Search the values that an import within a function assigns to variables."""
        level = next((step.argval for step in arguments if isinstance(step.argval, int)), 0)
        module = sys.modules.get(f"{variables.get('__package__')}.{name}".rstrip(".") if level == 1 else name)
        if module is None:
            return
        names = [
            str(step.argval)
            for step in itertools.takewhile(lambda step: step.opname in ("IMPORT_FROM", *_STORES), after)
            if step.opname == "IMPORT_FROM"
        ]
        for taken in [[each] for each in names] or [[]]:
            self._taken(ExternalValue(name, {name: module}, name), taken)

    def _taken(self, place: ExternalValue, taken: list[str]) -> None:
        """Search the value that the code reads at ``place``, or through the chain of attributes ``taken`` that begins
        there.

        The chain is followed through Python modules and classes. If the code reads no attribute of a user's Python
        module, search the whole module.
        """
        value = place.value(MISSING)
        if not isinstance(value, (types.ModuleType, type)):
            self._place(place)
        elif taken:
            if isinstance(value, types.ModuleType) or not _is_pythons(value.__module__):
                self._taken(ExternalValue(f"{place.label}.{taken[0]}", Attributes(value), taken[0]), taken[1:])
            if isinstance(value, type):
                self._search(value)
        elif isinstance(value, type):
            self._place(place)
        elif self._is_users(getattr(value, "__file__", None) or "<"):
            for name, held in vars(value).items():
                if name[:2] != "__" and not isinstance(held, types.ModuleType):
                    self._place(ExternalValue(f"{place.label}.{name}", Attributes(value), name))

    def _place(self, place: ExternalValue) -> None:
        value = place.value(MISSING)
        owner = place.where.owner if isinstance(place.where, Attributes) else place.where
        key = id(owner), place.label
        if key in self._seen or isinstance(value, types.ModuleType) or id(value) in self.own:
            return
        self._seen[key] = owner
        module = getattr(owner, "__name__", "") if isinstance(owner, types.ModuleType) else ""
        if _is_pythons(module) and not isinstance(value, (int, float, str, list, dict, tuple, set)):
            return
        if isinstance(value, _CODE) and _is_pythons(value.__module__ or "builtins"):
            self.functions.append(place)
            return
        self._labels[place.label] += 1
        count = self._labels[place.label]
        self.places.append(place if count == 1 else place._replace(label=f"{place.label} ({count})"))
        self._search(value)

    def _is_users(self, file: str) -> bool:
        return file in self.files or is_users_file(file)


_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
MODULES_OWN = frozenset(nn.Module().__dict__)
_OF_MAKING = ("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__repr__", "__reduce__")
_LOOK_UP = frozenset(("eval", "exec", "globals", "import_module", "__import__", "modules"))
_NO_STEPS = ("EXTENDED_ARG", "CACHE", "PUSH_NULL", "NOP", "NOT_TAKEN")
_TAKES_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_FAST_STORE_FAST")


def _is_pythons(module: str) -> bool:
    """Return whether a module is part of Python, torch or pymoe. Functions there are assumed not to change."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in ("builtins", "torch", "pymoe")


def _file_of(function: Any) -> str:
    """Return the file of a function's code; if it has no code, ``"<"``, which never counts as a user's file."""
    code = getattr(function, "__code__", None)
    return "<" if code is None else str(code.co_filename)
