"""Buffers that forwards change, and forwards that are run again.

A forward that is repeated for its graph must see the buffers that the first one saw (a spectral norm reads what it
writes), and must leave those that are there by now as they are (a batch norm would count the micro-batch twice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.execution.turns import Turns

__all__ = ["Buffers", "Contents"]

Result = TypeVar("Result")


class Contents(NamedTuple):
    """A buffer at one time: whose it is, which tensor it is, and a copy of what was in it."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    def put_back(self) -> None:
        """Make the buffer what it was."""
        self.owner._buffers[self.name] = self.tensor
        self.tensor.data.copy_(self.copy)  # no edit as autograd counts them: graphs have saved what they need


class Buffers:
    """The buffers of a stage, and which of them its forwards change: that is found out as they run."""

    def __init__(self, modules: Sequence[nn.Module], turns: Turns) -> None:
        self._turns = turns  # what a stage puts into a buffer for a repetition no other stage may see
        owners = {id(owner): owner for module in modules for owner in module.modules()}
        # Deferred batch norms know repetitions, and may be in other stages that run meanwhile.
        self._owners = [
            owner for owner in owners.values() if owner._buffers and not isinstance(owner, DeferredBatchNorm)
        ]
        self._changing: set[tuple[int, str]] | None = None  # None: any may be

    def forget(self) -> None:
        """Others may change from now on; the modules have been switched from training to evaluation, say."""
        self._changing = None

    def watch(self, forward: Callable[[], Result]) -> tuple[Result, list[Contents]]:
        """Run a forward. Returns its result, and what :meth:`repeat` needs."""
        if not self._owners:
            return forward(), []
        with self._turns:
            return self._watch(forward)

    def _watch(self, forward: Callable[[], Result]) -> tuple[Result, list[Contents]]:
        changing = self._changing
        before = [
            (owner, name, tensor, tensor._version)
            for owner in self._owners
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]
        copies = [
            tensor.detach().clone() if changing is None or (id(owner), name) in changing else None
            for owner, name, tensor, _ in before
        ]
        result = forward()
        seen = []
        self._changing = changing = changing or set()
        for (owner, name, tensor, version), copy in zip(before, copies, strict=True):
            # The kernels of batch norms change statistics without a word to the version counter.
            unseen = isinstance(owner, _NormBase) and owner.training
            if unseen or owner._buffers.get(name) is not tensor or tensor._version != version:
                changing.add((id(owner), name))
                if copy is not None:
                    seen.append(Contents(owner, name, tensor, copy))
        return result, seen

    def repeat(self, seen: Sequence[Contents], forward: Callable[[], Result]) -> Result:
        """Run a forward that saw the buffers ``seen`` again: it sees them again, and leaves no trace in them."""
        if not seen:
            return forward()
        with self._turns:
            return self._repeat(seen, forward)

    def _repeat(self, seen: Sequence[Contents], forward: Callable[[], Result]) -> Result:
        now: list[Any] = [
            Contents(owner, name, tensor, tensor.detach().clone())
            for owner, name, tensor in [(owner, name, owner._buffers.get(name)) for owner, name, _, _ in seen]
            if tensor is not None
        ]
        for contents in seen:
            contents.put_back()
        try:
            return forward()
        finally:
            for contents in now:
                contents.put_back()
