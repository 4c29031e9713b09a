"""What an expert gets to see of a client's tensors: the tensors themselves, unless it changes them in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class InputGuard:
    """Keeps the tensors of clients from an expert that works in place (``nn.ReLU(inplace=True)`` as the first layer).

    Such an expert gets copies, which are no leaves of autograd either, so that it can be differentiated. Whether it is
    one is known from modules with an attribute ``inplace``, or seen in its first pass, on copies.
    """

    def __init__(self, expert: nn.Module) -> None:
        self.copies = True
        self.learns = not any(getattr(module, "inplace", False) is True for module in expert.modules())

    def lend(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What to call the expert with instead of ``tensors``."""
        return [tensor.clone() for tensor in tensors] if self.copies else tensors

    def learn(self, lent: Sequence[Tensor]) -> None:
        """Look at what was lent after the first pass: an operation in place counts a tensor's version up."""
        self.copies = any(tensor._version for tensor in lent)
        self.learns = False
