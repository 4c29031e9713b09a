"""The expert bias of a router that is not a :class:`pymoe.nn.Router`, and the load since its last update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pymoe._transforms import in_torch_func
from pymoe.nn.local_tensors import LocalTensors, count_on_backward


class ExpertBias(nn.Module):
    """The bias and load of another library's router, attached as a submodule for :func:`pymoe.nn.update_expert_biases`.

    Args:
        num_experts: E, the number of experts.
        bias_update_rate: the step by which an update moves an expert's bias.
        kept_by: the pair (module that has the bias, name of the bias in this module); the bias is (E,). None creates
            the buffer ``bias``, with zeros.
        device: the device of the counted load and of the buffer ``bias``.
    """

    bias: Tensor | None

    def __init__(
        self,
        num_experts: int,
        bias_update_rate: float,
        kept_by: tuple[nn.Module, str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.bias_update_rate = bias_update_rate
        self.bias_was_updated = False
        self._kept_by = kept_by  # a tuple, so that nn.Module does not register the module in it
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if kept_by is None else None
        self.register_buffer("bias", bias)
        self.counted = LocalTensors(load=torch.zeros(num_experts, device=device, dtype=torch.int64))

    @property
    def expert_bias(self) -> Tensor:
        """Return the bias, (E,)."""
        if self._kept_by is not None:
            kept: Tensor = getattr(*self._kept_by)
            return kept
        assert self.bias is not None
        return self.bias

    def count(self, weights_TK: Tensor, load: Tensor) -> Tensor:
        """Return ``weights_TK``; the backward pass of the result adds ``load`` (E,) to the counted load.

        Nothing is counted in evaluation mode, nor inside a transform of :mod:`torch.func`.
        """
        self.counted.follow(load.device)
        if not self.training or in_torch_func():
            return weights_TK
        return count_on_backward(weights_TK, load, self.counted["load"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = bias.to(self.bias.device)  # bfloat16() and half() must not narrow the bias
        return self
