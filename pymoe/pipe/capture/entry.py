"""Presents the model to ``torch.export`` as a function from tensors to tensors, and finds side effects of the model's
code: random numbers that it draws, and values outside of the model that it changes.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pymoe._torch_private import DisableTorchFunction, disable_current_modes, pytree
from pymoe.pipe.capture.arguments import PYTREE_HINT, Arguments, Like
from pymoe.pipe.capture.contents import CONSTANTS, SCALARS
from pymoe.pipe.capture.errors import CaptureError, describe_line, is_users_file
from pymoe.pipe.capture.external_values import MODULES_OWN, ExternalValue, ExternalValues, is_within
from pymoe.pipe.capture.guards import Answers, ReadRecorder
from pymoe.pipe.capture.opaque import COMPUTED_TYPES, Computed, OpaqueCalls, RealModule, refusing_lost_calls
from pymoe.pipe.capture.snapshots import Changes, Snapshots, attributes_restored
from pymoe.pipe.python_values import foreign_generator

MODEL = "model"
"""The name of the model in the module that ``torch.export`` gets."""


class ModelRun:
    """Runs the model within ``torch.export`` and records its side effects.

    Values that the model assigns to its buffers are written into the existing buffers instead. Changes of other
    attributes, and of Python values elsewhere, are undone after the run. An exception of the model is raised as
    :class:`Stopped`.

    ``arguments``: the arguments of the example call, including constants. ``external``: the values outside of the model
    that its code may read and change. ``ambient``: the caller's state, as ``ambient_answers`` returns it.
    ``finds_line``: also find the first line of code that makes a change that a graph cannot make; this takes much
    longer.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        opaque: Mapping[str, RealModule],
        external: ExternalValues,
        ambient: Answers,
        finds_line: bool = False,
    ) -> None:
        self.model = model
        self.arguments = arguments
        self.opaque = opaque
        self.external = external
        self.recorder = ReadRecorder(model, ambient)
        self.leaves: list[Any] = []
        """Leaves of the output; ``Computed`` stands for a leaf that the graph computes."""
        self.spec: pytree.TreeSpec | None = None
        self.opaque_calls: OpaqueCalls
        """The opaque calls that the run has made."""
        self.changed: list[str] = []
        """The attributes that the run has changed."""
        self.side_effects: list[str] = []
        """Other changes that the run has made to Python values, as phrases that follow "it" in messages."""
        self.place: str | None = None
        """The first line of code that made a change that a graph cannot make, if it was searched for."""
        self._finds_line = finds_line

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """Run the model with ``tensors`` as the tensors among the arguments. Return the computed leaves of the output.

        Raises:
            Stopped: the model raised an exception, or its output has leaves that a graph cannot return.
        """
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Like) else leaf for leaf in self.arguments.examples]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments.spec)
        try:
            before = self._attributes()
            with attributes_restored(self.model) as self.changed:
                buffers = [
                    (f"{path}.{name}".lstrip("."), name, module, value)
                    for path, module in self.model.named_modules()
                    for name, value in module._buffers.items()
                ]
                with self._watching_side_effects(self.changed, before) as side_effects:
                    self.opaque_calls = OpaqueCalls(lambda: self._ignoring(side_effects))
                    with (
                        refusing_lost_calls(tensors, self.opaque_calls.held, self.recorder),
                        self.opaque_calls.intercepted(self.opaque),
                        self.recorder.on(self.external.functions),
                    ):
                        result = self.model(*args, **kwargs)
                for qualified_name, name, module, value in buffers:
                    _write_back(qualified_name, value, module._buffers.get(name))
            self.side_effects += [f"changes {name!r}, which cannot be put back" for name in self._moved(before)]
        except Exception as error:
            raise Stopped(error) from error
        paths, self.spec = pytree.tree_flatten_with_path(result)
        for path, leaf in paths:
            if not isinstance(leaf, (*COMPUTED_TYPES, *CONSTANTS)):
                kind = type(leaf).__name__
                hint = "; give a model of transformers use_cache=False" if kind.endswith("Cache") else ""
                raise Stopped(
                    CaptureError(f"its output{pytree.keystr(path)} is a {kind}, expected {PYTREE_HINT}{hint}")
                )
        self.leaves = [Computed if isinstance(leaf, COMPUTED_TYPES) else leaf for _, leaf in paths]
        return [leaf for _, leaf in paths if isinstance(leaf, COMPUTED_TYPES)]

    def users_changes(self) -> dict[str, list[str]]:
        """Return the attributes that the run has changed, by module; buffers and torch's layers are left out."""
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(self.changed):
            if (path := _users_module(name, self.model)) is not None:
                found.setdefault(path, []).append(name)
        return found

    def _attributes(self) -> dict[tuple[str, str], Snapshots]:
        """Return snapshots of the attributes of the non-opaque modules of the user, by (module, attribute)."""
        return {
            (path, name): Snapshots(
                [(f"{path}.{name}".lstrip("."), partial(module.__dict__.get, name), "{}")],
                self.external.own,
                is_strict=False,
            )
            for path, module in self.model.named_modules()
            if not is_within(path, self.opaque) and not type(module).__module__.startswith("torch.")
            for name, value in module.__dict__.items()
            if name not in MODULES_OWN and type(value) not in SCALARS
        }

    def _moved(self, before: dict[tuple[str, str], Snapshots]) -> list[str]:
        """Return the names of values that the run read and changed, such as iterators that it advanced."""
        reads = self.recorder.reads.attributes
        found = (snapshots.change() for place, snapshots in before.items() if place in reads)
        return [name for name in found if name is not None]

    @contextmanager
    def _watching_side_effects(
        self, changed: Changes, before: dict[tuple[str, str], Snapshots]
    ) -> Iterator[SideEffects]:
        """Record changes of Python values in the block, and undo them after the block."""
        side_effects = SideEffects(self.external.places, self.external.own)
        self.recorder.on_object = side_effects.add_object

        def has_happened() -> bool:
            if side_effects.words() or self._moved(before):
                return True
            return any(_users_module(name, self.model) is not None for name in changed.now())

        finder = LineFinder(has_happened, self.external.files)
        try:
            with finder if self._finds_line else nullcontext():
                yield side_effects
        finally:
            self.side_effects = side_effects.words()
            self.place = finder.place
            side_effects.undo()

    @contextmanager
    def _ignoring(self, side_effects: SideEffects) -> Iterator[None]:
        """Ignore reads and side effects of the opaque call in the block: they happen again whenever the graph runs."""
        with self.recorder.paused(), side_effects.ignored():
            yield


class ModelEntry(nn.Module):
    """The module that ``torch.export`` gets: its ``forward`` calls ``run``. The results are kept in ``run``, because
    ``torch.export`` restores this module's attributes.
    """

    def __init__(self, run: ModelRun) -> None:
        super().__init__()
        self.model = run.model
        self._run = run

    def forward(self, *tensors: Tensor) -> list[Any]:
        return self._run(*tensors)


class Stopped(BaseException):
    """Carries an exception of the model's code through ``torch.export``, which would log an ordinary ``Exception``."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _users_module(name: str, model: nn.Module) -> str | None:
    """Return the qualified name of the module that has the attribute with the qualified name ``name``; None for buffers
    and for torch's own layers.
    """
    path: list[str] = []
    module, steps = model, name.split(".")
    while steps and (child := module._modules.get(steps[0])) is not None:
        module = child
        path.append(steps.pop(0))
    is_torchs = steps[:1] in (["_buffers"], ["_compiled_call_impl"]) or type(module).__module__.startswith("torch.")
    return None if is_torchs else ".".join(path)


def _write_back(name: str, before: Tensor | None, now: Tensor | None) -> None:
    if now is before:
        return
    if before is None or now is None or before.shape != now.shape or before.dtype != now.dtype:
        raise CaptureError(
            f"its forward replaces the buffer {name!r} by None or by a tensor of another shape or dtype, and a graph "
            "can only write into the one that is there"
        )
    before.copy_(now.detach())


# Side effects of the model's code.


_Watched = tuple[Callable[[], str | None], Callable[[], object]]
"""Two functions that watch a random generator, or a value outside of the model. The first returns a phrase for a
change, which follows "it" in messages, or None if nothing has changed. The second restores the earlier state.
"""


class SideEffects:
    """Watches random generators, and values outside of the model, for changes made after this object was made."""

    def __init__(self, external: Sequence[ExternalValue], own: Collection[int]) -> None:
        self._watches: list[Callable[[], _Watched]] = []  # each begins to watch one value
        self._watched: list[_Watched] = []
        self._add_generator("draws random numbers from Python's `random`", random.getstate, random.setstate)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            words = "draws random numbers from numpy's global generator"
            self._add_generator(words, numpy.random.get_state, numpy.random.set_state)
        self._add_generator("draws real random numbers, or sets their seed", _torch_state, _set_torch_state)
        for place in external:
            value = place.value(None)
            self.add_object(place.label, value)
            if not isinstance(value, (nn.Module, torch.Tensor)):
                self._add(partial(_watch_value, place, own))

    def add_object(self, name: str, value: Any) -> None:
        """Watch ``value`` if it is a random generator of Python or numpy; ``name`` names it in messages."""
        if (generator := foreign_generator(value)) is not None:
            self._add_generator(f"draws random numbers from {name}", *generator)

    def words(self) -> list[str]:
        """Return one phrase for each watched value that has changed."""
        return [words for change, _ in self._watched if (words := change()) is not None]

    def undo(self) -> None:
        _undo(self._watched)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Undo the block's side effects without reporting them."""
        before = [watch() for watch in self._watches]
        try:
            yield
        finally:
            _undo(before)

    def _add_generator(self, words: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        def watch() -> _Watched:
            before = pickle.dumps(get())
            return lambda: None if pickle.dumps(get()) == before else words, partial(put, get())

        self._add(watch)

    def _add(self, watch: Callable[[], _Watched]) -> None:
        self._watches.append(watch)
        self._watched.append(watch())


def _undo(watched: Sequence[_Watched]) -> None:
    for change, restore in watched:
        if change() is not None:
            restore()


def _watch_value(place: ExternalValue, own: Collection[int]) -> _Watched:
    words = "changes {!r}, which is not a tensor of the model"
    return Snapshots([(place.label, place.value, words)], own, is_strict=False).change, place.restorer()


def _torch_state() -> bytes:
    with DisableTorchFunction(), disable_current_modes():
        return bytes(torch.get_rng_state().numpy())


def _set_torch_state(state: bytes) -> None:
    with DisableTorchFunction(), disable_current_modes():
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class LineFinder:
    """Finds the first line of the user's code after which ``has_happened()`` is true.

    ``has_happened`` is called after every line that runs within ``with finder:``. Code in ``files`` also counts as the
    user's.
    """

    def __init__(self, has_happened: Callable[[], bool], files: Container[str] = ()) -> None:
        self.place: str | None = None
        """The line, as :func:`describe_line` formats it; None until it is found."""
        self._has_happened = has_happened
        self._files = files
        self._last: tuple[str, int, str] | None = None
        self._before = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _trace(self, frame: FrameType, event: str, value: Any) -> Any:
        file = frame.f_code.co_filename
        if event == "call" and file not in self._files and not is_users_file(file):
            return None
        self._look()
        if event == "line":
            self._last = file, frame.f_lineno, frame.f_code.co_name
        return self._trace

    def _look(self) -> None:
        if self.place is None and self._last is not None and self._has_happened():
            self.place = describe_line(*self._last)
