"""The gate that a mixture makes for itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SlotGate(nn.Linear):
    """A linear layer with one output a slot, in float32 at least, outside of autocast: choices hang on small numbers.

    Args:
        in_features: numbers of a row.
        slots: outputs.
    """

    def __init__(
        self, in_features: int, slots: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, slots, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, slots) logits of rows of any shape with ``in_features`` numbers."""
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            # Of a copy: a slot that is taken by another backend while a graph waits for its backward pass is written
            # to, and the graph must go on with what it began with.
            weight, bias = self.weight.to(dtype, copy=True), self.bias.to(dtype)
            return F.linear(x.to(dtype).reshape(len(x), self.in_features), weight, bias)

    @torch.no_grad()
    def reset_slot(self, slot: int) -> None:
        """Begin again with one slot, as a new linear layer would."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight[slot], -bound, bound)
        nn.init.uniform_(self.bias[slot : slot + 1], -bound, bound)
