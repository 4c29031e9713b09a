"""Records what a model's code reads during a capture (attributes, the environment, the caller's state, and values of
tensors), and checks later that none of it has changed: the guards of a capture.

Tensors that are neither parameters nor buffers are part of the graph, so later writes to them take effect. But a number
from ``.item()``, an index, or a fill value is a constant of the graph. Tensors from which such constants are made are
therefore recorded.
"""

from __future__ import annotations

import os
import pickle
import random
import secrets
import sys
import tempfile
import threading
import types
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pymoe._torch_private import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    disable_current_modes,
    global_call_hooks,
    local_scalar_dense,
    pytree,
)
from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.errors import CaptureError, is_library
from pymoe.pipe.capture.external_values import Attributes, ExternalValue, ExternalValues, is_within
from pymoe.pipe.capture.snapshots import NEVER, Place, Snapshots, Tokens, name_within, patched
from pymoe.pipe.python_values import MISSING
from pymoe.pipe.stages import CALL_HOOKS, TENSORS, have_same_items

# Values of tensors.

_FACTS = (
    "__get__ __hash__ __len__ data_ptr dense_dim dim element_size get_device has_names is_coalesced is_complex is_conj "
    "is_contiguous is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed "
    "ndimension nelement numel size sparse_dim storage_offset stride type"
)
_TELLS_NO_VALUE = frozenset(_FACTS.split())
"""Methods of tensors that return facts other than their values."""


class TakenValues:
    """Records the tensors whose elements the model's code has turned into Python values."""

    def __init__(self) -> None:
        self.tensors: dict[int | None, Tensor] = {}
        """The tensors, by address."""
        self._single: dict[int | None, Tensor] = {}  # all one-element tensors that the code has used

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch, recording the tensors whose elements it turns into constants."""
        given = _leaves((args, kwargs))
        real = {_address(leaf): leaf for leaf in given if _is_real(leaf)}
        if isinstance(func, HigherOrderOperator) or not (real or any(map(_is_known, given))):
            return func(*args, **kwargs)
        self._single.update({address: tensor for address, tensor in real.items() if tensor.numel() == 1})
        with _Operators() as operators:
            result = func(*args, **kwargs)
        results = _leaves(result)
        made = any(isinstance(leaf, FakeTensor) for leaf in results)
        copied = any(_is_real(leaf) and _address(leaf) not in real for leaf in results)
        if not made and result is not None and getattr(func, "__name__", "") not in _TELLS_NO_VALUE:
            copied = copied or not any(_is_real(leaf) for leaf in results)
        for address, tensor in real.items():
            is_lost = made and address not in operators.seen
            if copied or is_lost or address in operators.asked:
                self.tensors[address] = tensor
        if operators.asked_known:
            self.tensors.update(self._single)
        return result


def bytes_of(tensor: Tensor, missing: Any = None) -> bytes:
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
        return bytes(flat.view(torch.uint8).numpy())


class _Operators(TorchDispatchMode):
    """Records the addresses of the real tensors that operators take (``seen``), of those that are converted to a number
    (``asked``), and whether a fake tensor whose value torch knows is converted to a number (``asked_known``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int | None] = set()
        self.asked: set[int | None] = set()
        self.asked_known = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.asked if func is local_scalar_dense else self.seen
        leaves = _leaves((args, kwargs))
        found.update(_address(leaf) for leaf in leaves if _is_real(leaf))
        self.asked_known |= func is local_scalar_dense and any(map(_is_known, leaves))
        return func(*args, **(kwargs or {}))


def _leaves(values: Any) -> list[Any]:
    leaves = pytree.tree_leaves(values)
    parts = [part for leaf in leaves if isinstance(leaf, slice) for part in (leaf.start, leaf.stop, leaf.step)]
    return leaves + parts


def _is_real(value: Any) -> bool:
    """Return whether a value is a real tensor with memory, not one that stands for a value of the graph."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and _address(value) is not None


def _is_known(value: Any) -> bool:
    """Return whether ``value`` is a fake tensor whose value torch knows, such as a result computed from constants."""
    return isinstance(value, FakeTensor) and value.constant is not None


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without memory
        return None


# Attributes, environment and the caller's state.


@dataclass
class Reads:
    """Everything that the model's code read during a capture."""

    attributes: dict[tuple[str, str], None] = field(default_factory=dict)
    """The attributes that were read, as (qualified name of the module, name of the attribute), in the order of reading.
    """
    of_tensors: dict[tuple[str, str, str], dict[str, None]] = field(default_factory=dict)
    """The names of the attributes that were read from parameters and buffers, by (qualified name of the module,
    ``_parameters`` or ``_buffers``, name of the tensor).
    """
    environment: dict[str, str | None] = field(default_factory=dict)
    """The environment variables that were read, with their values; None for a variable that did not exist."""
    all_variables: dict[str, str] | None = None
    """The whole environment, if the model's code has iterated over it."""
    ambient: Answers = field(default_factory=dict)
    """The functions of torch that the model's code has called to ask for the caller's state, and their results."""
    dtypes: bool = False
    """True if the model's code has read the dtype of a tensor."""
    values: TakenValues = field(default_factory=TakenValues)
    gradients: bool = False
    """True if the model's code has read whether a tensor requires gradients."""


_MODULES_OWN = {*dir(nn.Module), *nn.Module().__dict__} - {"forward"}

_STATE = (*TENSORS, "_modules")

_OF_NOTHING = (
    "is_grad_enabled is_inference_mode_enabled is_autocast_cpu_enabled get_autocast_cpu_dtype get_autocast_gpu_dtype "
    "is_autocast_cache_enabled is_anomaly_enabled is_anomaly_check_nan_enabled are_deterministic_algorithms_enabled "
    "is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode get_float32_matmul_precision "
    "get_num_threads get_num_interop_threads backends.mha.get_fastpath_enabled"
)
_QUESTIONS: dict[str, tuple[tuple[Any, ...], ...]] = {
    **dict.fromkeys(_OF_NOTHING.split(), ((),)),
    "is_autocast_enabled": ((), ("cpu",), ("cuda",)),
    "get_autocast_dtype": (("cpu",), ("cuda",)),
}
"""Functions of torch that report the caller's state, and the arguments with which the model's code may call them."""

_WHY_NO_SEED = (
    "it calls torch.{}, but micro-batches and stages have random streams of their own, whose seed and state a graph "
    "does not have"
)
_WHY_NO_ENTROPY = (
    "it draws random numbers from the operating system, or seeds a generator with them: draw them from torch, or give "
    "the generator a seed"
)
_SEEDS = ("initial_seed", "get_rng_state", "set_rng_state", "manual_seed", "seed")
_ENTROPY = ((os, "urandom", False), (random, "_urandom", False), (random.Random, "seed", True))
"""Functions that take random numbers from the operating system, as (owner, name, whether only without a seed)."""
_OF_ENTROPY = tuple(str(module.__file__) for module in (random, secrets, tempfile, uuid))
"""Files of the standard library whose functions take such random numbers on behalf of their callers."""


Answers = dict[tuple[str, tuple[Any, ...]], Any]
"""What torch's functions return about the state of this thread, by name of the function and arguments."""


def ambient_answers() -> Answers:
    """Return torch's state, as its functions report it now. In a capture, the model's code gets the caller's state."""
    return {(name, args): ask(name, args) for name, every in _QUESTIONS.items() for args in every}


def ask(name: str, args: tuple[Any, ...]) -> Any:
    """Return the present result of torch's function ``name`` for ``args``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attrgetter(name)(torch)(*args)


class ReadRecorder:
    """Records what the model's code reads on this thread within ``with recorder.on():``, except in :meth:`paused`.

    ``ambient`` is the caller's state. If the model's code asks for torch's state, it gets this one instead of the state
    that the capture has set.
    """

    def __init__(self, model: nn.Module, ambient: Answers) -> None:
        self.reads = Reads()
        self.on_object: Callable[[str, Any], None] = lambda name, value: None
        """Called with the qualified name and the value of an attribute when the attribute is first read."""
        # torch.export calls the methods of a module on a substitute object with the same ``__dict__``, so modules are
        # identified by their ``__dict__``.
        self._paths = {id(module.__dict__): path for path, module in model.named_modules()}
        # torch.export also replaces parameters and buffers with other tensors, which lack the Python attributes of the
        # originals. So keep the originals.
        self._tensors = [
            (path, kind, name, module.__dict__[kind], tensor)
            for path, module in model.named_modules()
            for kind in TENSORS
            for name, tensor in module.__dict__[kind].items()
        ]
        self._ambient = ambient
        self._plain: Answers = {}
        self._thread = threading.get_ident()
        self._is_on = False

    def requires_grad(self, tensor: Tensor, frame: FrameType, real: bool) -> bool:
        """Return the result of reading ``tensor.requires_grad`` in ``frame``; record the read if the model's code makes
        it.

        The model's code gets the value for the caller's grad mode. Other code gets ``real``, the value in the capture's
        mode.
        """
        if not self.hears(frame):
            return real
        self.reads.gradients = True
        key: Any = "is_grad_enabled", ()
        self.reads.ambient[key] = self._ambient[key]
        return real and (self._ambient[key] or tensor.is_leaf)

    def hears(self, frame: FrameType, passed_over: tuple[str, ...] = ()) -> bool:
        """Return whether a read in ``frame`` is made by the model's code and must be recorded."""
        return self._hears() and not _asked_by_library(frame, passed_over)

    def paused(self) -> AbstractContextManager[None]:
        """Within the block, record nothing."""
        return patched((self, "_is_on", False))

    @contextmanager
    def on(self, functions: Sequence[ExternalValue] = ()) -> Iterator[None]:
        """Within the block, record what the model's code reads from modules, the environment, and torch's state. Calls
        that read or set torch's seeds, or take random numbers from the operating system, raise CaptureError.

        ``functions``: places outside of torch from which the model's code takes functions. If torch's functions are
        there, they are replaced during the block, too.
        """
        self._plain = ambient_answers()
        environment: Any = type(os.environ)
        replaced: list[tuple[Any, str, Any]] = []
        for name in _QUESTIONS:
            home, _, last = f"torch.{name}".rpartition(".")
            replaced.append((sys.modules[home], last, self._question(name, attrgetter(name)(torch))))
        owner: Any
        for owner, name in product(_HOMES, _SEEDS):
            replaced.append((owner, name, self._refused(getattr(owner, name), _WHY_NO_SEED.format(name))))
        numpy: Any = sys.modules.get("numpy")
        for owner, name, seeded in [*_ENTROPY, *([(numpy.random, "default_rng", True)] if numpy else [])]:
            replaced.append((owner, name, self._refused(getattr(owner, name), _WHY_NO_ENTROPY, seeded, _OF_ENTROPY)))
        by_function = {id(getattr(home, name)): function for home, name, function in replaced}
        with ExitStack() as stack:
            for place in functions:
                if (function := by_function.get(id(before := place.value(None)))) is not None:
                    stack.callback(place.assign, before)
                    place.assign(function)
            stack.enter_context(
                patched(
                    *replaced,
                    (nn.Module, "__getattribute__", self._attribute()),
                    (Tensor, "__getattr__", self._attribute_of_tensor),
                    (environment, "__getitem__", self._variable(environment.__getitem__)),
                    (environment, "__iter__", self._all_variables(environment.__iter__)),
                    (environment, "__len__", self._all_variables(environment.__len__)),
                    (self, "_is_on", True),
                )
            )
            yield

    def _hears(self) -> bool:
        return self._is_on and threading.get_ident() == self._thread

    def _is_model_asking(self, passed_over: tuple[str, ...] = ()) -> bool:
        """Return whether the model's code has called the caller of this function."""
        return self.hears(sys._getframe(2), passed_over)

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
            elif name == "__dict__" and self._is_model_asking():
                for each in list(value):  # the code may read any of them, as with vars(self)
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

    @property
    def _attribute_of_tensor(self) -> Callable[[Tensor, str], Any]:
        def __getattr__(tensor: Tensor, name: str) -> Any:
            if name[:2] != "__" and self._is_model_asking():
                for path, kind, own, tensors, real in self._tensors:
                    if tensors.get(own) is tensor:
                        self.reads.of_tensors.setdefault((path, kind, own), {})[name] = None
                        if (value := real.__dict__.get(name, MISSING)) is not MISSING:
                            return value
            raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

        return __getattr__

    def _variable(self, get_item: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def __getitem__(environment: Any, key: Any) -> Any:
            if isinstance(key, (str, bytes)) and self._is_model_asking(_ENVIRONMENT):
                variable = os.fsdecode(key)
                self.reads.environment.setdefault(variable, os.environ.get(variable))
            return get_item(environment, key)

        return __getitem__

    def _all_variables(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def answer(environment: Any) -> Any:
            if self.reads.all_variables is None and self._is_model_asking(_ENVIRONMENT):
                with self.paused():
                    self.reads.all_variables = dict(os.environ)
            return function(environment)

        return answer

    def _question(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            real = function(*args, **kwargs)
            if not self._is_model_asking():
                return real
            key = name, (*args, *kwargs.values())
            # If the answer differs from the capture's own state, a block in the model has set it: keep it.
            if key not in self._ambient or real != self._plain[key]:
                return real
            self.reads.ambient[key] = self._ambient[key]
            return self._ambient[key]

        return answer

    def _refused(
        self, function: Callable[..., Any], why: str, takes_seed: bool = False, passed_over: tuple[str, ...] = ()
    ) -> Callable[..., Any]:
        """Return ``function``, wrapped to raise a CaptureError with the message ``why`` if the model's code calls it;
        with ``takes_seed``, only if it is called without a seed.
        """

        def refuse(*args: Any, **kwargs: Any) -> Any:
            given = [one for one in (*args, *kwargs.values()) if one is not None and not isinstance(one, random.Random)]
            if not (takes_seed and given) and self._is_model_asking(passed_over):
                raise CaptureError(why)
            return function(*args, **kwargs)

        return refuse


_HOMES = (torch, torch.random)
_STDLIB = os.path.dirname(os.__file__) + os.sep
_ENVIRONMENT = (_STDLIB + "os.py", _STDLIB + "_collections_abc.py", "<frozen")
"""Files with the code of ``os.environ`` itself, which reads on behalf of its caller."""


def _asked_by_library(frame: FrameType | None, passed_over: tuple[str, ...] = ()) -> bool:
    """Return whether ``frame`` runs code of a library (see :func:`is_library`), not of the model; True for None.

    Code in files whose paths begin with one of ``passed_over`` reads for its caller, so the caller's frame is tested
    instead.
    """
    while passed_over and frame is not None and frame.f_code.co_filename.startswith(passed_over):
        frame = frame.f_back
    return frame is None or is_library(frame.f_code.co_filename)


# Guards.

_About = tuple[str, Any]
"""The subject of an assumption: words for messages and, if the words do not identify it, an object that does."""


class Guards:
    """Checks the assumptions of a capture: modes, hooks, submodules, shapes of parameters, and the values that the
    model's code has read.

    ``model`` may be a model other than the captured one, with the same submodules. ``opaque``: qualified names of
    the opaque modules, whose contents are not checked.
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
        state = self._state_dictionaries()
        self._shapes = [{name: _shape(value) for name, value in dictionary.items()} for _, dictionary in state]
        places = self._places()
        snapshots = Snapshots(list(places.values()), self._own())
        self._tokens: dict[_About, Tokens | None] = dict(zip(places, snapshots.tokens, strict=True))
        questions = self._questions()
        self._answers = {about: question() for about, question in questions.items()}
        self._dtypes = self._dtypes_now()
        self._sharing = self._sharing_now()
        self._is_shared_alike: bool | None = True  # None: to be determined again, as a tensor was replaced
        self._expected: _Expected | None = self._expect(questions, snapshots)

    def broken(self, leaves: Sequence[Any] | None = None) -> str | None:
        """Return a description of something that has changed since the capture, or None if nothing has.

        ``leaves``: the leaves of a call, to be checked as well.
        """
        if self._expected is None:
            places = self._places()  # this is a copy of the guards, so read the values of the copied model
            kept = [self._tokens.get(about) or [] for about in places]
            snapshots = Snapshots(list(places.values()), self._own(), kept)
            self._expected = self._expect(self._questions(), snapshots)
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
            if len(dictionary) != size:  # a name was added or removed, which changes hasattr()
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
        """Return the model's floating-point dtype at the capture and the one now; None unless both are unique."""
        both = self._dtypes, self._dtypes_now()
        before, now = ({dtype for dtype in dtypes if dtype and dtype.is_floating_point} for dtypes in both)
        return (before.pop(), now.pop()) if len(before) == len(now) == 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy.

        Tokens that cannot be pickled are left out; a copy that lacks tokens captures the model again.
        """
        kept = {
            about: None if about[1] is Tensor or not (isinstance(about[1], str) or _can_be_copied(tokens)) else tokens
            for about, tokens in self._tokens.items()
        }
        return {**self.__dict__, "_expected": None, "_tokens": kept}

    def _own(self) -> frozenset[int]:
        return frozenset(map(id, self._model.modules()))

    def _places(self) -> dict[_About, Place]:
        """Return the places of all values that the code may have read; the keys are explained at ``_About``."""
        found: dict[_About, Place] = {}
        values = []

        def attribute_of(tensors: dict[str, Tensor | None], name: str, attribute: str, missing: Any) -> Any:
            return getattr(tensors.get(name), "__dict__", {}).get(attribute, missing)

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
                    found[label, path] = label, partial(attribute_of, module.__dict__[sort], name, attribute), "{!r}"
        for place in ExternalValues(self._model, self._opaque, values).places:
            found[place.label, None] = place.label, place.value, "{!r} outside of the model"
        for number, tensor in enumerate(self._reads.values.tensors.values()):
            name = next(filter(None, (name_within(*place[:2], tensor) for place in found.values())), "a tensor")
            found[f"{name} {number}", Tensor] = name, partial(bytes_of, tensor), "the value of {!r}"
        return found

    def _expect(self, questions: dict[_About, Callable[[], Any]], snapshots: Snapshots) -> _Expected:
        """Collect everything that a check compares, so that the check itself is as fast as possible."""
        members = list(zip([one for _, one in self._dictionaries()], self._structure, strict=True))
        state = list(zip(self._state_dictionaries(), self._shapes, strict=True))
        return _Expected(
            [(about, questions[about], answer) for about, answer in self._answers.items() if about in questions],
            [dictionary for dictionary, kept in members if not kept],
            [(dictionary, kept) for dictionary, kept in members if kept],
            [(dictionary, len(shapes)) for (_, dictionary), shapes in state],
            [
                [dictionary, name, NEVER, shape, _qualified(path, name)]
                for (path, dictionary), shapes in state
                for name, shape in shapes.items()
            ],
            snapshots,
        )

    def _questions(self) -> dict[_About, Callable[[], Any]]:
        """Return functions that read the rest of the state to be checked; the keys are explained at ``_About``."""
        found: dict[_About, Callable[[], Any]] = {
            ("the mode of a module", None): lambda: [module.training for module in self._modules.values()],
            ("the class of a module", None): self._classes_now,
        }
        for name, args in self._reads.ambient:
            found[f"torch.{name}()", args] = partial(ask, name, args)
        found["torch's default dtype or device", None] = lambda: (torch.get_default_dtype(), torch.get_default_device())
        if self._reads.gradients:
            found["whether a parameter requires gradients", None] = lambda: [
                value.requires_grad for value in self._tensors() if value is not None
            ]
        if self._reads.dtypes:
            found["the dtype of a parameter or buffer", None] = self._dtypes_now
        return found

    def _traced(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that were traced into the graph (all that are not opaque), with their names."""
        return [(path, module) for path, module in self._modules.items() if path not in self._opaque]

    def _dictionaries(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield, with labels, the dictionaries of the traced modules' submodules and hooks, and of global hooks."""
        for path, module in self._traced():
            where = repr(path) if path else "the model"
            yield f"the submodules of {where}", module.__dict__["_modules"]
            for kind in CALL_HOOKS:
                yield f"the hooks of {where}", module.__dict__[kind]
        for hooks in global_call_hooks:
            yield "the hooks of all modules", hooks

    def _state_dictionaries(self) -> list[tuple[str, dict[str, Tensor | None]]]:
        return [(path, module.__dict__[kind]) for path, module in self._traced() for kind in TENSORS]

    def _tensors(self) -> Iterator[Tensor | None]:
        for _, dictionary in self._state_dictionaries():
            yield from dictionary.values()

    def _classes_now(self) -> list[str]:
        kinds = [type(module) for module in self._modules.values()]
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]  # not the classes: some cannot be pickled

    def _sharing_now(self) -> list[int | None]:
        """Return, for each parameter and buffer in order, the index of the first one that is the same tensor.

        For an entry that is None, return None.
        """
        everything = (
            value for module in self._model.modules() for kind in TENSORS for value in module.__dict__[kind].values()
        )
        first: dict[int, int] = {}
        return [None if value is None else first.setdefault(id(value), n) for n, value in enumerate(everything)]

    def _dtypes_now(self) -> list[torch.dtype | None]:
        return [None if value is None else value.dtype for value in self._tensors()]


class _Expected(NamedTuple):
    """The data that a check compares with the present state."""

    answers: list[tuple[_About, Callable[[], Any], Any]]
    empty: list[dict[Any, Any]]
    """The dictionaries of submodules and hooks that were empty at the capture, as most of them are."""
    filled: list[tuple[dict[Any, Any], dict[Any, Any]]]
    """The other dictionaries of submodules and hooks, each with its items at the capture."""
    sizes: list[tuple[dict[Any, Any], int]]
    """The dictionaries of parameters and buffers, each with its length at the capture."""
    state: list[list[Any]]
    """For every parameter and buffer: its dictionary, its name in it, the tensor last seen, its shape, and a label."""
    snapshots: Snapshots


def _can_be_copied(tokens: Tokens | None) -> bool:
    try:
        pickle.dumps(tokens)
    except Exception:
        return False
    return True


def _shape(value: Tensor | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def _qualified(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")
