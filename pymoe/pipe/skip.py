"""Skip connections of a sequential model, declared where they begin and end.

::

    @skippable(stash=["features"])
    class Down(nn.Module):
        def forward(self, x):
            yield stash("features", x)
            return self.conv(x)

    @skippable(pop=["features"])
    class Up(nn.Module):
        def forward(self, x):
            features = yield pop("features")
            return self.conv(torch.cat([x, features], dim=1))

    model = nn.Sequential(Down(), Middle(), Up())

The modules in between are not involved. The model runs like any other; when it is cut into stages, a skip goes
from the stage of its stash straight to the stages of its pops.

A skippable module names its skips, and nothing more. It hands values that it stashes to the tracker of its thread, and
asks the tracker for values that it pops. Outside a pipeline the tracker is an ``InPlace``, which keeps skips for the
modules that run next in the same thread. Inside, it is the pipeline's own tracker, which sends them to other stages.

The interface comes from torchgpipe (Kim et al., 2020: "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
Models"). Here a stash may have any number of pops.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, overload

from torch import nn

__all__ = [
    "Namespace",
    "SkipRoute",
    "SkipTracker",
    "Skippable",
    "current_skip_tracker",
    "current_tracker",
    "pop",
    "skip_routes",
    "skippable",
    "stash",
    "tracking",
    "verify_skippables",
]


# Trackers and namespaces.


class Namespace:
    """Keeps skips apart: skips with the same name in different namespaces are independent.

    ::

        for _ in range(2):
            ns = Namespace()
            layers += [Down().isolate(ns), Up().isolate(ns)]

    A copy, also by pickle, is the same namespace.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"


Key = tuple[Namespace | None, str]  # None for skips that are not in a namespace


class SkipTracker(Protocol):
    """Keeps the value of each skip until every module that pops the skip has received it."""

    def save(self, key: Key, value: Any) -> None:
        """Keep ``value``, which may be None, for all pops of ``key``."""

    def load(self, key: Key) -> Any:
        """Return the value saved under ``key``. Raise KeyError if there is none, or if it was released."""


_lock = threading.Lock()
_poppers: dict[str, weakref.WeakSet[Any]] = {}  # live modules, by the name of a skip that they pop


def _count_pops(key: Key) -> int:
    """Return the number of live modules that pop the skip ``key``."""
    with _lock:
        modules = list(_poppers.get(key[1], ()))
    return sum(module.key_of(key[1]) == key for module in modules)


class InPlace:
    """The tracker for models that run outside of pipelines.

    A skip is released once it has been popped as many times as there are live modules that pop its key. If two models
    use the same key (such as a model and its copy), only the modules of one of them pop the skip, so it is kept until
    the next stash under this key.
    """

    def __init__(self, count_pops: Callable[[Key], int] = _count_pops) -> None:
        self._kept: dict[Key, tuple[Any, int]] = {}
        self._count_pops = count_pops

    def save(self, key: Key, value: Any) -> None:
        self._kept.pop(key, None)
        if pops := self._count_pops(key):
            self._kept[key] = value, pops

    def load(self, key: Key) -> Any:
        value, pops = self._kept.pop(key)
        if pops > 1:
            self._kept[key] = value, pops - 1
        return value


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker: SkipTracker = InPlace()


_current = _Current()


def current_tracker() -> SkipTracker:
    """Return the tracker of this thread."""
    return _current.tracker


current_skip_tracker = current_tracker  # torchgpipe's name


@contextmanager
def tracking(tracker: SkipTracker) -> Iterator[None]:
    """Within the block, make modules of this thread stash into ``tracker`` and pop from it."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before


# Skippable modules.

Value = TypeVar("Value")
Module = TypeVar("Module", bound=nn.Module)


class stash(Generic[Value]):
    """Keeps a value for the modules that pop its name: ``yield stash(name, value)`` in a skippable module's
    ``forward``.

    ``value`` is a tensor of any dtype, None, or anything else that may cross the boundary of a stage. The argument may
    also be called ``tensor``. Without the ``yield`` nothing is stashed, and the module raises.
    """

    __slots__ = ("name", "value")

    @overload
    def __init__(self, name: str, value: Value) -> None: ...

    @overload
    def __init__(self, name: str, *, tensor: Value) -> None: ...

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        values = [*args, *(kwargs[keyword] for keyword in ("value", "tensor") if keyword in kwargs)]
        if len(values) != 1 or not kwargs.keys() <= {"value", "tensor"}:
            given = len(args) + len(kwargs)
            raise TypeError(f"stash: expected a name and one value (or tensor=), got {given} in addition to the name")
        self.name = name
        self.value: Value = values[0]

    @property
    def tensor(self) -> Value:
        """Return ``value``, which torchgpipe calls ``tensor``."""
        return self.value

    @tensor.setter
    def tensor(self, value: Value) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"stash({self.name!r})"


class pop:
    """Asks for the value stashed under a name: ``value = yield pop(name)`` in a skippable module's ``forward``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"pop({self.name!r})"


class Skippable(nn.Module):
    """The base class that :func:`skippable` adds to a module's class.

    For modules that were written for torchgpipe or ``torch.distributed.pipeline``, there are also ``module_cls``,
    ``namespaces``, ``namespaced(name)`` and ``dispatch(input, handle_stash, handle_pop)``, unless the decorated class
    defines these names itself. Nothing is wrapped, so there is no ``module``: keys of ``state_dict`` lack ``module.``,
    but keys with it can be loaded.
    """

    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()
    _namespaces: dict[str, Namespace]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # because copies are made without calling __init__
        self = super().__new__(cls)
        object.__setattr__(self, "_namespaces", {})
        with _lock:
            for name in cls.poppable_names:  # namespaces may still change: _count_pops() looks them up
                _poppers.setdefault(name, weakref.WeakSet()).add(self)
        return self

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that torchgpipe and torch define and pymoe does not. A property or method with its name
        would hide an attribute of the decorated class.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "namespaces":
                return dict(self._namespaces)
            if name == "namespaced":
                return self.key_of
            if name == "dispatch":
                return partial(_dispatch, self)
            if name == "module":
                raise AttributeError(
                    f"{type(self).__name__} has no 'module': a skippable module is of a subclass of the decorated one "
                    "and wraps none, so it has the parameters itself"
                ) from None
            raise

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also load keys with the prefix ``module.``, as torchgpipe and ``torch.distributed.pipeline`` save them."""
        wrapped = f"{prefix}module."
        if "module" not in self._modules:
            for name in [name for name in state_dict if name.startswith(wrapped)]:
                own = prefix + name.removeprefix(wrapped)
                if own not in state_dict:
                    state_dict[own] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def stashable(self) -> list[Key]:
        """Return the keys of the skips that the module stashes, sorted by name."""
        return [self.key_of(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Key]:
        """Return the keys of the skips that the module pops, sorted by name."""
        return [self.key_of(name) for name in sorted(self.poppable_names)]

    def key_of(self, name: str) -> Key:
        """Return the key of a skip: its name, with the namespace that it has in this module."""
        return self._namespaces.get(name), name

    def isolate(self: Module, ns: Namespace, *, only: Iterable[str] | None = None) -> Module:
        """Put the module's skips, or those named in ``only``, into a namespace. Return the module.

        Raises:
            TypeError: ``ns`` is not a :class:`Namespace`, or ``only`` is not a list of strings.
            ValueError: ``only`` has a name that the module has not declared.
        """
        assert isinstance(self, Skippable)
        if not isinstance(ns, Namespace):
            raise TypeError(f"isolate: ns must be a Namespace, got {type(ns).__name__}")
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names("isolate", "only", only)
        if unknown := names - declared:
            raise ValueError(f"isolate: {_listed(unknown)} has not been declared as stashable or poppable")
        # Makes a new dictionary, because a shallow copy of the module shares the old one.
        object.__setattr__(self, "_namespaces", {**self._namespaces, **dict.fromkeys(names, ns)})
        return self


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[Module]], type[Module]]:
    """Declare which skips a module stashes and which it pops.

    The ``forward`` of the decorated class is a generator: it yields :class:`stash` and :class:`pop` commands and
    returns the output. Each declared name must be used exactly once in every forward pass. Several modules may pop one
    stash. The result is a subclass of the decorated class: parameters keep their names, and ``isinstance`` works. A
    class that overrides ``forward`` is decorated again, and may ``yield from super().forward(...)``.

    Args:
        stash: names that the module stashes.
        pop: names that the module pops.

    Raises:
        TypeError: a string was given instead of a list of strings, or what is decorated is not a class of modules.
        ValueError: a name is in both lists.
        RuntimeError: in a forward pass, at the ``yield``, if a name was not declared, was not stashed before, or is
            used twice; the forward may catch this error and continue. At the end of the forward, if a declared name was
            not used.
        TypeError: in a forward pass, at the ``yield``, if something other than ``stash`` and ``pop`` was yielded. In
            the constructor of a subclass that overrides ``forward`` and is not decorated.

    Example:
        >>> from pymoe.pipe.skip import pop, skippable, stash
        >>> @skippable(stash=["x"])
        ... class Keep(torch.nn.Module):
        ...     def forward(self, x):
        ...         yield stash("x", x)
        ...         return x * 2
        >>> @skippable(pop=["x"])
        ... class Add(torch.nn.Module):
        ...     def forward(self, y):
        ...         return y + (yield pop("x"))
        >>> pymoe.Pipe(torch.nn.Sequential(Keep(), Add()))(torch.ones(1))
        tensor([3.])
    """
    stashable, poppable = _names("skippable", "stash", stash), _names("skippable", "pop", pop)
    if both := stashable & poppable:
        raise ValueError(f"skippable: {_listed(both)} declared both as stashable and as poppable")

    def decorate(cls: type[Module]) -> type[Module]:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"skippable: expected a class of modules, got {cls!r}")

        class Driven(Skippable):
            stashable_names = stashable
            poppable_names = poppable

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if not getattr(type(self).forward, "runs_commands", False):
                    raise TypeError(f"{type(self).__name__} overrides the forward of a skippable module: decorate it")
                entered = self.__dict__.setdefault("_entered", set())
                if Driven in entered:
                    # The decorated class may call `super(Name, self).__init__()`, where Name is now this subclass.
                    super(cls, self).__init__(*args, **kwargs)
                    return
                entered.add(Driven)
                super().__init__(*args, **kwargs)
                entered.discard(Driven)
                if not entered:
                    self.__dict__.pop("_entered", None)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                output = cls.forward(self, *args, **kwargs)  # type: ignore[arg-type]
                return output if _running.innermost is self else _run(self, output)

            forward.runs_commands = True  # type: ignore[attr-defined]

        own = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        if not hasattr(cls, "module_cls") or issubclass(cls, Skippable):
            own["module_cls"] = cls
        return type(cls.__name__, (Driven, cls), own)  # type: ignore[return-value]

    return decorate


class _Innermost(threading.local):
    """The innermost module whose commands this thread carries out."""

    innermost: Skippable | None = None


_running = _Innermost()


def _dispatch(
    module: Any, input: Any, handle_stash: Callable[[str, Any], object], handle_pop: Callable[[str], Any]
) -> Any:
    """Run the forward of the decorated class, call a handler for each of its commands, and return the output."""
    outer, _running.innermost = _running.innermost, module
    try:
        return _drive(module, type(module).module_cls.forward(module, input), handle_stash, handle_pop)
    finally:
        _running.innermost = outer


def _run(module: Skippable, output: Any) -> Any:
    """Return ``output`` or, if it is a generator, carry out its commands for ``module`` and return its result."""
    tracker = current_tracker()
    stashed: dict[str, Any] = {}
    popped: set[str] = set()

    def keep(name: str, value: Any) -> None:
        if name not in module.stashable_names:
            raise RuntimeError(f"'{name}' has not been declared as stashable")
        if name in stashed:
            raise RuntimeError(f"'{name}' has been stashed twice")
        stashed[name] = value

    def give(name: str) -> Any:
        if name not in module.poppable_names:
            raise RuntimeError(f"'{name}' has not been declared as poppable")
        if name in popped:
            raise RuntimeError(f"'{name}' has been popped twice")
        popped.add(name)
        try:
            return tracker.load(module.key_of(name))
        except KeyError:
            raise RuntimeError(f"'{name}' has not been stashed") from None

    output = _drive(module, output, keep, give)
    if not_stashed := module.stashable_names - stashed.keys():
        raise RuntimeError(f"{_listed(not_stashed)} must be stashed but have not")
    if not_popped := module.poppable_names - popped:
        raise RuntimeError(f"{_listed(not_popped)} must be popped but have not")
    for name, value in stashed.items():
        tracker.save(module.key_of(name), value)
    return output


def _drive(
    module: Skippable, output: Any, handle_stash: Callable[[str, Any], object], handle_pop: Callable[[str], Any]
) -> Any:
    """Return ``output``; if it is a generator, have the handlers carry out its commands, and return its result.

    An error of a handler is raised at the command's ``yield``.
    """
    if not isinstance(output, Generator):
        return output
    outer, _running.innermost = _running.innermost, module
    try:
        command = next(output)
        while True:
            answer = None
            try:
                if isinstance(command, stash):
                    handle_stash(command.name, command.value)
                elif isinstance(command, pop):
                    answer = handle_pop(command.name)
                else:
                    raise TypeError(f"{command!r} is not a command from @skippable")
            except Exception as error:
                command = output.throw(error)
            else:
                command = output.send(answer)
    except StopIteration as end:
        return end.value
    finally:
        _running.innermost = outer


def _names(where: str, argument: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{where}: {argument} must be a list of names, got the string {names!r}")
    found = frozenset(names)
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise TypeError(f"{where}: {argument} must be a list of names, got {wrong[0]!r} in it")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


# Routes from stashes to pops.


@dataclass(frozen=True)
class SkipRoute:
    """One skip: the part that stashes it, and the parts that pop it.

    ``pops`` lists a part once for each of its modules that pops, in ascending order; ``stash`` may be among them.
    """

    key: Key
    stash: int
    pops: tuple[int, ...]


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every pop of a sequential model follows its stash, and that every stash has a pop.

    Modules count in the order in which they were assigned to their parents, nested ones included.

    Raises:
        TypeError: with a line for each fault: a name is stashed twice in one namespace, popped before it is stashed,
            never stashed, or never popped.
    """
    faults: list[str] = []
    stashed: dict[Key, str] = {}
    popped: set[Key] = set()
    for name, layer in _skippables(module):
        for key in layer.poppable():
            if key not in stashed:
                faults.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed")
            popped.add(key)
        for key in layer.stashable():
            if key in stashed:
                faults.append(f"'{name}' redeclared '{key[1]}' as stashable but not isolated by namespace")
            stashed.setdefault(key, name)
    for key in sorted(stashed.keys() - popped, key=lambda key: key[1]):
        faults.append(f"no module declared '{key[1]}' as poppable but stashed, by '{stashed[key]}'")
    if faults:
        lines = "\n".join(f"* {fault}" for fault in faults)
        raise TypeError(
            f"one or more pairs of stash and pop do not match: for each name that a layer stashes, a later one must be "
            f"decorated with @skippable(pop=[name]):\n\n{lines}"
        )


def skip_routes(parts: Sequence[nn.Module]) -> list[SkipRoute]:
    """Return the routes of all skips of a model that was cut into ``parts``, in the order of their stashes.

    The model must be one that :func:`verify_skippables` accepts.
    """
    routes: dict[Key, list[int]] = {}  # for each skip: the part that stashes it, then the parts that pop it
    for number, part in enumerate(parts):
        for _, layer in _skippables(part):
            for key in layer.poppable():
                routes[key].append(number)
            for key in layer.stashable():
                routes[key] = [number]
    return [SkipRoute(key, stash, tuple(pops)) for key, (stash, *pops) in routes.items()]


def _skippables(module: nn.Module, name: str = "") -> Iterator[tuple[str, Skippable]]:
    """Yield skippable modules with their names, in order; a module that occurs twice is yielded twice."""
    if isinstance(module, Skippable):
        yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _skippables(child, f"{name}.{child_name}" if name else child_name)
