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
        kept_by: a module and the name of its bias, (E,); None creates a bias of zeros, the buffer ``bias``.
        device: the device of the counts, and of a bias that is created.
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
        self._kept_by = kept_by  # in a tuple, so that the module does not become a submodule of this one
        self.register_buffer("bias", torch.zeros(num_experts, device=device) if kept_by is None else None)
        self.counted = LocalTensors(load=torch.zeros(num_experts, device=device, dtype=torch.int64))

    @property
    def expert_bias(self) -> Tensor:
        """Return the bias, with E elements."""
        if self._kept_by is not None:
            kept: Tensor = getattr(*self._kept_by)
            return kept
        assert self.bias is not None
        return self.bias

    def count(self, weights_TK: Tensor, load: Tensor) -> Tensor:
        """Return the weights of a choice; their backward pass counts the choice's load (E,), as for a pymoe router.

        Nothing is counted in evaluation, nor inside a transform of :mod:`torch.func`.
        """
        self.counted.follow(load.device)
        if not self.training or in_torch_func():
            return weights_TK
        return count_on_backward(weights_TK, load, self.counted["load"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = bias.to(self.bias.device)  # bfloat16() and half() leave it in float32
        return self
