"""One micro-batch in one stage, from its forward to the end of its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pymoe.pipe.context import MicroBatch, call_for
from pymoe.pipe.execution.checkpoint import Checkpoints, Recipe
from pymoe.pipe.execution.leaf_sums import LeafSums
from pymoe.pipe.execution.values import Crossing, Entrance, Sent, arrive, enter, pack, take, unpack
from pymoe.pipe.split_backward import SplitBackward
from pymoe.pipe.stages import Stage
from pymoe.runtime.parallel.compiled import are_compiled
from pymoe.runtime.parallel.isolated import differentiate, edge_of, find_leaves_and_nodes
from pymoe.runtime.parallel.random_streams import Stream, with_stream
from pymoe.runtime.parallel.state import ThreadState, in_state

__all__ = ["Activation"]


class Activation:
    """What the backward of one micro-batch through one stage needs: a graph, or, checkpointed, what to make it of.

    Tensors that the stage sends have numbers here, in their order; :meth:`take` collects their gradients.
    """

    __slots__ = ("_grads", "_graph", "_recipe", "_split", "_state", "_stream", "micro_batch", "stage")

    def __init__(self, stage: Stage, micro_batch: MicroBatch, stream: Callable[[], Stream], state: ThreadState) -> None:
        self.stage = stage
        self.micro_batch = micro_batch
        self._stream = stream  # from its beginning, so that a repetition draws the same numbers
        self._state = state  # in which a repetition runs
        self._grads: list[torch.Tensor | None] = []
        self._graph: _Graph | None = None
        self._recipe: Recipe | None = None
        self._split: SplitBackward | None = None

    def evaluate(self, sent: Sequence[Sent]) -> list[Sent]:
        """The stage's outputs, without a backward pass to come."""
        device = self.stage.device
        values = [
            unpack([arrive(x, device) if type(x) is Crossing else x for x in value.leaves], value.structure)
            for value in sent
        ]
        return [pack(output, Crossing) for output in self._call(self._stream(), self.micro_batch, values)]

    def forward(self, sent: Sequence[Sent]) -> list[Sent]:
        """The stage's outputs. Keeps the graph."""
        self._graph, packed = self._make_graph(sent, self.micro_batch)
        self._grads = [None] * len(self._graph.roots)
        return packed

    def forward_checkpointed(self, sent: Sequence[Sent], checkpoints: Checkpoints) -> list[Sent]:
        """The stage's outputs. Keeps its inputs, and runs once more when the backward comes."""
        micro_batch = replace(self.micro_batch, checkpointing=True)
        self._recipe, outputs = checkpoints.forward(
            sent, self.stage.device, lambda values: self._call(self._stream(), micro_batch, values)
        )

        def cross(tensor: torch.Tensor) -> Crossing:
            self._grads.append(None)
            needs = tensor.is_floating_point() or tensor.is_complex()
            return Crossing(tensor, self if needs else None, len(self._grads) - 1)

        return [pack(output, cross) for output in outputs]

    def take(self, number: int, grad: torch.Tensor) -> None:
        """One of the gradients of the tensor ``number`` that the stage has sent."""
        take(self._grads, number, grad)

    def backward(self, sums: LeafSums, keep: bool = False) -> None:
        """Both parts of the backward; the gradients of leaves go to ``sums``. ``keep``: there will be another."""
        graph = self._graph or self._repeat()
        edges, leaves = graph.entrance.edges, graph.leaves
        run = functools.partial(differentiate, keep=keep or not graph.is_compiled)
        found = with_stream(graph.stream, run, graph.roots, self._grads, edges, leaves, graph.entrance.node)
        graph.entrance.hand_on(found)
        sums.add(leaves, found[len(edges) :])
        if keep:
            self._grads = [None] * len(self._grads)
        else:
            self.release()

    def backward_input(self) -> None:
        """The first part: gradients for the stages before."""
        graph = self._graph = self._graph or self._repeat()
        given = [(root, grad) for root, grad in zip(graph.roots, self._grads, strict=True) if root and grad is not None]
        self._split = SplitBackward(
            [root for root, _ in given], graph.entrance.edges, graph.leaves, is_compiled=graph.is_compiled
        )
        grads = [grad for _, grad in given]
        graph.entrance.hand_on(with_stream(graph.stream, self._split.input_gradients, grads))

    def backward_weight(self, sums: LeafSums) -> None:
        """The second part: gradients of leaves."""
        graph, split = self._graph, self._split
        assert graph is not None
        assert split is not None
        sums.add(graph.leaves, with_stream(graph.stream, split.weight_gradients))
        self.release()

    def release(self) -> None:
        """Let go of everything."""
        self._graph = self._recipe = self._split = None
        self._grads = []

    @property
    def is_checkpointed(self) -> bool:
        """Whether there is no graph yet."""
        return self._recipe is not None

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The leaves whose gradients its backward adds to; unknown, so empty, while there is no graph."""
        return () if self._graph is None else self._graph.leaves

    def _call(self, stream: Stream, micro_batch: MicroBatch, values: Sequence[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = with_stream(stream, call_for, micro_batch, self.stage.function, *values)
        return outputs

    def _make_graph(self, sent: Sequence[Sent], micro_batch: MicroBatch) -> tuple[_Graph, list[Sent]]:
        entrance, stream = enter(sent, self.stage.device), self._stream()
        outputs = self._call(stream, micro_batch, entrance.values)
        entrance.close()
        roots: list[GradientEdge | None] = []
        cross = functools.partial(self._cross, roots)
        packed = [pack(output, cross) for output in outputs]
        return _Graph(entrance, roots, stream), packed

    def _cross(self, roots: list[GradientEdge | None], tensor: torch.Tensor) -> Crossing:
        if not tensor.requires_grad:
            roots.append(None)
            return Crossing(tensor)
        roots.append(edge_of(tensor) if tensor.grad_fn is not None else get_gradient_edge(tensor))
        return Crossing(tensor.detach(), self, len(roots) - 1)

    def _repeat(self) -> _Graph:
        recipe = self._recipe
        assert recipe is not None
        micro_batch = replace(self.micro_batch, recomputing=True)
        graph, _ = in_state(self._state, recipe.repeat, lambda sent: self._make_graph(sent, micro_batch))
        if len(graph.roots) != len(self._grads):
            raise RuntimeError(
                f"the stage has returned {len(self._grads)} tensors, and {len(graph.roots)} when it was run again for "
                "its backward pass: under checkpointing it must do the same both times"
            )
        return graph


class _Graph:
    """The graph of one pass through a stage: where it begins and ends, and the leaves that it has reached."""

    __slots__ = ("entrance", "is_compiled", "leaves", "roots", "stream")

    def __init__(self, entrance: Entrance, roots: list[GradientEdge | None], stream: Stream) -> None:
        self.entrance = entrance
        self.roots = roots
        self.stream = stream  # going on where the forward has left it
        self.leaves, nodes = find_leaves_and_nodes([root.node for root in roots if root is not None], entrance.node)
        self.is_compiled = are_compiled(nodes)  # and must not be kept
