"""Forwards that keep their inputs instead of their graphs, and are recomputed in the backward pass.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), arXiv 1604.06174. The recomputation draws
the same random numbers (from the same stream), sees the buffers that the first run saw (a spectral norm reads what it
writes), and leaves those that are there by now as they are (a batch norm would count the micro-batch twice).

The first run makes a graph, too, which goes when the run ends: modules may ask for gradients and hooks within it, and
what they keep from one run to the next (the weights of ``parametrize.cached``, autocast's casts) has its history. That
takes no more memory at a time than the recomputation will.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.execution.graph import BoundaryTensor, Graph, StageValue, version_of
from pymoe.pipe.execution.shared_layers import StageLock, buffers_of, has_changed


def recomputed(checkpoint: str, micro_batches: int) -> range:
    """Return the micro-batches that are recomputed under ``checkpoint="always"``, ``"except_last"`` or ``"never"``."""
    return range({"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[checkpoint])


class StageRecompute:
    """The recomputed forwards of one stage, and what is known about the stage so far."""

    def __init__(self, modules: Sequence[nn.Module], lock: StageLock) -> None:
        self._modules = modules
        self._trains = False
        self._edited: set[int] | None = None  # the inputs that it changes in place; None: not known yet
        self._lock = lock  # no other stage may see what is put into a shared buffer for a recomputation
        owners = {id(owner): owner for module in modules for owner in module.modules()}
        # Deferred batch norms know recomputations, and may be in other stages that run meanwhile.
        self._owners = [
            owner for owner in owners.values() if owner._buffers and not isinstance(owner, DeferredBatchNorm)
        ]
        self._changing: set[tuple[int, str]] | None = None  # the buffers that it changes; None: any may change

    def forget(self) -> None:
        """Forget what is known: the modules may have been switched to evaluation, say."""
        self._changing = self._edited = None

    def begin_step(self) -> None:
        """A step begins; parameters may have been frozen or exchanged since the last."""
        self._trains = any(parameter.requires_grad for module in self._modules for parameter in module.parameters())

    def is_useful(self, received: Sequence[StageValue]) -> bool:
        """Return whether there can be a graph: without one, a forward that keeps it costs no more."""
        return self._trains or any(
            type(leaf) is BoundaryTensor and leaf.accumulator is not None for value in received for leaf in value.leaves
        )

    @contextmanager
    def first_run(
        self, received: Sequence[StageValue], device: torch.device | None
    ) -> Iterator[tuple[Recomputation, list[Any]]]:
        """A context in which the stage's function runs for the first time.

        Yields:
            What it takes to recompute the forward, which is complete when the context ends, and the arguments.

        Raises:
            RuntimeError: the function has changed an input in place that it has left alone before.
        """
        edited = self._edited
        taken = [leaf for value in received for leaf in value.leaves if type(leaf) is BoundaryTensor]
        copies = {
            number: leaf.tensor.clone() for number, leaf in enumerate(taken) if edited is None or number in edited
        }
        graph = Graph(device=device)
        forward = Recomputation(received, self)
        with self._watched(forward.seen):
            yield forward, graph.begin(received)
        graph.close()
        changed = {number for number, leaf in enumerate(taken) if version_of(leaf.tensor) != leaf.version}
        if edited is not None and not changed <= edited:
            raise RuntimeError(
                "a checkpointed stage has changed an input in place, and needs it to be recomputed; change a copy "
                "(inplace=False), or use checkpoint='never'"
            )
        self._edited = changed if edited is None else edited
        if changed:  # the stages that have sent these keep what they have become
            forward.replace({id(taken[number]): _like(taken[number], copies[number]) for number in changed})

    @contextmanager
    def _watched(self, seen: list[_Contents]) -> Iterator[None]:
        """A context in which a forward runs; at its end ``seen`` gets the buffers that the forward has changed."""
        if not self._owners:
            yield
            return
        with self._lock:
            changing = self._changing
            before = buffers_of(self._owners)
            copies = [
                tensor.detach().clone() if changing is None or (id(owner), name) in changing else None
                for owner, name, tensor, _ in before
            ]
            yield
            self._changing = changing = changing or set()
            for (owner, name, tensor, version), copy in zip(before, copies, strict=True):
                if has_changed(owner, name, tensor, version):
                    changing.add((id(owner), name))
                    if copy is not None:
                        seen.append(_Contents(owner, name, tensor, copy))

    @contextmanager
    def put_back(self, seen: Sequence[_Contents]) -> Iterator[None]:
        """A context in which a forward is recomputed: it sees the buffers ``seen``, and leaves no trace in them."""
        if not seen:
            yield
            return
        with self._lock:
            now = [
                _Contents(owner, name, tensor, tensor.detach().clone())
                for owner, name, _, _ in seen
                if (tensor := owner._buffers.get(name)) is not None
            ]
            for contents in seen:
                contents.restore()
            try:
                yield
            finally:
                for contents in now:
                    contents.restore()


class Recomputation:
    """What a forward needs to be recomputed."""

    __slots__ = ("_edited", "_received", "_stage", "seen")

    def __init__(self, received: Sequence[StageValue], stage: StageRecompute) -> None:
        self.seen: list[_Contents] = []  # the buffers that the first run saw
        self._received = received
        self._stage = stage
        self._edited: list[BoundaryTensor] = []  # inputs that the forward changes in place: copies of their own

    def replace(self, edited: dict[int, BoundaryTensor]) -> None:
        """Replace inputs, by the id of their boundary tensor, with copies from before the first run."""
        self._edited = list(edited.values())
        self._received = _replaced(self._received, edited)

    @contextmanager
    def inputs(self, again: bool) -> Iterator[Sequence[StageValue]]:
        """A context with the inputs, which it yields, and buffers that the first run saw. ``again``: not the last."""
        received = self._received
        if again and self._edited:
            received = _replaced(received, {id(x): _like(x, x.tensor.clone()) for x in self._edited})
        with self._stage.put_back(self.seen):
            yield received


def _like(boundary: BoundaryTensor, tensor: torch.Tensor) -> BoundaryTensor:
    return BoundaryTensor(tensor, boundary.accumulator, boundary.number)


def _replaced(values: Sequence[StageValue], others: dict[int, BoundaryTensor]) -> list[StageValue]:
    """Return ``values`` with others of their boundary tensors, by the ids of these."""
    return [StageValue([others.get(id(leaf), leaf) for leaf in value.leaves], value.structure) for value in values]


class _Contents(NamedTuple):
    """A buffer at one time: whose it is, which tensor it is, and a copy of its contents."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    def restore(self) -> None:
        self.owner._buffers[self.name] = self.tensor
        self.tensor.data.copy_(self.copy)  # not an edit as autograd counts them: graphs have saved what they need
