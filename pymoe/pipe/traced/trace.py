"""From any model to its stages: captured, and split at the same places again for every mode."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pymoe.pipe.capture import Captured, capture
from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.capture.graph import all_nodes
from pymoe.pipe.traced.graph_passes import split_regions
from pymoe.pipe.traced.losses import LossWrapper
from pymoe.pipe.traced.model import TracedModel
from pymoe.pipe.traced.partition import compute_nodes
from pymoe.pipe.traced.shared_state import Spec
from pymoe.pipe.traced.split_points import SplitPoint, annotate_split_points, is_marker, mark

__all__ = ["SplitPolicy", "trace_model"]

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
Key = tuple[str, str, int]


def trace_model(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None,
    split_spec: Mapping[str, SplitPoint] | None,
    split_policy: SplitPolicy | None,
    *,
    devices: Sequence[torch.device | str | int] | None,
    multi_use_param_spec: Spec,
    output_loss_value_spec: Any,
    dynamic_shapes: Any,
    opaque: Sequence[type[nn.Module] | str],
) -> TracedModel:
    """Capture a model and cut it into stages; :func:`pymoe.pipeline` documents the arguments and errors."""
    if split_spec and split_policy is not None:
        raise ValueError("pipeline: split_spec or split_policy, not both")
    if not isinstance(module, nn.Module):
        raise TypeError(f"pipeline: the model must be an nn.Module, got {type(module).__name__}")
    if not isinstance(mb_args, (tuple, list)):
        raise TypeError(f"pipeline: mb_args must be a tuple of arguments, got {type(mb_args).__name__}")
    if output_loss_value_spec is None and isinstance(module, LossWrapper):
        output_loss_value_spec = module.loss_spec
    options: dict[str, Any] = {"dynamic_shapes": dynamic_shapes}
    if opaque:
        options["opaque"] = opaque
    trace = Trace(split_spec, split_policy, options)
    staged = TracedModel(
        module,
        tuple(mb_args),
        dict(mb_kwargs or {}),
        trace,
        multi_use=multi_use_param_spec,
        loss_spec=output_loss_value_spec,
        devices=devices,
    )
    if len(staged.parts) == 1 and (why := why_one_stage(trace)) is not None:
        warnings.warn(f"pipeline: the model is one stage: {why}", stacklevel=stack_level())
    return staged


@dataclass
class Trace:
    """Captures a model, with markers at its stage boundaries."""

    split_spec: Mapping[str, SplitPoint] | None
    split_policy: SplitPolicy | None
    options: Mapping[str, Any]
    """For ``capture``."""
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
        captured = capture(annotate_split_points(module, spec) if spec else module, args, kwargs, **self.options)
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


def why_one_stage(trace: Trace) -> str | None:
    """Return why a model for which several stages were requested is one; None if none were."""
    ends = "at the beginning or the end of what the model computes, where they make no stages"
    if trace.split_spec:
        return f"all split points of split_spec ({', '.join(trace.split_spec)}) are {ends}"
    if trace._chosen is None or trace._wanted == 1:
        return None
    if trace._chosen:
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
