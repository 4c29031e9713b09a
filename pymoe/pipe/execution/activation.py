"""One micro-batch in one stage, from its forward to the end of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pymoe.autograd.isolated_graph import differentiate
from pymoe.autograd.random_streams import Stream, with_stream
from pymoe.autograd.thread_state import ThreadState, in_state
from pymoe.pipe.context import MicroBatch, call_for
from pymoe.pipe.execution.checkpoint import Checkpoints, Recipe
from pymoe.pipe.execution.graph import Graph
from pymoe.pipe.execution.leaf_sums import LeafSums
from pymoe.pipe.execution.values import Crossing, Origin, Sent, arrive, is_fixed, pack, unpack
from pymoe.pipe.split_backward import SplitBackward
from pymoe.pipe.stages import Stage

__all__ = ["Activation"]


class Activation(Origin):
    """What the backward of one micro-batch through one stage needs: a graph, or, checkpointed, what to make it of.

    It takes the gradients of the tensors that the stage sends.
    """

    __slots__ = ("_graph", "_micro_batch", "_recipe", "_split", "_stage", "_state", "_stream")

    def __init__(self, stage: Stage, micro_batch: MicroBatch, stream: partial[Stream], state: ThreadState) -> None:
        self.grads = []
        self._stage = stage
        self._micro_batch = micro_batch
        self._stream = stream  # makes one from its beginning: a repetition draws the same numbers
        self._state = state  # in which a repetition runs
        self._graph: Graph | None = None
        self._recipe: Recipe | None = None
        self._split: SplitBackward | None = None

    def evaluate(self, sent: Sequence[Sent]) -> list[Sent]:
        """The stage's outputs, without a backward pass to come."""
        device = self._stage.device
        values = [
            unpack([arrive(x, device) if type(x) is Crossing else x for x in value.leaves], value.structure)
            for value in sent
        ]
        outputs = with_stream(self._stream(), call_for, self._micro_batch, self._stage.function, *values)
        return [pack(output, Crossing) for output in outputs]

    def forward(self, sent: Sequence[Sent]) -> list[Sent]:
        """The stage's outputs. Keeps the graph."""
        self._graph, made = self._make_graph(self._micro_batch, sent)
        self.grads = [None] * len(self._graph.roots)
        return made

    def forward_checkpointed(self, sent: Sequence[Sent], checkpoints: Checkpoints) -> list[Sent]:
        """The stage's outputs. Keeps its inputs, and runs once more when the backward comes."""
        stage, micro_batch = self._stage, replace(self._micro_batch, checkpointing=True)
        self._recipe, outputs = checkpoints.forward(
            sent,
            stage.device,
            lambda values: with_stream(self._stream(), call_for, micro_batch, stage.function, *values),
        )

        def cross(tensor: torch.Tensor) -> Crossing:
            self.grads.append(None)
            if not tensor.requires_grad:
                return Crossing(tensor)
            return Crossing(tensor.detach(), self, len(self.grads) - 1, is_fixed(tensor))

        return [pack(output, cross) for output in outputs]

    def backward(self, sums: LeafSums, keep: bool = False) -> None:
        """Both parts of the backward; the gradients of leaves go to ``sums``. ``keep``: there will be another."""
        graph = self._graph or self._repeat(keep)
        edges, leaves = graph.edges, graph.leaves
        assert graph.stream is not None
        found = with_stream(
            graph.stream,
            differentiate,
            graph.roots,
            self.grads,
            edges,
            leaves,
            graph.entry,
            keep or not graph.is_compiled,
        )
        graph.hand_on(found)
        sums.add(leaves, found[len(edges) :])
        if keep:
            self.grads = [None] * len(self.grads)
        else:
            self.release()

    def backward_input(self) -> None:
        """The first part: gradients for the stages before."""
        graph = self._graph = self._graph or self._repeat(False)
        given = [(root, grad) for root, grad in zip(graph.roots, self.grads, strict=True) if root and grad is not None]
        assert graph.stream is not None
        self._split = SplitBackward(
            [root for root, _ in given], graph.edges, graph.leaves, is_compiled=graph.is_compiled
        )
        graph.hand_on(with_stream(graph.stream, self._split.input_gradients, [grad for _, grad in given]))

    def backward_weight(self, sums: LeafSums) -> None:
        """The second part: gradients of leaves."""
        graph, split = self._graph, self._split
        assert graph is not None
        assert graph.stream is not None
        assert split is not None
        sums.add(graph.leaves, with_stream(graph.stream, split.weight_gradients))
        self.release()

    def release(self) -> None:
        """Let go of everything."""
        self._graph = self._recipe = self._split = None
        self.grads = []

    @property
    def is_checkpointed(self) -> bool:
        """Whether there is no graph yet."""
        return self._recipe is not None

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The leaves whose gradients its backward adds to; unknown, so empty, while there is no graph."""
        return () if self._graph is None else self._graph.leaves

    def _make_graph(self, micro_batch: MicroBatch, sent: Sequence[Sent]) -> tuple[Graph, list[Sent]]:
        stage, stream = self._stage, self._stream()
        graph = Graph(stream, stage.device)
        outputs: Sequence[Any] = with_stream(stream, call_for, micro_batch, stage.function, *graph.begin(sent))
        return graph, graph.end(outputs, self)

    def _repeat(self, again: bool) -> Graph:
        recipe = self._recipe
        assert recipe is not None
        micro_batch = replace(self._micro_batch, recomputing=True)
        graph, _ = in_state(self._state, recipe.repeat, partial(self._make_graph, micro_batch), again)
        if len(graph.roots) != len(self.grads):
            raise RuntimeError(
                f"the stage has returned {len(self.grads)} tensors, and {len(graph.roots)} when it was run again for "
                "its backward pass: under checkpointing it must do the same both times"
            )
        return graph
