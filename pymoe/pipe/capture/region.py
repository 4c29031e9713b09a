"""A block of a model's code that runs in a state of its own: without gradients, or in autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["Region", "region_of"]


class Region:
    """A function of values, as a node calls it: the block's graph, run in its state. Returns a list."""

    def __init__(self, name: str, graph: fx.GraphModule, grad: bool | None, autocast: dict[str, Any] | None) -> None:
        self.__name__ = name
        self.graph = graph
        self.grad = grad
        """Whether gradients are recorded in the block; None: as outside."""
        self.autocast = autocast
        """Arguments of ``torch.autocast`` for the block; None: as outside."""

    def __call__(self, *values: Any) -> list[Any]:
        if self.autocast is not None:
            with torch.autocast(**self.autocast):
                return list(self.graph(*values))
        with torch.set_grad_enabled(torch.is_grad_enabled() if self.grad is None else self.grad):
            return list(self.graph(*values))

    def __repr__(self) -> str:
        return f"{self.__name__}({self.autocast or {'grad': self.grad}})"


def region_of(node: fx.Node, owner: fx.GraphModule) -> tuple[Region, tuple[Any, ...]] | None:
    """The region that a node of an exported graph calls, and what it is given; None for other nodes."""
    hop = torch.ops.higher_order
    if node.target is hop.wrap_with_set_grad_enabled:
        grad, block, *values = node.args
        return Region("grad" if grad else "no_grad", _graph(block, owner), bool(grad), None), tuple(values)
    if node.target is hop.wrap_with_autocast:
        device, dtype, enabled, cache, block, *values = node.args
        autocast = {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": cache}
        return Region("autocast", _graph(block, owner), None, autocast), tuple(values)
    return None


def _graph(block: Any, owner: fx.GraphModule) -> fx.GraphModule:
    graph = getattr(owner, block.target)
    assert isinstance(graph, fx.GraphModule)
    return graph
