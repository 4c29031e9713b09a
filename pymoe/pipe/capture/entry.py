"""What ``torch.export`` is given: the model behind a function of tensors that returns tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from pymoe.pipe.capture.arguments import Like, is_constant
from pymoe.pipe.capture.by_running import RealModule
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.intercept import intercepting
from pymoe.pipe.capture.opaque import COMPUTED, OpaqueCall
from pymoe.pipe.capture.untouched import untouched
from pymoe.pipe.capture.watch import Held, watching

__all__ = ["MODEL", "Computed", "Entry", "Output", "Stopped"]

MODEL = "model"


class Entry(nn.Module):
    """Calls the model with its other leaves put in, and keeps what it returns beside tensors.

    What the model assigns to its buffers is written into them instead, and what it assigns to other attributes is
    forgotten after the call. What the model raises comes out as :class:`Stopped`.
    """

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: _pytree.TreeSpec, opaque: Mapping[str, RealModule]
    ) -> None:
        super().__init__()
        self.model = model
        self._leaves = leaves
        self._tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Like)]
        self._spec = spec
        self._opaque = opaque
        self.output = Output()

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
                with watching(tensors, output.held), intercepting(self._opaque, output.calls, output.held):
                    result = self.model(*args, **kwargs)
                for name, (module, value) in buffers.items():
                    _write_back(name, value, module._buffers.get(name.rpartition(".")[2]))
        except Exception as error:
            raise Stopped(error) from error
        return output.take(result)


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

    def warn(self, model: nn.Module) -> None:
        """Say what the model does that no graph does."""
        names = [name for name in self.changed if _is_the_users(name, model)]
        if names:
            warnings.warn(
                f"the model's forward changes attributes ({', '.join(sorted(set(names)))}); its captured graph has the "
                "values of one call for good, and changes nothing. Name the module in `opaque=` where that matters",
                stacklevel=3,
            )


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


def _write_back(name: str, before: Tensor | None, now: Tensor | None) -> None:
    if now is before:
        return
    if before is None or now is None or before.shape != now.shape or before.dtype != now.dtype:
        raise CaptureError(
            f"its forward puts a tensor of another shape or dtype, or None, into the buffer {name!r}, and a graph can "
            "only write into the one that is there"
        )
    before.copy_(now.detach())
