"""One micro-batch in one stage, from its forward to the end of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pymoe.autograd import random_streams
from pymoe.autograd.isolated_graph import differentiate
from pymoe.autograd.random_streams import Source, Stream, with_stream
from pymoe.autograd.thread_state import ThreadState, in_state
from pymoe.pipe import context
from pymoe.pipe.context import MicroBatch
from pymoe.pipe.execution.gradients import LeafSums
from pymoe.pipe.execution.graph import (
    BoundaryTensor,
    GradAccumulator,
    Graph,
    StageValue,
    is_fixed,
    pack,
    receive_value,
)
from pymoe.pipe.execution.recompute import Recomputation, StageRecompute
from pymoe.pipe.split_backward import SplitBackward
from pymoe.pipe.stages import Stage


class Activation(GradAccumulator):
    """What a micro-batch's forward through one stage leaves for its backward: a graph, or the means to recompute one.

    :meth:`forward` runs the stage, for pipelines in one process and across ranks alike. Then :meth:`backward`, or
    :meth:`backward_input` and :meth:`backward_weight`. All of them need a thread that is
    :func:`pymoe.pipe.context.in_pipeline`. Gradients of the tensors that the stage sends are added to this object.
    """

    __slots__ = ("_graph", "_micro_batch", "_position", "_random", "_recomputation", "_split", "_stage", "_state")

    def __init__(
        self, stage: Stage, micro_batch: MicroBatch, random: Source, position: int, state: ThreadState
    ) -> None:
        """Begin with the streams of random numbers of the mini-batch, of which the one at ``position`` is taken.

        ``state`` is that of the thread that asked for the forward; a recomputation runs in it, too.
        """
        self.grads = []
        self._stage = stage
        self._micro_batch = micro_batch
        self._random = random
        self._position = position
        self._state = state
        self._graph: Graph | None = None
        self._recomputation: Recomputation | None = None
        self._split: SplitBackward | None = None

    def forward(
        self, received: Sequence[StageValue], graphs: bool, recompute: StageRecompute | None = None
    ) -> list[StageValue]:
        """Run the stage's function and return what the stage sends.

        Args:
            received: the values of the stage's inputs.
            graphs: whether there will be a backward; without one nothing is kept.
            recompute: of the stage: keep the inputs instead of the graph, if there can be one. None: keep the graph.
        """
        device = self._stage.device
        if not graphs:
            arguments = [receive_value(value, device) for value in received]
            return [pack(output, BoundaryTensor) for output in self._call(arguments, self._stream(), self._micro_batch)]
        graph, about = Graph(self._stream(), device), self._micro_batch
        if recompute is not None and recompute.is_useful(received):
            about = about.in_run(checkpointing=True)
            with recompute.first_run(received, graph) as run:
                outputs = self._call(run.arguments, graph.stream, about)
            self._recomputation = run.recomputation
            if run.recomputation is not None:
                graph.close()
                sent = [pack(output, self._cut_off) for output in outputs]
                graph.refuse_hidden_tensors(sent)
                return sent
        else:
            outputs = self._call(graph.begin(received), graph.stream, about)
        self._graph = graph
        sent = graph.end(outputs, self)
        self.grads = [None] * len(graph.roots)
        return sent

    def backward(self, sums: LeafSums, keep: bool = False) -> None:
        """Run both parts of the backward; gradients of leaves are added to ``sums``. ``keep``: it will run again."""
        graph = self._graph or self._recompute(keep)
        edges, leaves, keeps = graph.edges, graph.leaves, keep or not graph.is_compiled
        found = with_stream(graph.stream, differentiate, graph.roots, self.grads, edges, leaves, graph.entry, keeps)
        graph.deliver(found)
        sums.add(leaves, found[len(edges) :])
        if keep:
            self.grads = [None] * len(self.grads)
        else:
            self.release()

    def backward_input(self) -> None:
        """Run the first part: gradients for the stages before."""
        graph = self._graph = self._graph or self._recompute(False)
        self._split = with_stream(
            graph.stream, SplitBackward, graph.roots, self.grads, graph.edges, graph.leaves, graph.is_compiled
        )
        graph.deliver(self._split.input_gradients)

    def backward_weight(self, sums: LeafSums) -> None:
        """Run the second part: gradients of leaves, which are added to ``sums``."""
        graph, split = self._graph, self._split
        assert graph is not None
        assert split is not None
        sums.add(graph.leaves, with_stream(graph.stream, split.weight_gradients))
        self.release()

    def release(self) -> None:
        self._graph = self._recomputation = self._split = None
        self.grads = []

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the leaves to which its backward adds; of a graph that is not there yet, the stage's parameters."""
        if self._graph is not None:
            return self._graph.leaves
        modules = () if self._recomputation is None else self._stage.modules
        return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]

    def _stream(self) -> Stream:
        """Its random numbers from their beginning: a recomputation draws the same ones."""
        return Stream(self._random, self._position)

    def _call(self, arguments: Sequence[Any], stream: Stream, micro_batch: MicroBatch) -> Sequence[Any]:
        """Run the stage's function. No call in the way back: Ctrl-C could come there."""
        streams, contexts = random_streams.this_thread, context.this_thread
        outer_stream, streams.stream = streams.stream, stream
        outer, contexts.micro_batch = contexts.micro_batch, micro_batch
        try:
            return self._stage.function(*arguments)
        finally:
            contexts.micro_batch, streams.stream = outer, outer_stream

    def _cut_off(self, tensor: torch.Tensor) -> BoundaryTensor:
        """A tensor that is sent, without its graph."""
        self.grads.append(None)
        if not tensor.requires_grad:
            return BoundaryTensor(tensor)
        return BoundaryTensor(tensor.detach(), self, len(self.grads) - 1, is_fixed(tensor))

    def _recompute(self, again: bool) -> Graph:
        """Make the graph by running the forward again. ``again``: not for the last time."""
        graph = Graph(self._stream(), self._stage.device)
        in_state(self._state, self._recompute_forward, graph, again)
        if len(graph.roots) != len(self.grads):
            raise RuntimeError(
                f"a checkpointed stage has returned {len(self.grads)} tensors, and {len(graph.roots)} when it was "
                "recomputed for its backward pass: it must do the same both times"
            )
        return graph

    def _recompute_forward(self, graph: Graph, again: bool) -> None:
        recomputation = self._recomputation
        assert recomputation is not None
        about = self._micro_batch.in_run(recomputing=True)
        with recomputation.inputs(again) as received:
            graph.end(self._call(graph.begin(received), graph.stream, about), self)
