"""Determines the device of an expert, moves the tensors of requests to it, and moves results back."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn


class ExpertDevice:
    """The device of an expert: that of its first parameter, or of its first buffer if it has no parameters.

    An expert with neither runs on the device of its inputs. After parameters or buffers were replaced by other tensors,
    make a new object.
    """

    def __init__(self, expert: nn.Module) -> None:
        self.parameters = tuple(expert.parameters())
        buffers = tuple(expert.buffers())
        self.has_buffers = bool(buffers)
        self._landmark: Tensor | None = next(iter(self.parameters + buffers), None)
        self._memory = sorted(_memory_of(self.parameters + buffers))
        self._begins = [begin for begin, _ in self._memory]

    def is_current(self, expert: nn.Module) -> bool:
        """Return whether ``expert`` still has the same parameters as when this object was made."""
        known = self.parameters
        now = list(expert.parameters())
        return len(now) == len(known) and all(map(operator.is_, now, known))

    def copy_own(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``leaves``, with a copy in place of every tensor that shares memory with the expert's parameters or
        buffers.

        Such tensors are copied because clients may change their results. Only memory that the parameters and buffers
        had when this object was made is recognised.
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
        """Call ``function`` with the tensors moved to the expert's device; a GPU is made current during the call.

        Return the function's result, with its tensors moved to the device of ``tensors[0]``, once all copies have
        ended. If the expert has no parameters or buffers, the inputs are not moved.
        """
        home = tensors[0].device
        device = self.device or home
        crossed = {device, home} if device != home else set()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                # Only copies from page-locked memory are asynchronous: a copy from other memory returns once that
                # memory has been read, even with non_blocking.
                if self._landmark is not None:
                    tensors = [tensor.to(device, non_blocking=True) for tensor in tensors]
                leaves = function(tensors)
                crossed |= {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device != home}
                return tuple(leaf.to(home, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            finally:  # wait for all copies: afterwards a client may read the result and change its inputs
                for place in crossed:
                    if place.type == "cuda":
                        torch.cuda.current_stream(place).synchronize()

    def is_home_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether :meth:`run` is unnecessary: no tensor need be moved, and no GPU be made the current device.

        Also return True if the expert has no parameters or buffers and the tensors are on different devices: the
        expert gets them unchanged.
        """
        landmark = self._landmark
        device = tensors[0].device if landmark is None else landmark.device
        for tensor in tensors:
            if tensor.device != device:
                return landmark is None
        return device.type != "cuda"


def _memory_of(tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Return the first address of the storage of each tensor, and the address after the storage's last byte."""
    found = set()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # lazy parameters and some subclasses have no memory
            storage = tensor.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found
