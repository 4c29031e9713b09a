"""What ``torch.export`` is given: the model behind a function of tensors that returns tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from pymoe._torch_private import pytree
from pymoe.pipe.capture.arguments import PYTREE_HINT, Arguments, Like
from pymoe.pipe.capture.contents import CONSTANTS, SCALARS
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.external_values import MODULES_OWN, ExternalValues, is_within
from pymoe.pipe.capture.frozen import Snapshots
from pymoe.pipe.capture.interception import OpaqueCalls, refusing_lost_calls
from pymoe.pipe.capture.opaque import COMPUTED_TYPES, Computed, RealModule
from pymoe.pipe.capture.python_reads import Answers, Recorder
from pymoe.pipe.capture.side_effects import LineFinder, SideEffects
from pymoe.pipe.capture.snapshots import Changes, attributes_restored

MODEL = "model"
"""The name of the model in what ``torch.export`` is given."""


class ModelRun:
    """A run of the model within ``torch.export``, and what it has done.

    What the model assigns to its buffers is written into them instead, and what it assigns to other attributes, or
    does to Python's values elsewhere, is undone after the run. What the model raises comes out as :class:`Stopped`.

    Args:
        model: the model.
        arguments: of the example, whose constants are in their places.
        opaque: its opaque modules.
        external: what its code may read and change outside of it.
        ambient: the caller's state.
        finds_line: whether to look for the line that does something a graph cannot do; it takes much longer.
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
        self.recorder = Recorder(model, ambient)
        self.leaves: list[Any] = []
        """Those of the output; ``Computed`` stands for one that the graph computes."""
        self.spec: pytree.TreeSpec | None = None
        self.opaque_calls: OpaqueCalls
        """Those that it has made."""
        self.changed: list[str] = []
        """The attributes that it has changed."""
        self.side_effects: list[str] = []
        """What else it has done to Python's values, as the end of "it ..."."""
        self.place: str | None = None
        """The first line that did such a thing, if it was looked for."""
        self._finds_line = finds_line

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """Return the computed leaves of the output."""
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
                raise Stopped(
                    CaptureError(f"its output{pytree.keystr(path)} is a {type(leaf).__name__}, expected {PYTREE_HINT}")
                )
        self.leaves = [Computed if isinstance(leaf, COMPUTED_TYPES) else leaf for _, leaf in paths]
        return [leaf for _, leaf in paths if isinstance(leaf, COMPUTED_TYPES)]

    def users_changes(self) -> dict[str, list[str]]:
        """Return the attributes that it has changed, by the qualified name of the module that has them; no buffers,
        and nothing of torch's own layers.
        """
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(self.changed):
            if (path := _users_module(name, self.model)) is not None:
                found.setdefault(path, []).append(name)
        return found

    def _attributes(self) -> dict[tuple[str, str], Snapshots]:
        """Return snapshots of what the modules hold that are not opaque, and are the user's."""
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
        """Return the names of what it has changed of what it has read: iterators that it took values from, say."""
        reads = self.recorder.reads.attributes
        found = (snapshots.change() for place, snapshots in before.items() if place in reads)
        return [name for name in found if name is not None]

    @contextmanager
    def _watching_side_effects(
        self, changed: Changes, before: dict[tuple[str, str], Snapshots]
    ) -> Iterator[SideEffects]:
        """Note what the block does to Python's values, and undo it."""
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
        """What opaque calls read and do does not matter: they do it whenever the graph runs."""
        with self.recorder.paused(), side_effects.ignored():
            yield


class Entry(nn.Module):
    """Its ``forward`` is a run. torch restores the attributes of a module, so what a run has done is not among them."""

    def __init__(self, run: ModelRun) -> None:
        super().__init__()
        self.model = run.model
        self._run = run

    def forward(self, *tensors: Tensor) -> list[Any]:
        return self._run(*tensors)


class Stopped(BaseException):
    """Carries an error of the model's code through ``torch.export``, which would log it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _users_module(name: str, model: nn.Module) -> str | None:
    """Return the qualified name of the module that has an attribute; None for buffers, and for torch's own layers."""
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
