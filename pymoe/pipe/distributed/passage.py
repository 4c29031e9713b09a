"""One mini-batch on its way through the stages of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pymoe.autograd.graph_nodes import edge_of, find_leaves
from pymoe.autograd.isolated_graph import differentiate
from pymoe.autograd.random_streams import Stream
from pymoe.autograd.thread_state import current
from pymoe.pipe.context import MicroBatch, in_pipeline
from pymoe.pipe.distributed.messages import (
    Key,
    Message,
    Subject,
    describe_tensors,
    describe_values,
    read_tensors,
    read_values,
)
from pymoe.pipe.distributed.plan import Plan
from pymoe.pipe.distributed.random_base import SharedSource, base_of_this_process
from pymoe.pipe.distributed.transport import Transport
from pymoe.pipe.execution.activation import Activation
from pymoe.pipe.execution.gradients import WeightedSums
from pymoe.pipe.execution.graph import (
    BoundaryTensor,
    GradAccumulator,
    Graph,
    StageValue,
    have_tangents,
    memory_of,
    pack,
    receive,
    unpack,
)
from pymoe.pipe.execution.recompute import StageRecompute
from pymoe.pipe.execution.step_state import StepInputs
from pymoe.pipe.stages import INPUT, Source

__all__ = ["Passage"]

Ends = list[tuple[GradAccumulator, int, torch.device] | None]


class Borrowed(GradAccumulator):
    """Tensors that another rank has made: the gradients that its stages will get from the stages of this one."""

    def __init__(self, count: int) -> None:
        self.grads = [None] * count


class Passage:
    """The forwards and backwards of the stages of one rank, for one mini-batch, in an order in which they can run."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        step: int,
        *,
        graphs: bool,
        recompute: Sequence[StageRecompute],
        recomputed: range,
        count: int,
    ) -> None:
        """
        Args:
            plan: what goes where.
            transport: to the other ranks.
            step: its number, the same on all ranks.
            graphs: whether there will be backward passes.
            recompute: for every stage of the pipeline.
            recomputed: the micro-batches whose forward is recomputed.
            count: the number of micro-batches.
        """
        self.plan = plan
        self.sums = {stage: WeightedSums() for stage in plan.stages}
        self.inputs: dict[int, StepInputs] = {}
        self.rows: dict[int, int] = {}
        self.random: SharedSource | None = None
        self.graphs = graphs
        self.forwards = 0
        self._transport = transport
        self._step = step
        self._recompute = recompute
        self._recomputed = recomputed
        self._count = count
        self._state = current()
        self._values: dict[tuple[int, Source], StageValue] = {}
        self._left: dict[tuple[int, Source], int] = {}
        self._activations: dict[tuple[int, int], Activation] = {}
        self._borrowed: dict[tuple[int, int], Borrowed] = {}
        self._lent: dict[tuple[int, int, int], Ends] = {}
        self._exits: dict[int, Graph] = {}
        if recomputed:
            for stage in plan.stages:
                recompute[stage].begin_step()

    def forward(self, stage: int, micro_batch: int, inputs: Sequence[Any], rows: int) -> list[Any] | None:
        """Run the stage. Returns the model's output values in the last stage.

        Args:
            stage: of this rank.
            micro_batch: its number.
            inputs: of the model; stage 0 alone looks at them.
            rows: of the micro-batch, in stage 0.
        """
        plan, pipeline = self.plan, self.plan.pipeline
        about = pipeline.stages[stage]
        if stage == 0:
            self._begin(micro_batch, inputs, rows)
        for maker in plan.waits_for[stage]:
            if (maker, micro_batch) not in self._borrowed:
                self._receive_values(maker, micro_batch)
        sent = [self._values[micro_batch, source] for source in about.inputs]
        assert self.random is not None
        description = MicroBatch(
            micro_batch, self._count, 1.0, stage=stage
        )  # its share is known when all have been seen
        position = micro_batch * len(pipeline.stages) + stage
        activation = Activation(about, description, self.random, position, self._state)
        with in_pipeline(Stream(self.random, -1)):
            recompute = self._recompute[stage] if micro_batch in self._recomputed else None
            made = activation.forward(sent, self.graphs, recompute)
        if self.graphs:
            self._activations[stage, micro_batch] = activation
        del sent
        for source in about.inputs:
            self._use(micro_batch, source)
        for source, value in zip(pipeline.made[stage], made, strict=False):
            self._put(micro_batch, source, value)
        del made
        for rank, sources in plan.sent[stage].items():
            self._send_values(stage, micro_batch, rank, sources)
        for source in {source for sources in plan.sent[stage].values() for source in sources}:
            self._use(micro_batch, source)
        outputs = self._leave(micro_batch) if stage == len(pipeline.stages) - 1 else None
        self.forwards += 1
        return outputs

    def backward(self, stage: int, micro_batch: int, loss: torch.Tensor | None, whole: bool) -> None:
        """The stage's backward.

        Args:
            stage: of this rank.
            micro_batch: its number.
            loss: in the last stage.
            whole: with the gradients of weights, for which :meth:`backward_weight` is otherwise.
        """
        plan = self.plan
        if stage == len(plan.rank_of) - 1:
            assert loss is not None
            self._begin_backward(micro_batch, loss)
        for rank in plan.sent[stage]:
            self._receive_gradients(stage, micro_batch, rank)
        activation = self._activations[stage, micro_batch]
        assert self.random is not None
        with in_pipeline(Stream(self.random, -1)):
            if whole:
                del self._activations[stage, micro_batch]
                activation.backward(self.sums[stage].of(self.rows[micro_batch]))
            else:
                activation.backward_input()
        for maker in plan.returns[stage]:
            borrowed = self._borrowed.pop((maker, micro_batch))
            self._send(plan.rank_of[maker], Subject.GRADIENTS, maker, micro_batch, *describe_tensors(borrowed.grads))

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        """The rest of the stage's backward."""
        assert self.random is not None
        with in_pipeline(Stream(self.random, -1)):
            self._activations.pop((stage, micro_batch)).backward_weight(self.sums[stage].of(self.rows[micro_batch]))

    def _begin(self, micro_batch: int, inputs: Sequence[Any], rows: int) -> None:
        """The micro-batch comes in."""
        if have_tangents(inputs):
            raise NotImplementedError("pymoe.pipe: tangents of forward-mode differentiation do not go to other ranks")
        self.rows[micro_batch] = rows
        if self.random is None:
            self.random = SharedSource(base_of_this_process())
        given = self.inputs[micro_batch] = StepInputs()
        for number, value in enumerate(inputs):
            self._put(micro_batch, Source(INPUT, number), pack(value, given.cross if self.graphs else BoundaryTensor))

    def _leave(self, micro_batch: int) -> list[Any]:
        """The model's outputs. Their history begins here, for whoever computes a loss."""
        outputs = self.plan.pipeline.outputs
        sent = [self._values[micro_batch, source] for source in outputs]
        for source in self.plan.takes[-1][len(self.plan.pipeline.stages[-1].inputs) :]:
            self._use(micro_batch, source)
        for source in {source for source in outputs if source.stage == len(self.plan.rank_of) - 1}:
            self._use(micro_batch, source)
        if not self.graphs:
            return [
                unpack([receive(x, None) if type(x) is BoundaryTensor else x for x in value.leaves], value.structure)
                for value in sent
            ]
        graph = self._exits[micro_batch] = Graph()
        return graph.begin(sent)

    def _begin_backward(self, micro_batch: int, loss: torch.Tensor) -> None:
        """From the loss to the model's outputs."""
        graph = self._exits.pop(micro_batch)
        graph.close()
        if not self.rows[micro_batch]:
            return  # a mean over no rows is not a number, and counts nothing
        if loss.grad_fn is None:
            raise RuntimeError("the loss does not require gradients: nothing that it depends on does")
        root = edge_of(loss)
        leaves = find_leaves([root.node], graph.entry)
        found = differentiate([root], [torch.ones_like(loss)], graph.edges, leaves, graph.entry)
        graph.deliver(found)
        self.sums[len(self.plan.rank_of) - 1].of(self.rows[micro_batch]).add(leaves, found[len(graph.edges) :])
        if not loss._is_view():
            loss.detach_()  # the schedule keeps it to the end of the step, and its graph with it

    def _put(self, micro_batch: int, source: Source, value: StageValue) -> None:
        if uses := self.plan.uses[source]:
            self._values[micro_batch, source] = value
            self._left[micro_batch, source] = uses

    def _use(self, micro_batch: int, source: Source) -> None:
        key = micro_batch, source
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key], self._values[key]

    def _send(
        self, rank: int, subject: Subject, stage: int, micro_batch: int, description: bytes, tensors: list[torch.Tensor]
    ) -> None:
        random = self.random
        assert random is not None
        notes = self.rows.get(micro_batch, 0), random.base, int(random.was_asked)
        self._transport.send(rank, Message(Key(self._step, subject, stage, micro_batch), description, tensors, notes))

    def _receive(self, rank: int, subject: Subject, stage: int, micro_batch: int) -> Message:
        message = self._transport.receive(rank, Key(self._step, subject, stage, micro_batch))
        _, base, was_asked = message.notes
        if self.random is None:
            self.random = SharedSource(base)
        self.random.was_asked |= bool(was_asked)
        return message

    def _send_values(self, stage: int, micro_batch: int, rank: int, sources: Sequence[Source]) -> None:
        values = [self._values[micro_batch, source] for source in sources]
        changing = self._changing(stage, micro_batch, sources)
        description, tensors = describe_values(values)
        tensors = [tensor.clone() if memory_of(tensor) in changing else tensor for tensor in tensors]
        self._send(rank, Subject.VALUES, stage, micro_batch, description, tensors)
        if self.graphs:
            self._lent[stage, micro_batch, rank] = [
                None if leaf.accumulator is None else (leaf.accumulator, leaf.number, leaf.tensor.device)
                for value in values
                for leaf in value.leaves
                if type(leaf) is BoundaryTensor
            ]

    def _changing(self, stage: int, micro_batch: int, sources: Sequence[Source]) -> set[int]:
        """The memory of values that may be written to while they are on their way: what stages here take, too, and what
        belongs to the stage.
        """
        taken = [self._values[micro_batch, source] for source in sources if self._left[micro_batch, source] > 1]
        tensors = [leaf.tensor for value in taken for leaf in value.leaves if type(leaf) is BoundaryTensor]
        for module in self.plan.pipeline.stages[stage].modules:
            tensors += [*module.buffers(), *module.parameters()]
        return {memory_of(tensor) for tensor in tensors}

    def _receive_values(self, maker: int, micro_batch: int) -> None:
        message = self._receive(self.plan.rank_of[maker], Subject.VALUES, maker, micro_batch)
        self.rows[micro_batch] = message.notes[0]
        borrowed = self._borrowed[maker, micro_batch] = Borrowed(len(message.tensors))
        values = read_values(message.read(), message.tensors, borrowed if self.graphs else None)
        for source, value in zip(self.plan.received[maker], values, strict=True):
            self._put(micro_batch, source, value)

    def _receive_gradients(self, stage: int, micro_batch: int, rank: int) -> None:
        message = self._receive(rank, Subject.GRADIENTS, stage, micro_batch)
        ends = self._lent.pop((stage, micro_batch, rank))
        for end, grad in zip(ends, read_tensors(message.read(), message.tensors), strict=True):
            if end is not None and grad is not None:
                accumulator, number, device = end
                accumulator.add_gradient(number, grad.to(device))

    def send_gradients(self, stage: int, rank: int, grads: list[torch.Tensor | None]) -> None:
        """Sums of a stage's gradients of shared parameters, to a rank that has them, too."""
        self._send(rank, Subject.TIED_GRADIENTS, stage, 0, *describe_tensors(grads))

    def gradients_of(self, stage: int) -> list[torch.Tensor | None]:
        """Those of a stage on another rank."""
        message = self._receive(self.plan.rank_of[stage], Subject.TIED_GRADIENTS, stage, 0)
        return read_tensors(message.read(), message.tensors)
