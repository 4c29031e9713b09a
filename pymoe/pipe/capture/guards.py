"""The assumptions of a capture about Python, and checks that they still hold."""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pymoe._torch_private import global_call_hooks
from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.external_values import Attributes, ExternalValue, ExternalValues, is_within
from pymoe.pipe.capture.python_reads import Reads, ask, bytes_of
from pymoe.pipe.capture.snapshots import Place, Snapshots, Tokens, name_within
from pymoe.pipe.stages import CALL_HOOKS, have_same_items

_STATE = ("_parameters", "_buffers")
_About = tuple[str, Any]
"""The subject of an assumption: words for messages and, if those do not identify the subject, an object."""


class Guards:
    """Keeps the assumptions of a capture: modes, hooks, submodules, shapes of parameters, and the values that the
    model's code has read.

    ``model`` may be another model than the captured one, with the same submodules. ``opaque``: qualified names of
    modules whose contents captures ignore.
    """

    def __init__(self, model: nn.Module, opaque: Collection[str], reads: Reads, arguments: Arguments) -> None:
        self._model = model
        self._opaque = opaque
        self._reads = reads
        self._arguments = arguments
        self._modules = {
            path: module for path, module in model.named_modules() if path in opaque or not is_within(path, opaque)
        }
        self._structure = [dict(dictionary) for _, dictionary in self._dictionaries()]
        self._shapes = [
            {name: _shape(value) for name, value in dictionary.items()} for _, dictionary in self._state_dictionaries()
        ]
        places = self._places()
        snapshots = Snapshots(list(places.values()), self._own())
        self._tokens: dict[_About, Tokens | None] = dict(zip(places, snapshots.tokens, strict=True))
        questions = self._questions()
        self._answers = {about: question() for about, question in questions.items()}
        self._dtypes = self._dtypes_now()
        self._sharing = self._sharing_now()
        self._is_shared_alike: bool | None = True  # None after a parameter or buffer was replaced
        self._expected: _Expected | None = self._expect(questions, snapshots)

    def broken(self, leaves: Sequence[Any] | None = None) -> str | None:
        """Return a description of what has changed since the capture; None if nothing has. ``leaves``: the leaves of a
        call.
        """
        if self._expected is None:
            self._expected = self._expect(self._questions(), self._snapshots_kept())
        expected = self._expected
        for about, question, answer in expected.answers:
            if question() != answer:
                return about[0]
        reads = self._reads
        for variable, text in reads.environment.items():
            if os.environ.get(variable) != text:
                return f"the environment variable {variable}"
        if reads.all_variables is not None and reads.all_variables != dict(os.environ):
            return "the environment"
        if any(expected.empty) or any([not have_same_items(*pair) for pair in expected.filled]):
            now = zip(self._dictionaries(), self._structure, strict=True)
            return next((label for (label, dictionary), kept in now if not have_same_items(dictionary, kept)), None)
        for dictionary, size in expected.sizes:
            if len(dictionary) != size:  # hasattr() would now return something else
                return "a parameter or buffer"
        for entry in expected.state:
            dictionary, name, value, shape, label = entry
            now = dictionary.get(name)
            if now is not value:
                if _shape(now) != shape:
                    return f"the shape of {label!r}"
                entry[2], self._is_shared_alike = now, None
        if self._is_shared_alike is None:
            self._is_shared_alike = self._sharing_now() == self._sharing
        if not self._is_shared_alike:  # the graph uses a shared parameter under one name only
            return "which parameters or buffers are one and the same"
        if (name := expected.snapshots.change()) is not None:
            return name
        if leaves is None or not (reads.dtypes or reads.gradients):
            return None
        for leaf, example in zip(leaves, self._arguments.examples, strict=True):
            if isinstance(leaf, Tensor) and isinstance(example, Like):
                if reads.dtypes and leaf.dtype != example.dtype:
                    return "the dtype of an argument"
                if reads.gradients and leaf.requires_grad != example.requires_grad:
                    return "whether an argument requires gradients"
        return None

    def precision_change(self) -> tuple[torch.dtype, torch.dtype] | None:
        """Return the model's floating-point dtype at capture and now, if it had a single one then and has one now."""
        before, now = (
            {dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point}
            for dtypes in (self._dtypes, self._dtypes_now())
        )
        return (before.pop(), now.pop()) if len(before) == len(now) == 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without recorded values that cannot be copied. If there are any such values, the
        copy's check fails and the model is captured again.
        """
        kept = {
            about: None if about[1] is Tensor or not (isinstance(about[1], str) or _can_be_copied(tokens)) else tokens
            for about, tokens in self._tokens.items()
        }
        return {**self.__dict__, "_expected": None, "_tokens": kept}

    def _snapshots_kept(self) -> Snapshots:
        """Return the recorded values, each at the place where its present value lies; in a copy, this is the copy's
        model.
        """
        places = self._places()
        kept = [self._tokens.get(about) for about in places]
        return Snapshots(list(places.values()), self._own(), [[] if tokens is None else tokens for tokens in kept])

    def _own(self) -> frozenset[int]:
        return frozenset(map(id, self._model.modules()))

    def _places(self) -> dict[_About, Place]:
        """Return the places of the values that the code may have read, by the subject of the assumption."""
        found: dict[_About, Place] = {}
        values = []
        for path, name in self._reads.attributes:
            if (module := self._modules.get(path)) is None:
                continue
            own, kind = module.__dict__, type(module)
            label = _qualified(path, name)
            found[label, path] = label, ExternalValue(label, own, name).value, "{!r}"
            values.append(own.get(name))
            if isinstance(getattr(kind, name, None), types.MemberDescriptorType):
                found[label, path] = label, partial(getattr, module, name), "{!r}"  # an attribute in __slots__
            elif name not in own:
                of_class = f"{kind.__name__}.{name}"
                found[of_class, kind] = of_class, ExternalValue(name, Attributes(kind), name).value, "{!r}"
        for (path, sort, name), attributes in self._reads.of_tensors.items():
            if (module := self._modules.get(path)) is not None:
                for attribute in attributes:
                    label = f"{_qualified(path, name)}.{attribute}"
                    found[label, path] = label, partial(_attribute_of, module.__dict__[sort], name, attribute), "{!r}"
        for place in ExternalValues(self._model, self._opaque, values).places:
            found[place.label, None] = place.label, place.value, "{!r} outside of the model"
        for number, tensor in enumerate(self._reads.values.tensors.values()):
            name = next(filter(None, (name_within(*place[:2], tensor) for place in found.values())), "a tensor")
            found[f"{name} {number}", Tensor] = name, partial(_bytes_at, tensor), "the value of {!r}"
        return found

    def _expect(self, questions: dict[_About, Callable[[], Any]], snapshots: Snapshots) -> _Expected:
        """Collect everything that a check compares, so that the check itself takes as little time as possible."""
        members = [
            (dictionary, kept) for (_, dictionary), kept in zip(self._dictionaries(), self._structure, strict=True)
        ]
        state = list(zip(self._state_dictionaries(), self._shapes, strict=True))
        return _Expected(
            [(about, questions[about], answer) for about, answer in self._answers.items() if about in questions],
            [dictionary for dictionary, kept in members if not kept],
            [(dictionary, kept) for dictionary, kept in members if kept],
            [(dictionary, len(shapes)) for (_, dictionary), shapes in state],
            [
                [dictionary, name, _NEVER, shape, _qualified(path, name)]
                for (path, dictionary), shapes in state
                for name, shape in shapes.items()
            ],
            snapshots,
        )

    def _questions(self) -> dict[_About, Callable[[], Any]]:
        """Return functions that read the rest of the present state that must not change, by subject."""
        found: dict[_About, Callable[[], Any]] = {
            ("the mode of a module", None): self._modes_now,
            ("the class of a module", None): self._classes_now,
        }
        for name, args in self._reads.ambient:
            found[f"torch.{name}()", args] = partial(ask, name, args)
        found["torch's default dtype or device", None] = lambda: (torch.get_default_dtype(), torch.get_default_device())
        if self._reads.gradients:
            found["whether a parameter requires gradients", None] = self._gradients_now
        if self._reads.dtypes:
            found["the dtype of a parameter or buffer", None] = self._dtypes_now
        return found

    def _traced(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that were traced into the graph (all that are not opaque), with their names."""
        return [(path, module) for path, module in self._modules.items() if path not in self._opaque]

    def _dictionaries(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the dictionaries of submodules and hooks of the traced modules, with their labels."""
        for path, module in self._traced():
            where = repr(path) if path else "the model"
            yield f"the submodules of {where}", module.__dict__["_modules"]
            for kind in CALL_HOOKS:
                yield f"the hooks of {where}", module.__dict__[kind]
        for hooks in global_call_hooks:
            yield "the hooks of all modules", hooks

    def _state_dictionaries(self) -> list[tuple[str, dict[str, Tensor | None]]]:
        return [(path, module.__dict__[kind]) for path, module in self._traced() for kind in _STATE]

    def _tensors(self) -> Iterator[Tensor | None]:
        for _, dictionary in self._state_dictionaries():
            yield from dictionary.values()

    def _modes_now(self) -> list[bool]:
        return [module.training for module in self._modules.values()]

    def _classes_now(self) -> list[str]:
        kinds = [type(module) for module in self._modules.values()]
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]  # names, as copies cannot keep every class

    def _sharing_now(self) -> list[int | None]:
        """Return for each parameter and buffer, in order, the index of the first one that is the same tensor."""
        everything = (
            value for module in self._model.modules() for kind in _STATE for value in module.__dict__[kind].values()
        )
        first: dict[int, int] = {}
        return [None if value is None else first.setdefault(id(value), n) for n, value in enumerate(everything)]

    def _gradients_now(self) -> list[bool]:
        return [value.requires_grad for value in self._tensors() if value is not None]

    def _dtypes_now(self) -> list[torch.dtype | None]:
        return [None if value is None else value.dtype for value in self._tensors()]


class _Expected(NamedTuple):
    """Keeps what a check compares with the present state."""

    answers: list[tuple[_About, Callable[[], Any], Any]]
    empty: list[dict[Any, Any]]
    """Dictionaries of submodules and hooks that were empty at the capture, as most are."""
    filled: list[tuple[dict[Any, Any], dict[Any, Any]]]
    sizes: list[tuple[dict[Any, Any], int]]
    """Dictionaries of parameters and buffers, and their lengths."""
    state: list[list[Any]]
    snapshots: Snapshots


def _bytes_at(tensor: Tensor, missing: Any) -> bytes:
    return bytes_of(tensor)


def _attribute_of(tensors: dict[str, Tensor | None], name: str, attribute: str, missing: Any) -> Any:
    return getattr(tensors.get(name), "__dict__", {}).get(attribute, missing)


def _can_be_copied(tokens: Tokens | None) -> bool:
    try:
        pickle.dumps(tokens)
    except Exception:
        return False
    return True


_NEVER = object()


def _shape(value: Tensor | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def _qualified(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")
