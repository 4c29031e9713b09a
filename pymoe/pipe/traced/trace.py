"""Captures a model, and splits it at the same places again for every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from pymoe.pipe.capture import Captured, capture
from pymoe.pipe.capture.graph import all_nodes
from pymoe.pipe.traced.graph_passes import split_regions
from pymoe.pipe.traced.partition import compute_nodes
from pymoe.pipe.traced.split_points import SplitPoint, is_marker, mark, marked

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
Key = tuple[str, str, int]


@dataclass
class Trace:
    """Captures a model, with markers at its stage boundaries."""

    split_spec: Mapping[str, SplitPoint] | None
    split_policy: SplitPolicy | None
    dynamic_shapes: Any
    opaque: Sequence[type[nn.Module] | str]
    _chosen: list[list[Key]] | None = None
    """For every boundary of a policy, the keys of the nodes after it."""
    _wanted: int | None = None
    """How many stages the policy is to make, if it says so."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """Capture the model in its present mode.

        Raises:
            CaptureError: it cannot be captured.
            TypeError: the policy does not return a graph module.
            ValueError: a module that the specification names does not exist, or is not called.
        """
        spec = self.split_spec or {}
        module = marked(module, spec) if spec else module
        captured = capture(module, args, kwargs, dynamic_shapes=self.dynamic_shapes, opaque=self.opaque)
        split_regions(captured.graph.graph)
        if spec:
            _check_calls(captured.graph, spec)
        if self._chosen is not None:
            _mark_again(captured.graph.graph, self._chosen)
        elif self.split_policy is not None:
            self._wanted = getattr(self.split_policy, "stages", None)
            changed = self.split_policy(captured.graph)
            if not isinstance(changed, fx.GraphModule):
                raise TypeError(
                    f"split_policy: expected a torch.fx.GraphModule as its result, got {type(changed).__name__}"
                )
            object.__setattr__(captured, "graph", changed)
            self._chosen = _boundaries(changed.graph)
            self.split_policy = None  # other modes are split at the same places
        return captured

    def why_one_stage(self) -> str | None:
        """Return why a model for which several stages were requested is one; None if none were."""
        ends = "at the beginning or the end of what the model computes, where they make no stages"
        if self.split_spec:
            return f"all split points of split_spec ({', '.join(self.split_spec)}) are {ends}"
        if self._chosen is None or self._wanted == 1:
            return None
        if self._chosen:
            return f"all boundaries that split_policy has inserted are {ends}"
        return (
            "split_policy has inserted no boundary: pymoe.pipe.mark_boundary(node) inserts one before a node, and the "
            "policy returns the graph module in which it did so"
        )


def _check_calls(graph: fx.GraphModule, spec: Mapping[str, SplitPoint]) -> None:
    """Refuse split points at modules that are never called, which would make no boundary."""
    called = {path for node in all_nodes(graph.graph) for path, _ in node.meta.get("nn_module_stack", {}).values()}
    for name in spec:
        if name and name not in called:
            raise ValueError(f"split_spec: the model's forward does not call {name!r}")


def _keys(nodes: Sequence[fx.Node]) -> list[Key]:
    """Return names of nodes that captures in other modes share: module, operator, and the count of both so far."""
    seen: Counter[tuple[str, str]] = Counter()
    keys = []
    for node in nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        pair = (stack[-1][0] if stack else "", str(node.target))
        keys.append((*pair, seen[pair]))
        seen[pair] += 1
    return keys


def _boundaries(graph: fx.Graph) -> list[list[Key]]:
    nodes = compute_nodes(graph)
    key_of = dict(zip(nodes, _keys(nodes), strict=True))
    found: list[list[Key]] = []
    for node in graph.nodes:
        if is_marker(node):
            found.append([])
        elif node in key_of:
            for after in found:
                after.append(key_of[node])
    return found


def _mark_again(graph: fx.Graph, boundaries: Sequence[Sequence[Key]]) -> None:
    nodes = compute_nodes(graph)
    node_of = dict(zip(_keys(nodes), nodes, strict=True))
    for keys in boundaries:
        node = next((node_of[key] for key in keys if key in node_of), None)
        if node is not None:
            mark(graph, node)
