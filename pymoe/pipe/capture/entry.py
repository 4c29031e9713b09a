"""What ``torch.export`` is given: the model behind a function of tensors that returns tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from pymoe._torch_private import pytree
from pymoe.pipe.capture.arguments import PYTREE_HINT, Arguments, Like, is_constant
from pymoe.pipe.capture.errors import CaptureError, is_library
from pymoe.pipe.capture.external_values import ExternalValue, file_of, forward_of
from pymoe.pipe.capture.interception import Held, intercepting_opaque_calls, refusing_lost_calls
from pymoe.pipe.capture.opaque import COMPUTED_TYPES, Computed, OpaqueCall, RealModule
from pymoe.pipe.capture.python_reads import Recorder
from pymoe.pipe.capture.side_effects import LineFinder, SideEffects
from pymoe.pipe.capture.snapshots import Changes, attributes_restored

__all__ = ["MODEL", "Entry", "Output", "Stopped"]

MODEL = "model"


class Entry(nn.Module):
    """Calls the model with the example's constants in their places, and keeps what it returns beside tensors.

    What the model assigns to its buffers is written into them instead, and what it assigns to other attributes, or
    does to Python's values elsewhere, is undone after the call. What the model raises comes out as :class:`Stopped`.

    Args:
        model: the model.
        arguments: of the example.
        opaque: its opaque modules.
        external: what its code may read and change outside of it.
        recorder: records what it reads.
        finds_line: whether to look for the line that does something a graph cannot do; it takes much longer.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        opaque: Mapping[str, RealModule],
        external: Sequence[ExternalValue],
        recorder: Recorder,
        finds_line: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._external = external
        self._finds_line = finds_line
        self.output = Output()
        self.output.recorder = recorder
        self._arguments = arguments
        self._opaque = opaque

    def forward(self, *tensors: Tensor) -> list[Any]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Like) else leaf for leaf in self._arguments.examples]
        args, kwargs = pytree.tree_unflatten(leaves, self._arguments.spec)
        output = self.output
        output.calls.clear()
        try:
            with attributes_restored(self.model) as output.changed:
                buffers = _buffers(self.model)
                with (
                    self._side_effects(output.changed) as side_effects,
                    refusing_lost_calls(tensors, output.held, output.recorder),
                    intercepting_opaque_calls(
                        self._opaque, output.calls, output.held, lambda: _ignored(output, side_effects)
                    ),
                    output.recorder.on(),
                ):
                    result = self.model(*args, **kwargs)
                for name, (module, value) in buffers.items():
                    _write_back(name, value, module._buffers.get(name.rpartition(".")[2]))
        except Exception as error:
            raise Stopped(error) from error
        return output.take(result)

    @contextmanager
    def _side_effects(self, changed: Changes) -> Iterator[SideEffects]:
        """Note in the output what the block does to Python's values, and undo it."""
        side_effects = SideEffects(self._external)
        self.output.recorder.on_object = side_effects.add_object
        files = {file_of(forward_of(type(module))) for module in self.model.modules()}

        def has_happened() -> bool:
            if side_effects.words():
                return True
            return any(_users_module(name, self.model) is not None for name in changed.now())

        finder = LineFinder(has_happened, {file for file in files if not is_library(file)})
        try:
            with finder if self._finds_line else nullcontext():
                yield side_effects
        finally:
            self.output.side_effects = side_effects.words()
            self.output.place = finder.place
            side_effects.undo()


@contextmanager
def _ignored(output: Output, side_effects: SideEffects) -> Iterator[None]:
    """What opaque calls read and do does not matter: they do it whenever the graph runs."""
    with output.recorder.paused(), side_effects.ignored():
        yield


class Output:
    """What the model has returned. An object of its own, since torch restores a module's attributes."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        """Those of the output; ``Computed`` stands for one that the graph computes."""
        self.spec: pytree.TreeSpec | None = None
        self.calls: list[OpaqueCall] = []
        """The opaque calls that it has made."""
        self.held: Held = {}
        self.changed: list[str] = []
        """The attributes that it has changed."""
        self.side_effects: list[str] = []
        """What else it has done to Python's values, as the end of "it ..."."""
        self.place: str | None = None
        """The first line that did such a thing, if it was looked for."""
        self.recorder: Recorder

    def take(self, result: Any) -> list[Any]:
        """Remember the structure of a result, and return its computed leaves."""
        paths, self.spec = pytree.tree_flatten_with_path(result)
        for path, leaf in paths:
            if not isinstance(leaf, COMPUTED_TYPES) and not is_constant(leaf):
                raise Stopped(
                    CaptureError(f"its output{pytree.keystr(path)} is a {type(leaf).__name__}, expected {PYTREE_HINT}")
                )
        self.leaves = [Computed if isinstance(leaf, COMPUTED_TYPES) else leaf for _, leaf in paths]
        return [leaf for _, leaf in paths if isinstance(leaf, COMPUTED_TYPES)]

    def users_changes(self, model: nn.Module) -> dict[str, list[str]]:
        """Return the attributes that it has changed, by the qualified name of the module that has them; no buffers,
        and nothing of torch's own layers.
        """
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(self.changed):
            if (path := _users_module(name, model)) is not None:
                found.setdefault(path, []).append(name)
        return found


class Stopped(BaseException):
    """Carries an error of the model's code through ``torch.export``, which would log it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _buffers(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor | None]]:
    return {
        f"{path}.{name}" if path else name: (module, value)
        for path, module in model.named_modules()
        for name, value in module._buffers.items()
    }


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
