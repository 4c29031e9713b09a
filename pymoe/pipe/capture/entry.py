"""What ``torch.export`` is given: the model behind a function of tensors that returns tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from pymoe.pipe.capture.arguments import Like, is_constant
from pymoe.pipe.capture.by_running import RealModule
from pymoe.pipe.capture.errors import CaptureError, is_library
from pymoe.pipe.capture.intercept import intercepting
from pymoe.pipe.capture.locate import LineFinder
from pymoe.pipe.capture.opaque import COMPUTED, OpaqueCall
from pymoe.pipe.capture.outside import Outside, file_of, forward_of
from pymoe.pipe.capture.reads import Recorder
from pymoe.pipe.capture.side_effects import SideEffects
from pymoe.pipe.capture.untouched import Changes, untouched
from pymoe.pipe.capture.watch import Held, watching

__all__ = ["MODEL", "Computed", "Entry", "Output", "Stopped"]

MODEL = "model"


class Entry(nn.Module):
    """Calls the model with its other leaves put in, and keeps what it returns beside tensors.

    What the model assigns to its buffers is written into them instead, and what it assigns to other attributes, or
    does to Python's values elsewhere, is undone after the call. What the model raises comes out as :class:`Stopped`.

    Args:
        model: the model.
        leaves: those of the example.
        spec: their structure.
        opaque: its opaque modules.
        outside: what its code may read and change outside of it.
        recorder: is told what it reads.
        is_looking: whether to look for the line that does something a graph cannot do; it takes much longer.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: list[Any],
        spec: _pytree.TreeSpec,
        opaque: Mapping[str, RealModule],
        outside: Sequence[Outside],
        recorder: Recorder,
        is_looking: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._outside = outside
        self._is_looking = is_looking
        self.output = Output()
        self.output.recorder = recorder
        self._leaves = leaves
        self._tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Like)]
        self._spec = spec
        self._opaque = opaque

    def forward(self, *tensors: Tensor) -> list[Any]:
        leaves = list(self._leaves)
        for number, tensor in zip(self._tensors, tensors, strict=True):
            leaves[number] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        output = self.output
        output.calls.clear()
        try:
            with untouched(self.model) as output.changed:
                buffers = _buffers(self.model)
                with (
                    self._side_effects(output.changed) as side_effects,
                    watching(tensors, output.held, output.recorder),
                    intercepting(self._opaque, output.calls, output.held, lambda: _beside(output, side_effects)),
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
        """Notes in the output what the block does to Python's values, and undoes it."""
        side_effects = SideEffects(self._outside)
        self.output.recorder.on_object = side_effects.add_object
        files = {file_of(forward_of(type(module))) for module in self.model.modules()}
        finder = LineFinder(
            lambda: bool(side_effects.words() or self._changes(changed.now())),
            {file for file in files if not is_library(file)},
        )
        try:
            with finder if self._is_looking else nullcontext():
                yield side_effects
        finally:
            self.output.side_effects = side_effects.words()
            self.output.place = finder.place
            side_effects.put_back()

    def _changes(self, names: list[str]) -> list[str]:
        return [name for name in names if _is_the_users(name, self.model)]


@contextmanager
def _beside(output: Output, side_effects: SideEffects) -> Iterator[None]:
    """What opaque calls read and do is their own affair: they do it whenever the graph runs."""
    with output.recorder.paused(), side_effects.forgotten():
        yield


class Output:
    """What the model has returned. An object of its own, since torch puts a module's attributes back."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        """Those of the output; ``Computed`` stands for one that the graph computes."""
        self.spec: _pytree.TreeSpec | None = None
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
        """Remember the form of a result, and return its computed leaves."""
        paths, self.spec = _pytree.tree_flatten_with_path(result)
        for path, leaf in paths:
            if not isinstance(leaf, COMPUTED) and not is_constant(leaf):
                raise Stopped(
                    CaptureError(
                        f"its output{_pytree.keystr(path)} is a {type(leaf).__name__}. A model may return tensors, "
                        "numbers, strings, None, and lists, tuples and dicts of them; register other classes with "
                        "torch.utils._pytree.register_pytree_node, or register_dataclass"
                    )
                )
        self.leaves = [Computed if isinstance(leaf, COMPUTED) else leaf for _, leaf in paths]
        return [leaf for _, leaf in paths if isinstance(leaf, COMPUTED)]

    def users_changes(self, model: nn.Module) -> dict[str, list[str]]:
        """The attributes that it has changed, by the qualified name of the module that has them; no buffers, and
        nothing of torch's own layers.
        """
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(self.changed):
            if _is_the_users(name, model):
                found.setdefault(_owner(name, model), []).append(name)
        return found


class Computed:
    """Stands for a leaf of the output that the graph computes; the others are constants."""


class Stopped(BaseException):
    """Carries an error of the model's code through ``torch.export``, which would print its own account of it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _buffers(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor | None]]:
    return {
        f"{path}.{name}" if path else name: (module, value)
        for path, module in model.named_modules()
        for name, value in module._buffers.items()
    }


def _is_the_users(name: str, model: nn.Module) -> bool:
    """Whether an attribute is other than a buffer, and not of one of torch's own layers."""
    module = model
    for step in name.split("."):
        if step in ("_buffers", "_compiled_call_impl"):
            return False
        child = module._modules.get(step)
        if child is None:
            break
        module = child
    return not type(module).__module__.startswith("torch.")


def _owner(name: str, model: nn.Module) -> str:
    """The module that has an attribute of this name."""
    path, module = "", model
    for step in name.split("."):
        child = module._modules.get(step)
        if child is None:
            break
        path, module = f"{path}.{step}".lstrip("."), child
    return path


def _write_back(name: str, before: Tensor | None, now: Tensor | None) -> None:
    if now is before:
        return
    if before is None or now is None or before.shape != now.shape or before.dtype != now.dtype:
        raise CaptureError(
            f"its forward puts a tensor of another shape or dtype, or None, into the buffer {name!r}, and a graph can "
            "only write into the one that is there"
        )
    before.copy_(now.detach())
