"""The device of an expert; moves the tensors of requests to the device, and results back."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn


class ExpertDevice:
    """The device of an expert's first parameter, or buffer if it has none; any device for an expert without either.

    Parameters keep their identity when their module is moved, so this object follows the expert. It must be recreated
    after parameters are replaced.
    """

    def __init__(self, expert: nn.Module) -> None:
        self.parameters = tuple(expert.parameters())
        buffers = tuple(expert.buffers())
        self.has_buffers = bool(buffers)
        self._landmark: Tensor | None = next(iter(self.parameters + buffers), None)
        self._memory = sorted(_memory_of(self.parameters + buffers))
        self._begins = [begin for begin, _ in self._memory]

    def is_current(self, expert: nn.Module) -> bool:
        """Return whether ``expert`` still has the same parameters."""
        known = self.parameters
        now = list(expert.parameters())
        return len(now) == len(known) and all(map(operator.is_, now, known))

    def copy_own(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``leaves`` with copies of tensors that lie in the expert's memory: clients may change their results.

        Memory that parameters or buffers received after this object was made is not recognised.
        """
        return tuple([leaf.clone() if self._owns(leaf) else leaf for leaf in leaves])

    def _owns(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor):
            return False
        place = leaf.data_ptr()
        found = bisect.bisect_right(self._begins, place)
        return found > 0 and place < self._memory[found - 1][1]

    @property
    def device(self) -> torch.device | None:
        return None if self._landmark is None else self._landmark.device

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self._landmark is None else self._landmark.dtype

    def run(
        self, function: Callable[[Sequence[Tensor]], tuple[Any, ...]], tensors: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Run ``function`` on the tensors, moved to the expert's device, with its GPU as the current one.

        Return the function's result, with the tensors in it moved to the device of ``tensors[0]``.
        """
        home = tensors[0].device
        device = self.device or home
        crossed = {device, home} if device != home else set()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                # Copies from page-locked memory run while the host continues. From other memory, torch itself waits for
                # the copy.
                if self._landmark is not None:
                    tensors = [tensor.to(device, non_blocking=True) for tensor in tensors]
                leaves = function(tensors)
                crossed |= {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device != home}
                return tuple(leaf.to(home, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            finally:  # after this, a client may read the result and reuse its own tensors
                for place in crossed:
                    if place.type == "cuda":
                        torch.cuda.current_stream(place).synchronize()

    def is_home_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a function can run on these tensors as they are, without :meth:`run`."""
        landmark = self._landmark
        device = tensors[0].device if landmark is None else landmark.device
        for tensor in tensors:
            if tensor.device != device:
                return landmark is None
        return device.type != "cuda"


def _memory_of(tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Return the first address of each tensor's memory and the address after its last byte."""
    found = set()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # uninitialised, or a subclass without memory
            storage = tensor.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found
