"""What a capture assumes about Python, and whether it still holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.external_values import ExternalValue, external_values
from pymoe.pipe.capture.python_reads import Reads, ask
from pymoe.pipe.capture.snapshots import MISSING, freeze, is_by_value, is_immutable
from pymoe.pipe.module_hooks import CALL_HOOKS

__all__ = ["Guards"]

_STATE = ("_parameters", "_buffers")
_Check = Callable[[], str | None]


class Guards:
    """What a capture of a model holds for: modes, hooks, submodules and shapes of parameters, and the values that its
    code has read.

    Args:
        model: the model.
        opaque: the qualified names of its opaque modules, into which no capture looks.
        reads: what the capture has read.
        external: what its code may read outside of the model.
        arguments: the example.
    """

    def __init__(
        self,
        model: nn.Module,
        opaque: Sequence[str],
        reads: Reads,
        external: Sequence[ExternalValue],
        arguments: Arguments,
    ) -> None:
        self._model = model
        self._opaque = tuple(opaque)
        self._reads = reads
        self._arguments = arguments
        self._modules = {
            path: module
            for path, module in model.named_modules()
            if not any(path.startswith(f"{outer}.") for outer in opaque)
        }
        self._training = [module.training for module in self._modules.values()]
        self._structure = [dict(dictionary) for _, dictionary in self._dictionaries()]
        self._shapes = {(path, name): _shape(value) for path, name, value in self._tensors()}
        values = {
            (path, name): self._modules[path].__dict__.get(name, MISSING)
            for path, name in reads.attributes
            if path in self._modules
        }
        frozen = {id(value): freeze(value) for value in values.values()}
        self._values = {key: (value, frozen[id(value)]) for key, value in values.items()}
        self._of_classes = {
            (kind, name): freeze(getattr(kind, name, MISSING)) for kind, name in dict.fromkeys(self._class_attributes())
        }
        self._external = {place.label: freeze(place.value()) for place in external}
        self._defaults = torch.get_default_dtype(), torch.get_default_device()
        self._dtypes = self._dtypes_now()
        self._gradients = self._gradients_now()
        self._checks: list[_Check] | None = None
        self._places: list[ExternalValue] | None = list(external)

    def on(self, model: nn.Module) -> Guards:
        """Return the same guards for another module with the same submodules, of which the captured one was made."""
        return Guards(model, self._opaque, self._reads, self._places or [], self._arguments)

    def broken(self, leaves: Sequence[Any] | None = None) -> str | None:
        """Return what has changed since, in words; None if nothing has.

        Args:
            leaves: of a call, whose dtypes count if the model's code has asked for them.
        """
        if self._checks is None:
            self._checks = [self._modes(), self._members(), self._state(), self._attributes(), self._others()]
        for check in self._checks:
            if (words := check()) is not None:
                return words
        if leaves is not None and (self._reads.dtypes or self._reads.gradients):
            for leaf, example in zip(leaves, self._arguments.examples, strict=True):
                if isinstance(leaf, Tensor) and isinstance(example, Like):
                    if self._reads.dtypes and leaf.dtype != example.dtype:
                        return "the dtype of an argument"
                    if self._reads.gradients and leaf.requires_grad != example.requires_grad:
                        return "whether an argument requires gradients"
        return None

    def precision_change(self) -> tuple[torch.dtype, torch.dtype] | None:
        """Return from which floating point dtype to which the whole model went, if it had one and has one."""
        before, now = (
            {dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point}
            for dtypes in (self._dtypes, self._dtypes_now())
        )
        return (before.pop(), now.pop()) if len(before) == len(now) == 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """What cannot be in a copy is looked up again: classes and cells are where the copy's model finds them."""
        kept = {label: frozen for label, frozen in self._external.items() if is_by_value(frozen)}
        classes = {key: frozen for key, frozen in self._of_classes.items() if is_by_value(frozen)}
        return {**self.__dict__, "_checks": None, "_places": None, "_external": kept, "_of_classes": classes}

    # Each of the following prepares a check, which then does as little as can be.

    def _modes(self) -> _Check:
        expected = list(zip(self._modules.values(), self._training, strict=True))

        def check() -> str | None:
            for module, training in expected:
                if module.training is not training:
                    return "the mode of a module"
            return None

        return check

    def _members(self) -> _Check:
        expected = [
            (label, dictionary, kept)
            for (label, dictionary), kept in zip(self._dictionaries(), self._structure, strict=True)
        ]
        empty = [dictionary for _, dictionary, kept in expected if not kept]  # most are
        filled = [(dictionary, kept) for _, dictionary, kept in expected if kept]

        def check() -> str | None:
            if not any(empty) and all(dictionary == kept for dictionary, kept in filled):
                return None
            return next((label for label, dictionary, kept in expected if dictionary != kept), None)

        return check

    def _state(self) -> _Check:
        own = [module.__dict__[kind] for path, module in self._traced() for kind in _STATE]
        sizes = [(dictionary, len(dictionary)) for dictionary in own]
        expected: list[list[Any]] = [
            [module.__dict__[kind], name, _NEVER, self._shapes.get((path, name)), f"{path}.{name}".lstrip(".")]
            for path, module in self._traced()
            for kind in _STATE
            for name in module.__dict__[kind]
        ]
        count = len(self._shapes)

        def check() -> str | None:
            if len(expected) != count:
                return "a parameter or buffer"
            for dictionary, size in sizes:
                if len(dictionary) != size:  # hasattr() may have been told that there is none
                    return "a parameter or buffer"
            for entry in expected:
                dictionary, name, value, shape, label = entry
                now = dictionary.get(name)
                if now is not value:
                    if _shape(now) != shape:
                        return f"the shape of {label!r}"
                    entry[2] = now
            return None

        return check

    def _attributes(self) -> _Check:
        expected = [
            [self._modules[path].__dict__, name, value, frozen, is_immutable(value), f"{path}.{name}".lstrip(".")]
            for (path, name), (value, frozen) in self._values.items()
        ]

        def check() -> str | None:
            seen: dict[int, Any] = {}  # what many modules share, a configuration, is looked into once
            for entry in expected:
                dictionary, name, value, frozen, is_same, label = entry
                now = dictionary.get(name, MISSING)
                if now is value and (is_same or seen.get(id(now)) is frozen):
                    continue
                if freeze(now) != frozen:
                    return repr(label)
                entry[2] = now
                seen[id(now)] = frozen
            return None

        return check

    def _others(self) -> _Check:
        if self._places is None:
            self._places = external_values(self._model, self._opaque)
        places = [(place, self._external[place.label]) for place in self._places if place.label in self._external]
        classes = list(self._of_classes.items())
        reads = self._reads
        dtype, device = self._defaults

        def check() -> str | None:
            for place, frozen in places:
                if freeze(place.value()) != frozen:
                    return f"{place.label!r} outside of the model"
            for (kind, name), frozen in classes:
                if freeze(getattr(kind, name, MISSING)) != frozen:
                    return f"'{kind.__name__}.{name}'"
            for variable, text in reads.environment.items():
                if os.environ.get(variable) != text:
                    return f"the environment variable {variable}"
            for (question, args), answer in reads.ambient.items():
                if ask(question, args) != answer:
                    return f"torch.{question}()"
            if torch.get_default_dtype() is not dtype or torch.get_default_device() != device:
                return "torch's default dtype or device"
            if reads.gradients and self._gradients_now() != self._gradients:
                return "whether a parameter requires gradients"
            if reads.dtypes and self._dtypes_now() != self._dtypes:
                return "the dtype of a parameter or buffer"
            return None

        return check

    def _traced(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that the graph goes through."""
        return [(path, module) for path, module in self._modules.items() if path not in self._opaque]

    def _dictionaries(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Their submodules and hooks."""
        for path, module in self._traced():
            where = repr(path) if path else "the model"
            yield f"the submodules of {where}", module.__dict__["_modules"]
            for kind in CALL_HOOKS:
                yield f"the hooks of {where}", module.__dict__[kind]

    def _tensors(self) -> Iterator[tuple[str, str, Tensor | None]]:
        for path, module in self._traced():
            for kind in _STATE:
                for name, value in module.__dict__[kind].items():
                    yield path, name, value

    def _class_attributes(self) -> Iterator[tuple[type, str]]:
        for path, name in self._reads.attributes:
            if path in self._modules and name not in self._modules[path].__dict__:
                yield type(self._modules[path]), name

    def _gradients_now(self) -> list[bool]:
        return [value.requires_grad for _, _, value in self._tensors() if value is not None]

    def _dtypes_now(self) -> list[torch.dtype | None]:
        return [None if value is None else value.dtype for _, _, value in self._tensors()]


_NEVER = object()


def _shape(value: Tensor | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)
