"""Tensors that a layer keeps for itself between steps: counters and statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Record(nn.Module):
    """Named tensors that follow the device of the module they sit in, and nothing else.

    They are no buffers on purpose. A buffer would be broadcast from rank 0 by ``DistributedDataParallel`` before
    every forward, which would overwrite the counts that another rank gathered over its micro-batches; it would change
    dtype with ``module.bfloat16()``; and it would hold garbage after ``to_empty()``. These tensors keep their dtype,
    move with their module, become zero when they leave the meta device, and are not in the ``state_dict``.
    """

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def zero_(self) -> None:
        """Set every tensor to zero."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def follow(self, device: torch.device) -> None:
        """Move to the device where the module's input is: ``load_state_dict(assign=True)`` moves parameters and tells
        nobody. Usually there is nothing to do.
        """
        for name, tensor in self.tensors.items():
            if tensor.device != device:
                self.tensors[name] = _moved(tensor, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name, tensor in self.tensors.items():
            self.tensors[name] = _moved(tensor, fn(torch.empty(0, device=tensor.device)).device)
        return self

    def extra_repr(self) -> str:
        return ", ".join(self.tensors)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta and device.type != "meta":
        return torch.zeros_like(tensor, device=device)
    return tensor.to(device)
