"""A block of a model's code that runs in a state of its own: without gradients, or in autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pymoe.pipe.capture.entry import MODEL
from pymoe.pipe.capture.intercept import marker
from pymoe.pipe.capture.opaque import OpaqueCall

__all__ = ["Region", "call_of", "users_meta"]


class Region:
    """The target of a node that stands for such a block: the block's graph, run in its state. Returns a list."""

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


def call_of(node: fx.Node, owner: fx.GraphModule, calls: Sequence[OpaqueCall]) -> tuple[Any, tuple[Any, ...]] | None:
    """What a node of an exported graph calls, and with which values, if it is a region or an opaque call."""
    hop = torch.ops.higher_order
    if node.target is marker():
        number, *values = node.args
        assert isinstance(number, int)
        return calls[number], tuple(values)
    if node.target is hop.wrap_with_set_grad_enabled:
        grad, block, *values = node.args
        return Region("grad" if grad else "no_grad", _graph(block, owner, calls), bool(grad), None), tuple(values)
    if node.target is hop.wrap_with_autocast:
        device, dtype, enabled, cache, block, *values = node.args
        autocast = {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": cache}
        return Region("autocast", _graph(block, owner, calls), None, autocast), tuple(values)
    return None


def _graph(block: Any, owner: fx.GraphModule, calls: Sequence[OpaqueCall]) -> fx.GraphModule:
    """The graph of a block, with regions and opaque calls in it."""
    module = getattr(owner, block.target)
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        if (found := call_of(node, module, calls)) is not None:
            with module.graph.inserting_before(node):
                call = module.graph.call_function(*found)
            call.meta = node.meta
            node.replace_all_uses_with(call)
            module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        node.meta = users_meta(node)
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


def users_meta(node: fx.Node) -> dict[str, Any]:
    """What an exported graph knows of a node, as the model names the modules around it."""
    meta = {key: value for key, value in node.meta.items() if key not in ("from_node", "custom")}
    if "nn_module_stack" in meta:
        meta["nn_module_stack"] = {
            key: (path[len(MODEL) + 1 :], kind)
            for key, (path, kind) in meta["nn_module_stack"].items()
            if path == MODEL or path.startswith(f"{MODEL}.")
        }
    return meta
