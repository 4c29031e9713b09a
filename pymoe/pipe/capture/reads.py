"""What the model's code reads while it is captured, beside tensors: attributes, environment, the caller's state."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.pipe.capture.errors import CaptureError, is_library

__all__ = ["MISSING", "Ambient", "Reads", "Recorder"]


class _Missing:
    def __repr__(self) -> str:
        return "nothing"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()
"""Stands for an attribute, or a variable of the environment, that is not there."""


@dataclass
class Reads:
    """What a capture has read."""

    attributes: dict[tuple[str, str], None] = field(default_factory=dict)
    """Qualified names of modules, and of each the name of an attribute; in the order in which they were read."""
    environment: dict[str, str | None] = field(default_factory=dict)
    ambient: dict[tuple[str, tuple[Any, ...]], Any] = field(default_factory=dict)
    """Questions to torch about the caller's state (function and arguments), and the answers."""
    dtypes: bool = False
    """Whether the model's code has asked a tensor for its dtype."""
    gradients: bool = False
    """Whether it has asked a tensor if it requires gradients."""


_MODULES_OWN = {*dir(nn.Module), *nn.Module().__dict__} - {"forward"}

_STATE = ("_parameters", "_buffers", "_modules")

_QUESTIONS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "is_grad_enabled": ((),),
    "is_inference_mode_enabled": ((),),
    "is_autocast_enabled": ((), ("cpu",), ("cuda",)),
    "is_autocast_cpu_enabled": ((),),
    "get_autocast_dtype": (("cpu",), ("cuda",)),
    "get_autocast_cpu_dtype": ((),),
    "get_autocast_gpu_dtype": ((),),
}

_SEEDS = ("initial_seed", "get_rng_state", "set_rng_state", "manual_seed", "seed")


class Ambient:
    """What the caller of a capture would be told about its state. Graphs are made in a plain one."""

    def __init__(self) -> None:
        self.answers = {(name, args): ask(name, args) for name, every in _QUESTIONS.items() for args in every}


def ask(name: str, args: tuple[Any, ...]) -> Any:
    """What torch answers now."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(torch, name)(*args)


class Recorder:
    """Notes what is read between ``with recorder.on():`` on this thread, but for what happens in :meth:`paused`."""

    def __init__(self, model: nn.Module, ambient: Ambient) -> None:
        self.reads = Reads()
        self.on_object: Callable[[str, Any], None] = lambda name, value: None
        """Is told of the values of attributes when they are read first, and what they are called."""
        # torch.export calls methods with a stand-in for the module that shares its ``__dict__``.
        self._paths = {id(module.__dict__): path for path, module in model.named_modules()}
        self._ambient = ambient.answers
        self._plain: dict[Any, Any] = {}
        self._thread = threading.get_ident()
        self._is_on = False

    def requires_grad(self, tensor: Tensor, frame: FrameType, real: bool) -> bool:
        """What a tensor answers to the question in ``frame``: what the caller's grad mode makes of it."""
        if not self._hears() or _is_librarys(frame):
            return real
        self.reads.gradients = True
        key: tuple[str, tuple[Any, ...]] = "is_grad_enabled", ()
        self.reads.ambient[key] = self._ambient[key]
        return real and (self._ambient[key] or tensor.is_leaf)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in the block is not noted."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within the block modules, environment and torch's questions are listened to."""
        self._plain = Ambient().answers
        kind: Any = nn.Module
        environment: Any = type(os.environ)
        get_item = environment.__getitem__
        kind.__getattribute__ = self._attribute()
        environment.__getitem__ = self._variable(get_item)
        questions = {name: getattr(torch, name) for name in _QUESTIONS}
        seeds = [(home, name, getattr(home, name)) for home in (torch, torch.random) for name in _SEEDS]
        for name, function in questions.items():
            setattr(torch, name, self._question(name, function))
        for home, name, function in seeds:
            setattr(home, name, self._seed(name, function))
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            del kind.__getattribute__
            environment.__getitem__ = get_item
            for name, function in questions.items():
                setattr(torch, name, function)
            for home, name, function in seeds:
                setattr(home, name, function)

    def _hears(self) -> bool:
        return self._is_on and threading.get_ident() == self._thread

    def _attribute(self) -> Callable[[nn.Module, str], Any]:
        get = object.__getattribute__

        def __getattribute__(module: nn.Module, name: str) -> Any:
            try:
                value = get(module, name)
            except AttributeError:
                if name not in _MODULES_OWN and name[:2] != "__" and self._hears():
                    own = get(module, "__dict__")
                    if not any(name in own.get(kind, ()) for kind in _STATE):
                        self._note(module, name)
                raise
            if name not in _MODULES_OWN and self._hears():
                self._note(module, name)
            elif name == "__dict__" and self._hears() and not _is_librarys(sys._getframe(1)):
                for each in list(value):  # vars(self)
                    if each not in _MODULES_OWN:
                        self._note(module, each)
            return value

        return __getattribute__

    def _note(self, module: nn.Module, name: str) -> None:
        own = object.__getattribute__(module, "__dict__")
        path = self._paths.get(id(own))
        if path is None or (path, name) in self.reads.attributes:
            return
        self.reads.attributes[path, name] = None
        if name in own:
            self.on_object(f"{path}.{name}".lstrip("."), own[name])

    def _variable(self, get_item: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        def __getitem__(environment: Any, key: str) -> str:
            if self._hears() and environment is os.environ and not _is_librarys(sys._getframe(1), _STANDARD):
                try:
                    self.reads.environment.setdefault(key, get_item(environment, key))
                except KeyError:
                    self.reads.environment.setdefault(key, None)
            return get_item(environment, key)

        return __getitem__

    def _question(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            real = function(*args, **kwargs)
            if not self._hears() or _is_librarys(sys._getframe(1)):
                return real
            key = name, (*args, *kwargs.values())
            if key not in self._ambient or real != self._plain[key]:  # a block of the model's own
                return real
            self.reads.ambient[key] = self._ambient[key]
            return self._ambient[key]

        return answer

    def _seed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if self._hears() and not _is_librarys(sys._getframe(1)):
                raise CaptureError(
                    f"it calls torch.{name}: micro-batches and stages have random streams of their own, and a graph "
                    "has neither their seed nor their state"
                )
            return function(*args, **kwargs)

        return refuse


_STANDARD = (os.path.dirname(os.__file__) + os.sep + "os.py", "<frozen")


def _is_librarys(frame: Any, passed_over: tuple[str, ...] = ()) -> bool:
    """Whether torch or pymoe asks, not the model's code; frames of ``passed_over`` ask for who has called them."""
    while passed_over and frame is not None and frame.f_code.co_filename.startswith((*passed_over, _COLLECTIONS)):
        frame = frame.f_back
    return frame is None or is_library(frame.f_code.co_filename)


_COLLECTIONS = os.path.dirname(os.__file__) + os.sep + "_collections_abc.py"
