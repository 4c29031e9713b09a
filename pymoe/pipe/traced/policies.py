"""Policies that split a captured graph into stages of equal cost: parameters, operations, or measured time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from pymoe._torch_private import FakeTensorMode, pytree
from pymoe.pipe.balance import balance_cost, least_maximum, now
from pymoe.pipe.capture.capture import opaque_modules
from pymoe.pipe.capture.opaque import OpaqueModule, example_tensor
from pymoe.pipe.capture.snapshots import attributes_restored
from pymoe.pipe.traced.partition import Aliases, compute_nodes, is_number
from pymoe.pipe.traced.split_points import mark

Costs = dict[fx.Node, float]
TOLERANCE = 1.1
"""The most expensive stage may cost this many times the least possible, if fewer values then cross each boundary."""


def split_into_equal_parameters(stages: int) -> Policy:
    """Return a policy that makes stages with about the same number of parameters.

    Args:
        stages: the number of stages, from 1 to the number of the graph's operators.

    Returns:
        A ``split_policy`` for :func:`pymoe.pipeline`.
    """
    return Policy(stages, _parameters)


def split_by_time(stages: int) -> Policy:
    """Return a policy that makes stages whose forward and backward together take about the same time.

    The policy measures the time with the sizes of the example.

    Args:
        stages: the number of stages, from 1 to the number of the graph's operators.

    Returns:
        A ``split_policy`` for :func:`pymoe.pipeline`.
    """
    return Policy(stages, _seconds)


def split_by_flops(stages: int) -> Policy:
    """Return a policy that makes stages with about the same number of floating point operations in the forward.

    The policy counts the operations for the sizes of the example, without running them.

    Args:
        stages: the number of stages, from 1 to the number of the graph's operators.

    Returns:
        A ``split_policy`` for :func:`pymoe.pipeline`.
    """
    return Policy(stages, _flops)


@dataclass(frozen=True)
class Policy:
    """Splits a graph into stages so that as few values as possible cross any one boundary, while the most expensive
    stage costs at most 10 % more than necessary.

    Raises:
        ValueError: there are more stages than operators, or fewer than one.
    """

    stages: int
    cost: Callable[[fx.GraphModule], Costs]

    def __call__(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Insert markers into the graph, and return it."""
        nodes = compute_nodes(graph.graph)
        if not 1 <= self.stages <= len(nodes):
            raise ValueError(f"split_policy: cannot make {self.stages} stages of a model with {len(nodes)} operators")
        costs = _costs_in_order(graph.graph, nodes, self.cost(graph))
        for position in _boundaries(costs, _live_values(graph.graph, nodes), self.stages):
            mark(graph.graph, nodes[position])
        graph.recompile()
        return graph


def _costs_in_order(graph: fx.Graph, nodes: list[fx.Node], costs: Costs) -> list[float]:
    """Return the costs of ``nodes``; all 1 if all costs are 0.

    Costs of nodes that are not in ``nodes`` are included: each is added to the cost of the nearest earlier node of
    ``nodes``, or to the first cost if there is none.
    """
    places = {node: place for place, node in enumerate(nodes)}
    row, place = [0.0] * len(nodes), 0
    for node in graph.nodes:
        place = places.get(node, place)
        row[place] += costs.get(node, 0.0)
    return row if sum(row) > 0 else [1.0] * len(nodes)


def _live_values(graph: fx.Graph, nodes: list[fx.Node]) -> list[int]:
    """Return, for every node of ``nodes``, the number of tensors that were made by earlier nodes and are used by this
    node or a later one.

    A tensor and its views count once. Inputs, parameters and buffers do not count, because stages get them directly.
    """
    aliases, places = Aliases(graph), {node: place for place, node in enumerate(nodes)}
    position: dict[fx.Node, int] = {}
    place = -1
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        place = places.get(node, place)
        position[node] = place if node.op != "output" else len(nodes)
        for source in node.all_input_nodes:
            if not is_number(source):
                last[aliases.base(source)] = position[node]
    changes = [0] * (len(nodes) + 1)
    for node, end in last.items():
        begin = position[node]
        if node.op not in ("placeholder", "get_attr") and 0 <= begin < end:
            changes[begin + 1] += 1
            if end < len(nodes):
                changes[end + 1] -= 1
    return list(accumulate(changes[: len(nodes)]))


def _boundaries(costs: list[float], alive: list[int], stages: int) -> list[int]:
    """Return the positions of the nodes at which the second and later stages begin."""
    if stages == 1:
        return []
    best = least_maximum(costs, stages)
    for limit in sorted(set(alive[1:])):
        starts = [0, *_candidates(costs, alive, limit)]
        segments = [sum(costs[begin:end]) for begin, end in pairwise([*starts, len(costs)])]
        if len(segments) >= stages and least_maximum(segments, stages) <= TOLERANCE * best:
            sizes = balance_cost(segments, stages)
            return [starts[end] for end in list(accumulate(sizes))[:-1]]
    raise AssertionError("an optimum exists if all boundaries are allowed")


def _candidates(costs: list[float], alive: list[int], limit: int) -> list[int]:
    """Return the boundaries that at most ``limit`` values cross. Of several boundaries with only zero-cost nodes
    between them, return only the one that the fewest values cross.
    """
    found: list[int] = []
    for place in range(1, len(costs)):
        if alive[place] > limit:
            continue
        if found and not any(costs[found[-1] : place]):
            if alive[place] < alive[found[-1]]:
                found[-1] = place
        else:
            found.append(place)
    return found


def _parameters(graph: fx.GraphModule) -> Costs:
    """Return, for every node, the number of elements in the parameters that this node is the first to use."""
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


def _flops(graph: fx.GraphModule) -> Costs:
    """Return the number of floating point operations of every node's products, convolutions and attention."""
    counting = _NodeFlops(graph)
    with FakeTensorMode(allow_non_fake_inputs=True):
        counting.run(*_example(graph))
    return counting.costs


def _seconds(graph: fx.GraphModule, passes: int = 5) -> Costs:
    """Measure the time of every node's forward and backward in seconds: the median of ``passes`` after a warm-up.

    The model and torch's random generators are restored.
    """
    taken = []
    with _restored(graph):
        example = _example(graph)
        for _ in range(passes + 1):
            timing = _NodeTimes(graph)
            timing.run(*example)
            taken.append(timing.costs)
    return {node: statistics.median(costs[node] for costs in taken[1:]) for node in taken[0]}


@contextmanager
def _restored(graph: fx.GraphModule) -> Iterator[None]:
    """After the block, restore random generators, and attributes and buffers of opaque modules.

    Operators need no such care, because they get copies of tensors.
    """
    modules = [call.module for call in opaque_modules(graph.graph)]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    inputs = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    tensors = [*graph.parameters(), *[value for value in inputs if isinstance(value, torch.Tensor)]]
    drawn = list({tensor.device for tensor in tensors if tensor.device.type != "cpu"})
    try:
        with torch.random.fork_rng(drawn, device_type=drawn[0].type if drawn else "cuda"), ExitStack() as stack:
            for module in modules:
                stack.enter_context(attributes_restored(module))
            yield
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)


class _Costing(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.costs: Costs = {}


class _NodeFlops(_Costing):
    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.costs[n] = float(counter.get_total_flops())
        return result


class _NodeTimes(_Costing):
    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        sources: list[torch.Tensor] = []

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            """Return a copy that may be modified in place.

            If ``tensor`` requires a gradient, the copy is computed from a new leaf, which is added to ``sources``.
            """
            if not tensor.requires_grad:
                return tensor.clone()
            sources.append(tensor.detach().requires_grad_())
            return sources[-1].clone()

        args, kwargs = pytree.tree_map_only(torch.Tensor, apart, self.fetch_args_kwargs_from_env(n))
        begin = _now(sources)
        with torch.enable_grad():
            result = getattr(self, n.op)(n.target, args, kwargs)
            ends = [
                leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            middle = _now(ends)
            gradients = [torch.ones_like(end) for end in ends]
            restart = _now(gradients)
            if ends and sources:
                torch.autograd.grad(ends, sources, gradients, allow_unused=True)
        self.costs[n] = middle - begin + _now(ends) - restart
        return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), result)


def _now(tensors: list[torch.Tensor]) -> float:
    return now(*{tensor.device for tensor in tensors})


def _example(graph: fx.GraphModule) -> list[Any]:
    """Return arguments with the shapes and dtypes of the capture's example arguments."""

    def like(value: torch.Tensor) -> torch.Tensor:
        return example_tensor([size if isinstance(size, int) else int(size.node.hint) for size in value.shape], value)

    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return [like(value) if isinstance(value, torch.Tensor) else value for value in values]
