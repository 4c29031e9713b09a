"""What the nodes of a captured graph cost: parameters, operations, or measured time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from pymoe.pipe.capture.opaque import OpaqueModule, opaque_modules
from pymoe.pipe.capture.snapshots import attributes_restored

__all__ = ["flops", "parameters", "seconds"]

Costs = dict[fx.Node, float]


def parameters(graph: fx.GraphModule) -> Costs:
    """Numbers in the parameters that a node is the first to use."""
    seen: set[int] = set()
    costs: Costs = {}
    for node in graph.graph.nodes:
        found: list[torch.Tensor] = []
        if isinstance(node.target, OpaqueModule):
            found += node.target.module.parameters()
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                owner, _, name = str(source.target).rpartition(".")
                value = getattr(graph.get_submodule(owner), name)
                found += [value] if isinstance(value, nn.Parameter) else []
        costs[node] = sum(value.numel() for value in found if id(value) not in seen)
        seen.update(id(value) for value in found)
    return costs


def flops(graph: fx.GraphModule) -> Costs:
    """Floating point operations of matrix products, convolutions and attention in the forward pass; nothing is run."""
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        counting = _Counting(graph, counter)
        counting.run(*_example(graph))
    return counting.costs


def seconds(graph: fx.GraphModule, passes: int = 5) -> Costs:
    """Forward and backward of every node, on this machine: the median of some passes after one that is not counted.

    The model and torch's random generators are left as they were.
    """
    taken = []
    with _as_it_was(graph):
        example = _example(graph)
        for _ in range(passes + 1):
            timing = _Timing(graph)
            timing.run(*example)
            taken.append(timing.costs)
    return {node: statistics.median(costs[node] for costs in taken[1:]) for node in taken[0]}


@contextmanager
def _as_it_was(graph: fx.GraphModule) -> Iterator[None]:
    """After the block opaque modules and random generators are what they were; others are only given copies."""
    modules = [call.module for call in opaque_modules(graph.graph)]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    inputs = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    tensors = [*graph.parameters(), *[value for value in inputs if isinstance(value, torch.Tensor)]]
    devices = {tensor.device for tensor in tensors}
    with ExitStack() as stack:
        for device in devices:
            if device.type != "cpu":
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        stack.enter_context(torch.random.fork_rng([]))
        for module in modules:
            stack.enter_context(attributes_restored(module))
        yield
    for buffer, before in buffers:
        buffer.data.copy_(before)


class _Counting(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(graph)
        self.costs: Costs = {}
        self._counter = counter

    def run_node(self, n: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        result = super().run_node(n)
        self.costs[n] = float(self._counter.get_total_flops() - before)
        return result


class _Timing(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.costs: Costs = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        sources: list[torch.Tensor] = []

        def apart(leaf: Any) -> Any:
            """A copy with a graph that begins at ``sources``, and which can be changed in place."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not leaf.requires_grad:
                return leaf.clone()
            sources.append(leaf.detach().requires_grad_())
            return sources[-1].clone()

        args, kwargs = _pytree.tree_map(apart, self.fetch_args_kwargs_from_env(n))
        begin = _now(sources)
        with torch.enable_grad():
            result = getattr(self, n.op)(n.target, args, kwargs)
            ends = [leaf for leaf in _pytree.tree_leaves(result) if _is_differentiable(leaf)]
            middle = _now(ends)
            gradients = [torch.ones_like(end) for end in ends]
            restart = _now(gradients)
            if ends and sources:
                torch.autograd.grad(ends, sources, gradients, allow_unused=True)
        self.costs[n] = middle - begin + _now(ends) - restart
        return _pytree.tree_map(_without_history, result)


def _without_history(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _now(tensors: list[torch.Tensor]) -> float:
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _example(graph: fx.GraphModule) -> list[Any]:
    """Arguments like those of the capture."""
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return [_like(value) if isinstance(value, torch.Tensor) else value for value in values]


def _like(value: torch.Tensor) -> torch.Tensor:
    shape = [int(size) if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    if value.is_floating_point() or value.is_complex():
        return torch.rand(shape, dtype=value.dtype, device=value.device)
    return torch.zeros(shape, dtype=value.dtype, device=value.device)
