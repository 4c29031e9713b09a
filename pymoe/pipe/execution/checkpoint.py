"""Forwards that keep their inputs alone, and are run again for their graphs.

Source of the idea: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), arXiv 1604.06174. The
repetition draws the same random numbers (it has the same stream), sees the same buffers, and leaves no trace in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version

from pymoe.pipe.execution.buffers import Buffers, Contents
from pymoe.pipe.execution.turns import Turns
from pymoe.pipe.execution.values import Crossing, Sent, arrive, unpack, version_of

__all__ = ["Checkpoints", "Recipe"]

Result = TypeVar("Result")


class Recipe:
    """What a forward needs to be run again."""

    __slots__ = ("_buffers", "_seen", "_sent")

    def __init__(self, sent: Sequence[Sent], buffers: Buffers, seen: list[Contents]) -> None:
        self._sent = sent
        self._buffers = buffers
        self._seen = seen

    def repeat(self, forward: Callable[[Sequence[Sent]], Result]) -> Result:
        """``forward`` of the same inputs."""
        return self._buffers.repeat(self._seen, lambda: forward(self._sent))


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
        """Run a forward without a graph. Returns what it takes to repeat it, and its outputs.

        Raises:
            RuntimeError: it has changed an input in place that it has left alone before.
        """
        edited = self._edited
        given: list[torch.Tensor] = []  # to the stage
        kept: list[torch.Tensor] = []  # for the repetition
        values = []
        for value in sent:
            row = list(value.leaves)
            for position, leaf in enumerate(row):
                if type(leaf) is Crossing:
                    tensor = arrive(leaf, device)
                    kept.append(leaf.tensor)
                    own = edited is None or len(given) in edited
                    row[position] = tensor.clone() if own else tensor.detach()
                    given.append(row[position])
            values.append(unpack(row, value.structure))
        versions = [version_of(tensor) for tensor in given]
        outputs, seen = self._buffers.watch(lambda: _without_graph(call, values))
        changed = {n for n, version in enumerate(versions) if version_of(given[n]) != version}
        if edited is not None and not changed <= edited:
            raise RuntimeError(
                "a checkpointed stage has changed an input in place, and needs it to be run again; change a copy "
                "(inplace=False), or use checkpoint='never'"
            )
        self._edited = changed if edited is None else edited
        for number in changed:
            increment_version(kept[number])  # for others who have it, as without checkpointing
        again = [
            Sent([Crossing(x.tensor, x.origin, x.number) if type(x) is Crossing else x for x in v.leaves], v.structure)
            for v in sent
        ]
        return Recipe(again, self._buffers, seen), outputs


def _without_graph(call: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
    # Autocast would keep the casts of weights, without a history, for forwards that need one.
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            return call(values)
    finally:
        torch.set_autocast_cache_enabled(cache)
