"""Forwards that keep their inputs instead of their graphs, and are recomputed in the backward pass.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), arXiv 1604.06174. The recomputation draws
the same random numbers (from the same stream), sees the state that the first run saw (a spectral norm reads what it
writes), and leaves the state that is there by now as it is (a batch norm would count the micro-batch twice).

The first run makes a graph, too, which goes when the run ends: modules may ask for gradients and hooks within it, and
what they keep from one run to the next (the weights of ``parametrize.cached``, autocast's casts) has its history. That
takes no more memory at a time than the recomputation will. If the run has changed what cannot be put back, or what
nobody has copied, the graph stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pymoe.pipe.execution.concurrent_steps import note_put_back
from pymoe.pipe.execution.graph import BoundaryTensor, Graph, StageValue, version_of
from pymoe.pipe.execution.held_state import HeldState, Seen
from pymoe.pipe.execution.shared_layers import Turns


def recomputed(checkpoint: str, micro_batches: int) -> range:
    """Return the micro-batches that are recomputed under ``checkpoint="always"``, ``"except_last"`` or ``"never"``."""
    return range({"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[checkpoint])


class StageRecompute:
    """What its forwards may change, and how they are recomputed: of one stage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.turns: Turns | None = None
        """Of the stages that share state with this one; None: it shares nothing. Set by whoever runs forwards."""
        self.held = HeldState(("", module) for module in modules)
        self._modules = modules
        self._trains = False
        self._edited: set[int] = set()  # inputs that have been changed in place: these are copied

    def begin_step(self) -> None:
        """A step begins; parameters may have been frozen or exchanged since the last."""
        self._trains = any(parameter.requires_grad for module in self._modules for parameter in module.parameters())

    def is_useful(self, received: Sequence[StageValue]) -> bool:
        """Return whether there can be a graph: without one, a forward that keeps it costs no more."""
        return self._trains or any(
            type(leaf) is BoundaryTensor and leaf.accumulator is not None for value in received for leaf in value.leaves
        )

    @contextmanager
    def first_run(self, received: Sequence[StageValue], graph: Graph) -> Iterator[FirstRun]:
        """A context in which the stage's function runs for the first time, and ``graph`` is made.

        What it yields is complete when the context ends. If the same forward cannot be run again, because it has
        changed what cannot be put back or what nobody has copied, there is no recomputation: the graph is to be kept.
        """
        edited = self._edited
        taken = [leaf for value in received for leaf in value.leaves if type(leaf) is BoundaryTensor]
        copies = {number: leaf.tensor.clone() for number, leaf in enumerate(taken) if number in edited}
        run = FirstRun(graph.begin(received))
        with self._lock:
            before = self.held.before()
            yield run
            seen = self.held.after(before)
        changed = {number for number, leaf in enumerate(taken) if version_of(leaf.tensor) != leaf.version}
        if not changed <= edited:
            self._edited = edited | changed
        elif seen is not None:
            # The stages that have sent what it changes keep what that has become.
            replaced = {id(taken[number]): _like(taken[number], copies[number]) for number in changed}
            run.recomputation = Recomputation(received, self, seen, replaced)

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.turns is None else self.turns.lock

    @contextmanager
    def put_back(self, seen: Seen) -> Iterator[None]:
        """Let a forward be recomputed in the block: it sees what it has seen, and leaves no trace."""
        with self._lock:
            try:
                with self.held.put_back(seen):
                    yield
            finally:
                note_put_back(self.held, seen)


class FirstRun:
    """The first run of a forward: its arguments, and, after it, what a second run takes; None: the graph stays."""

    __slots__ = ("arguments", "recomputation")

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments
        self.recomputation: Recomputation | None = None


class Recomputation:
    """What a forward needs to be recomputed."""

    __slots__ = ("_edited", "_received", "_seen", "_stage")

    def __init__(
        self,
        received: Sequence[StageValue],
        stage: StageRecompute,
        seen: Seen,
        edited: dict[int, BoundaryTensor],
    ) -> None:
        """``edited``: in place of inputs that the forward changes, by id, copies from before the first run."""
        self._stage = stage
        self._seen = seen
        self._edited = list(edited.values())
        self._received = _replaced(received, edited) if edited else received

    @contextmanager
    def inputs(self, again: bool) -> Iterator[Sequence[StageValue]]:
        """A context with the inputs, which it yields, and the state that the first run saw. ``again``: not the last."""
        received = self._received
        if again and self._edited:
            received = _replaced(received, {id(x): _like(x, x.tensor.clone()) for x in self._edited})
        with self._stage.put_back(self._seen):
            yield received


def _like(boundary: BoundaryTensor, tensor: torch.Tensor) -> BoundaryTensor:
    return BoundaryTensor(tensor, boundary.accumulator, boundary.number)


def _replaced(values: Sequence[StageValue], others: dict[int, BoundaryTensor]) -> list[StageValue]:
    """Return ``values`` with others of their boundary tensors, by the ids of these."""
    return [StageValue([others.get(id(leaf), leaf) for leaf in value.leaves], value.structure) for value in values]
