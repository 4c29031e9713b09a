"""What ``torch.export`` is given: the model behind a function of tensors that returns tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from pymoe.pipe.capture.arguments import Like
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.intercept import intercepting
from pymoe.pipe.capture.opaque import COMPUTED, OpaqueCall
from pymoe.pipe.capture.untouched import untouched

__all__ = ["MODEL", "Computed", "Entry", "Output"]

MODEL = "model"


class Entry(nn.Module):
    """Calls the model with its other leaves put in, and keeps what it returns beside tensors.

    What the model assigns to its buffers is written into them instead, and what it assigns to other attributes is
    forgotten after the call.
    """

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: _pytree.TreeSpec, opaque: Mapping[str, nn.Module]
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
        model = self.model
        buffers = [
            (f"{path}.{name}" if path else name, module, name, value)
            for path, module in model.named_modules()
            for name, value in module._buffers.items()
        ]
        self.output.calls.clear()
        with untouched(model), intercepting(self._opaque, self.output.calls):
            output = model(*args, **kwargs)
            for words, module, name, value in buffers:
                _write_back(words, value, module._buffers.get(name))
        flat, self.output.spec = _pytree.tree_flatten(output)
        self.output.leaves = [Computed if isinstance(leaf, COMPUTED) else leaf for leaf in flat]
        return [leaf for leaf in flat if isinstance(leaf, COMPUTED)]


class Output:
    """What the model has returned. An object of its own, since torch puts a module's attributes back."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        """Those of the output; ``Computed`` stands for one that the graph computes."""
        self.spec: _pytree.TreeSpec | None = None
        self.calls: list[OpaqueCall] = []
        """The opaque calls that it has made."""


class Computed:
    """Stands for a leaf of the output that the graph computes; the others are constants."""


def _write_back(name: str, before: Tensor | None, now: Tensor | None) -> None:
    if now is before:
        return
    if before is None or now is None or before.shape != now.shape or before.dtype != now.dtype:
        raise CaptureError(
            f"The model cannot be captured: its forward replaces the buffer {name!r} by one of another shape or dtype. "
            "Write into a buffer of one shape, or name the module in `opaque=`."
        )
    before.copy_(now.detach())
