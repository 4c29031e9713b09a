"""What an expert consists of, where it is, and how tensors of requests get there and back."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn


class Placement:
    """Where ``expert`` is: at its first parameter, or buffer if it has none; nowhere in particular without either.

    Parameters keep their identity when their module is moved, so this follows the expert; it must be made anew when
    parameters are replaced.
    """

    def __init__(self, expert: nn.Module) -> None:
        self.parameters = tuple(expert.parameters())
        buffers = tuple(expert.buffers())
        self.has_buffers = bool(buffers)
        self._landmark: Tensor | None = next(iter(self.parameters + buffers), None)
        self._memory = sorted(_memory_of(self.parameters + buffers))
        self._begins = [begin for begin, _ in self._memory]

    def is_current(self, expert: nn.Module) -> bool:
        """Whether ``expert`` still has the parameters that it had."""
        known = self.parameters
        now = list(expert.parameters())
        return len(now) == len(known) and all(map(operator.is_, now, known))

    def copy_own(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """``leaves``, with copies of tensors in memory of the expert's parameters or buffers: clients may change them.

        Only where the memory begins is looked at: parameters that were given other memory since are not known.
        """
        if not any([isinstance(leaf, Tensor) and self._owns(leaf) for leaf in leaves]):
            return leaves
        return tuple(leaf.clone() if isinstance(leaf, Tensor) and self._owns(leaf) else leaf for leaf in leaves)

    def _owns(self, tensor: Tensor) -> bool:
        place = tensor.data_ptr()
        found = bisect.bisect_right(self._begins, place)
        return found > 0 and place < self._memory[found - 1][1]

    @property
    def device(self) -> torch.device | None:
        return None if self._landmark is None else self._landmark.device

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self._landmark is None else self._landmark.dtype

    def is_home_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the expert can take these as they are, and nothing else has to be set up."""
        landmark = self._landmark
        device = tensors[0].device if landmark is None else landmark.device
        for tensor in tensors:
            if tensor.device != device:
                return landmark is None
        return device.type != "cuda"

    @contextmanager
    def visit(self, tensors: Sequence[Tensor]) -> Iterator[Visit]:
        """The tensors where the expert is, with its GPU as the current one."""
        home = tensors[0].device
        device = self.device or home
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            # From page-locked memory the copy runs while the host goes on; from other memory torch waits by itself.
            moved = tensors if self._landmark is None else [tensor.to(device, non_blocking=True) for tensor in tensors]
            visit = Visit(moved, home, device)
            try:
                yield visit
            finally:
                visit.settle()


class Visit:
    """Tensors on the expert's device, and the way back to where the first of them came from."""

    def __init__(self, tensors: Sequence[Tensor], home: torch.device, device: torch.device) -> None:
        self.tensors = tensors
        self._home = home
        self._device = device

    def take_back(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves, tensors among them at home. They are there only when the visit has ended."""
        return tuple(leaf.to(self._home, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves)

    def settle(self) -> None:
        """Wait for copies to and from a GPU: a client may read what it gets, and reuse what it gave."""
        if self._home != self._device:
            for device in (self._device, self._home):
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()


def _memory_of(tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Where the memory of each begins and ends, as far as it has any of its own."""
    found = set()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # uninitialised, or a subclass without memory
            storage = tensor.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found
