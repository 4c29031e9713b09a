"""Forwards that keep their inputs alone, and are run again for their graphs.

Source of the idea: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), arXiv 1604.06174. The
repetition draws the same random numbers (it has the same stream), sees the same buffers, and leaves no trace in them.

The first run makes a graph, too, which goes when the run ends: modules may ask for gradients and hooks within it, and
what they keep of one run for the next (the weights of ``parametrize.cached``, autocast's casts) has its history.
That takes no more memory at a time than the repetition will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from pymoe.pipe.execution.buffers import Buffers, Contents
from pymoe.pipe.execution.graph import Graph
from pymoe.pipe.execution.turns import Turns
from pymoe.pipe.execution.values import Crossing, Sent, version_of

__all__ = ["Checkpoints", "Recipe"]

Result = TypeVar("Result")


class Recipe:
    """What a forward needs to be run again."""

    __slots__ = ("_buffers", "_edited", "_seen", "_sent")

    def __init__(
        self, sent: Sequence[Sent], edited: Sequence[Crossing], buffers: Buffers, seen: list[Contents]
    ) -> None:
        """``edited``: those in ``sent`` that the forward changes in place, which are copies of their own."""
        self._sent = sent
        self._edited = edited
        self._buffers = buffers
        self._seen = seen

    def repeat(self, forward: Callable[[Sequence[Sent]], Result], again: bool) -> Result:
        """``forward`` of the same inputs. ``again``: this is not the last time."""
        kept = [crossing.tensor for crossing in self._edited] if again else []
        for crossing, tensor in zip(self._edited, kept, strict=False):
            crossing.tensor = tensor.clone()
            crossing.version = version_of(crossing.tensor)
        try:
            return self._buffers.repeat(self._seen, lambda: forward(self._sent))
        finally:
            for crossing, tensor in zip(self._edited, kept, strict=False):
                crossing.tensor = tensor
                crossing.version = version_of(tensor)


class Checkpoints:
    """The checkpointed forwards of one stage, and what is known of it by now."""

    def __init__(self, modules: Sequence[nn.Module], turns: Turns) -> None:
        self._modules = modules
        self._trains = False
        self._buffers = Buffers(modules, turns)
        self._edited: set[int] | None = None  # the inputs that it changes in place; None: nobody has looked yet

    def forget(self) -> None:
        """The modules may behave otherwise from now on."""
        self._buffers.forget()
        self._edited = None

    def begin(self) -> None:
        """A run begins; parameters may have been frozen or exchanged since the last."""
        self._trains = any(parameter.requires_grad for module in self._modules for parameter in module.parameters())

    def have_use(self, sent: Sequence[Sent]) -> bool:
        """Whether there can be a graph: without one a forward that makes it costs no more."""
        return self._trains or any(
            type(leaf) is Crossing and leaf.origin is not None for value in sent for leaf in value.leaves
        )

    def forward(
        self, sent: Sequence[Sent], device: torch.device | None, call: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> tuple[Recipe, Sequence[Any]]:
        """Run a forward. Returns what it takes to repeat it, and its outputs; nobody else has their graph.

        Raises:
            RuntimeError: it has changed an input in place that it has left alone before.
        """
        edited = self._edited
        taken = [leaf for value in sent for leaf in value.leaves if type(leaf) is Crossing]
        copies = {
            number: leaf.tensor.clone() for number, leaf in enumerate(taken) if edited is None or number in edited
        }
        graph = Graph(device=device)
        values = graph.begin(sent)
        outputs, seen = self._buffers.watch(lambda: call(values))
        graph.close()
        changed = {number for number, leaf in enumerate(taken) if version_of(leaf.tensor) != leaf.version}
        if edited is not None and not changed <= edited:
            raise RuntimeError(
                "a checkpointed stage has changed an input in place, and needs it to be run again; change a copy "
                "(inplace=False), or use checkpoint='never'"
            )
        self._edited = changed if edited is None else edited
        if not changed:  # and those that were sent are as they were
            return Recipe(sent, (), self._buffers, seen), outputs
        own = {
            id(taken[number]): Crossing(copies[number], taken[number].origin, taken[number].number)
            for number in changed
        }
        rows = [Sent([own.get(id(leaf), leaf) for leaf in value.leaves], value.structure) for value in sent]
        return Recipe(rows, list(own.values()), self._buffers, seen), outputs
