"""Runs the stages of a pipe in this process, one mini-batch after another, and plans what they exchange with other
ranks: values, their gradients, and gradients of shared parameters.

A value is sent once from the rank that makes it to every other rank with a stage that takes it, and the gradients of
that rank's stages come back as one sum. Everything that a stage makes for a rank is sent together: for every
micro-batch one message there and one back. Inputs of the model count as made by stage 0, and its outputs as taken by
the last stage.

If stages on several ranks share a parameter, each rank has a copy, and all copies get the same gradient, the sum over
stages. Every rank adds the same parts in the same order, so copies that were equal stay equal to the last bit. A pipe
in one process gives the same sums up to rounding, because it weights micro-batches before their gradients are added.

All ranks draw from one source of random numbers, as a pipe in one process does: every stage has its own stream for
every micro-batch. The base of all streams comes from the default generator of the first stage's rank and is sent with
the values. If any stage has drawn in a step, the default generator of every rank advances by one number, so ranks with
equal seeds stay equal to each other and to a pipe in one process. Every message says whether a stage has drawn. In a
step without backwards no message goes back, so the last stage's rank sends an empty one to every other rank at the end.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pymoe.autograd import random_streams
from pymoe.autograd.graph_nodes import edge_of, find_leaves
from pymoe.autograd.isolated_graph import differentiate
from pymoe.autograd.random_streams import RandomStream
from pymoe.pipe.context import in_pipeline
from pymoe.pipe.distributed.messages import (
    Key,
    Message,
    Subject,
    Transport,
    describe_tensors,
    describe_values,
    read_tensors,
    read_values,
)
from pymoe.pipe.distributed.watchdog import watching
from pymoe.pipe.execution.graph import (
    BoundaryTensor,
    GradAccumulator,
    Graph,
    WeightedSums,
    accumulate,
    boundaries_of,
    flatten_value,
    have_tangents,
    memory_of,
    receive_value,
    refuse_unseen_edit,
    total,
)
from pymoe.pipe.execution.held_state import turns_of
from pymoe.pipe.execution.step_state import StageRecompute, Step, StepInputs, recomputed
from pymoe.pipe.loss_graph import LossReading, Words, check_mean_over_rows, read_loss
from pymoe.pipe.stages import INPUT, Pipeline, Source, StagedModel, shared_parameters
from pymoe.pipe.traced.model import StageModule


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The share of ``rank`` in a pipeline: its stages, and the values that it receives and sends."""

    pipeline: Pipeline
    rank_of: Sequence[int]
    """The rank of every stage."""
    rank: int

    @cached_property
    def stages(self) -> list[int]:
        """Return the stages of this rank."""
        return [stage for stage, rank in enumerate(self.rank_of) if rank == self.rank]

    @cached_property
    def takes(self) -> list[tuple[Source, ...]]:
        """Return the values that each stage takes. The last stage also takes the model's outputs from other stages."""
        taken = [stage.inputs for stage in self.pipeline.stages]
        last = len(taken) - 1
        taken[last] = (*taken[last], *[source for source in self.pipeline.outputs if source.stage != last])
        return taken

    @cached_property
    def _makers(self) -> list[set[int]]:
        """Return the stages that send to each stage. Stage 0 sends an empty message to every stage without inputs."""
        makers = [{maker_of(source) for source in taken} - {stage} for stage, taken in enumerate(self.takes)]
        return [found or ({0} if stage else set()) for stage, found in enumerate(makers)]

    def _received(self, rank: int) -> Mapping[int, tuple[Source, ...]]:
        """Return the values that ``rank`` receives, by the stage on another rank that sends them."""
        values: dict[int, dict[Source, None]] = {}
        for stage, taken in enumerate(self.takes):
            if self.rank_of[stage] == rank:
                for maker in sorted(self._makers[stage]):
                    if self.rank_of[maker] != rank:
                        own = [source for source in taken if maker_of(source) == maker]
                        values.setdefault(maker, {}).update(dict.fromkeys(own))
        return {maker: tuple(sources) for maker, sources in sorted(values.items())}

    @cached_property
    def received(self) -> Mapping[int, tuple[Source, ...]]:
        """Return what :meth:`_received` returns for this rank."""
        return self._received(self.rank)

    @cached_property
    def sent(self) -> Mapping[int, Mapping[int, tuple[Source, ...]]]:
        """Return, for every stage of this rank, the values that the stage sends to each other rank. In a step with
        backwards, the receiver answers with a message that contains the gradients of these values.
        """
        received = {rank: self._received(rank) for rank in sorted(set(self.rank_of)) if rank != self.rank}
        return {
            stage: {rank: values[stage] for rank, values in received.items() if stage in values}
            for stage in self.stages
        }

    @cached_property
    def waits_for(self) -> Mapping[int, tuple[int, ...]]:
        """Return, for every stage of this rank, the stages on other ranks that send messages to it."""
        return {
            stage: tuple(maker for maker in sorted(self._makers[stage]) if self.rank_of[maker] != self.rank)
            for stage in self.stages
        }

    @cached_property
    def returns(self) -> Mapping[int, tuple[int, ...]]:
        """Return, for every stage of this rank, the stages on other ranks that get gradients after its backward.

        Backwards run from the last stage to the first. So the gradients for a stage on another rank are complete after
        the backward of the first stage here that takes values from that stage.
        """
        first = {maker: min(s for s in self.stages if maker in self.waits_for[s]) for maker in self.received}
        return {stage: tuple(maker for maker, s in first.items() if s == stage) for stage in self.stages}

    def messages(self, count: int, graphs: bool) -> dict[int, int]:
        """Return how many messages each other rank sends to this one in a step. ``graphs``: the step has backwards."""
        of_each = Counter(self.rank_of[maker] for maker in self.received)
        if graphs:
            of_each.update(rank for to in self.sent.values() for rank in to)
        messages = Counter({rank: number * count for rank, number in of_each.items()})
        if not graphs and self.rank != self.rank_of[-1]:
            messages[self.rank_of[-1]] += 1  # the message that RankStep.end_forwards() sends
        return messages

    @cached_property
    def uses(self) -> Counter[Source]:
        """Return how often every value is used on this rank. Sending a value, to any number of ranks, is one use."""
        uses = Counter(source for stage in self.stages for source in self.takes[stage])
        uses.update({source for to in self.sent.values() for sources in to.values() for source in sources})
        last = len(self.rank_of) - 1
        if self.rank_of[last] == self.rank:
            uses.update({source for source in self.pipeline.outputs if source.stage == last})
        return uses


def maker_of(source: Source) -> int:
    """Return the stage that makes a value. Inputs of the model count as made by stage 0, whose rank gets them."""
    return 0 if source.stage == INPUT else source.stage


# Parameters that stages on several ranks share.

Shared = dict[int, str]
"""A parameter that several stages share, as its name in each stage, by stage index."""


class Tied:
    """The parameters that a rank shares with other ranks, grouped by the messages with their gradients or values.

    Args:
        parts: the module of every stage.
        rank_of: the rank of every stage.
        rank: this rank.
    """

    def __init__(self, parts: Sequence[nn.Module], rank_of: Sequence[int], rank: int) -> None:
        self.sent: dict[tuple[int, int], list[Shared]] = {}
        """The parameters whose gradients are sent, by stage of this rank and receiving rank."""
        self.received: dict[int, list[Shared]] = {}
        """The parameters whose gradients are received, by stage of another rank."""
        self.copied_to: dict[int, list[Shared]] = {}
        """The parameters that this rank sends to other ranks, by receiving rank."""
        self.copied_from: dict[int, list[Shared]] = {}
        """The parameters that this rank receives from other ranks, by sending rank."""
        self._parts = parts
        self._shared = list(shared_parameters(parts))
        self._look()
        self._own = {stage for stage, of_stage in enumerate(rank_of) if of_stage == rank}
        for shared in self._shared:  # every process has the same order
            ranks = [rank_of[stage] for stage in shared]
            others = sorted({*ranks} - {rank})
            if rank not in ranks or not others:
                continue
            for stage in shared:
                if stage not in self._own:
                    self.received.setdefault(stage, []).append(shared)
                    continue
                for other in others:
                    self.sent.setdefault((stage, other), []).append(shared)
            if ranks[0] != rank:
                self.copied_from.setdefault(ranks[0], []).append(shared)
                continue
            for other in others:
                self.copied_to.setdefault(other, []).append(shared)

    def _look(self) -> None:
        modules = {module for part in self._parts for module in part.modules()}
        self._seen = [(module._parameters, *item) for module in modules for item in module._parameters.items()]

    def holds(self) -> bool:
        """Return whether the stages still share the same parameters. Users may replace, tie or untie parameters."""
        if all(parameters.get(name) is parameter for parameters, name, parameter in self._seen):
            return True
        self._look()
        return list(shared_parameters(self._parts)) == self._shared

    def of(self, stage: int, shared: Shared) -> nn.Parameter:
        """Return the shared parameter as ``stage`` has it now; ``shared`` gives its name in each stage."""
        return self._parts[stage].get_parameter(shared[stage])

    def own(self, shared: Shared) -> nn.Parameter:
        """Return this rank's copy of a shared parameter."""
        return self.of(next(stage for stage in shared if stage in self._own), shared)


# One mini-batch.


class SharedSource(random_streams.RandomSource):
    """Makes streams of random numbers from a base that is the same on all ranks."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self._base = self.base = base
        self.has_drawn = False
        """True if any stage is known to have drawn random numbers."""

    def seed(self, position: int) -> int:
        """Record in :attr:`has_drawn` that random numbers are drawn, and return the seed of stream ``position``."""
        self.has_drawn = True
        return super().seed(position)


class RankStep(Step):
    """Runs the forwards and backwards of one rank's stages for one mini-batch, each when the schedule calls for it."""

    def __init__(
        self, planned: _Planned, transport: Transport, number: int, count: int, graphs: bool, recomputed: range
    ) -> None:
        """Begin step ``number``, which is the same on all ranks.

        ``count``, ``graphs`` and ``recomputed`` are arguments of :class:`Step`.
        """
        self.plan, self.tied, self.transport, self.number = planned.plan, planned.tied, transport, number
        super().__init__(self.plan.pipeline, self.plan.uses, count, graphs, planned.recompute, recomputed)
        self.sums = {stage: WeightedSums() for stage in self.plan.stages}
        # For each stage that has run its backwards: its leaf tensors, and the sums of their gradients.
        self.totals: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.replicated: list[DistributedDataParallel] = []  # modules of stages, wrapped by the user
        self.inputs: dict[int, StepInputs] = {}  # the model's inputs, by micro-batch
        self.rows: dict[int, int] = {}
        self.readings: dict[int, LossReading] = {}  # facts read from the losses' graphs, by micro-batch
        self.forwards = 0
        self.random: SharedSource | None = None
        # Sums of the gradients of received values. Keys: the stage that made the values, and the micro-batch.
        self._received: dict[tuple[int, int], GradAccumulator] = {}
        self._sent: dict[tuple[int, int, int], list[tuple[GradAccumulator, int, torch.device] | None]] = {}
        self._output_graphs: dict[int, Graph] = {}

    def forward(self, stage: int, micro_batch: int, inputs: Sequence[Any], rows: int) -> list[Any] | None:
        """Run a stage's forward. Return the model's output values if the stage is the last, else None.

        ``inputs`` (of the model) and ``rows`` (of the micro-batch) are used only by stage 0.
        """
        plan, pipeline = self.plan, self.plan.pipeline
        if stage == 0:
            self._take_inputs(micro_batch, inputs, rows)
        for maker in plan.waits_for[stage]:
            if (maker, micro_batch) not in self._received:
                self._receive_values(maker, micro_batch)
        received = boundaries_of([self._values[micro_batch][source] for source in pipeline.stages[stage].inputs])
        position = micro_batch * len(pipeline.stages) + stage
        with in_pipeline(RandomStream(self._source, -1)):
            # The weight is 1.0 here, because weights are only known at the end of the step.
            self.run_forward(stage, micro_batch, 1.0, self._source, position)
        for boundary in received:
            refuse_unseen_edit(boundary, stage)
        del received
        if plan.sent[stage]:
            takers = self._takers(stage, micro_batch)
            for rank, sources in plan.sent[stage].items():
                self._send_values(stage, micro_batch, rank, sources, takers)
        self.count_use(micro_batch, {source for sources in plan.sent[stage].values() for source in sources})
        self.forwards += 1
        return self._outputs(micro_batch) if stage == len(pipeline.stages) - 1 else None

    def backward(self, stage: int, micro_batch: int, loss: torch.Tensor | None, whole: bool) -> None:
        """Run the backward of a stage for a micro-batch.

        ``loss``: the loss of the micro-batch, from which the last stage's backward starts; other stages ignore it.
        ``whole``: also compute the gradients of weights; if False, :meth:`backward_weight` computes them later.
        """
        plan = self.plan
        if stage == len(plan.rank_of) - 1:
            assert loss is not None
            self._begin_backward(micro_batch, loss)
        for rank in plan.sent[stage]:
            self._receive_gradients(stage, micro_batch, rank)
        activation = self._activations[stage, micro_batch]
        with in_pipeline(RandomStream(self._source, -1)):
            if whole:
                del self._activations[stage, micro_batch]
                activation.backward(self.sums[stage].of(self.rows[micro_batch]))
            else:
                activation.backward_input()
        for maker in plan.returns[stage]:
            grads = self._received.pop((maker, micro_batch)).grads
            self.send(plan.rank_of[maker], Subject.GRADIENTS, maker, micro_batch, *describe_tensors(grads))

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        """Run the second part of a stage's backward, which computes the gradients of weights."""
        with in_pipeline(RandomStream(self._source, -1)):
            self._activations.pop((stage, micro_batch)).backward_weight(self.sums[stage].of(self.rows[micro_batch]))

    @property
    def _source(self) -> SharedSource:
        assert self.random is not None  # it is made with the model's inputs, or received with values
        return self.random

    def _take_inputs(self, micro_batch: int, inputs: Sequence[Any], rows: int) -> None:
        if have_tangents(inputs):
            raise NotImplementedError("pymoe.pipe: forward-mode tangents cannot be sent to other ranks")
        self.rows[micro_batch] = rows
        if self.random is None:
            before = torch.default_generator.get_state()
            try:
                self.random = SharedSource(random_streams.draw(None))
            finally:
                torch.default_generator.set_state(before)
        given = self.inputs[micro_batch] = StepInputs()
        values = [flatten_value(value, given.cross if self.graphs else BoundaryTensor) for value in inputs]
        self.keep(micro_batch, [Source(INPUT, number) for number in range(len(values))], values)

    def _outputs(self, micro_batch: int) -> list[Any]:
        """Return the model's outputs, from which the schedule computes the loss. The graph of the loss ends at them,
        because they are cut off from the graphs of the stages.
        """
        pipeline = self.plan.pipeline
        last = len(pipeline.stages) - 1
        values = [self._values[micro_batch][source] for source in pipeline.outputs]
        self.count_use(micro_batch, self.plan.takes[-1][len(pipeline.stages[-1].inputs) :])
        self.count_use(micro_batch, {source for source in pipeline.outputs if source.stage == last})
        if not self.graphs:
            return [receive_value(value, None) for value in values]
        graph = self._output_graphs[micro_batch] = Graph()
        return graph.begin(values)

    def _begin_backward(self, micro_batch: int, loss: torch.Tensor) -> None:
        """Run the backward from the loss to the model's outputs."""
        graph = self._output_graphs.pop(micro_batch)
        graph.close()
        if not self.rows[micro_batch]:
            return  # the loss of a micro-batch without rows is NaN or 0, and has no weight
        if loss.grad_fn is None:
            raise RuntimeError("pymoe.pipe: the loss does not require gradients: nothing that it depends on does")
        if self.count > 1 and (reading := read_loss(loss, {graph.entry})) is not None:
            self.readings[micro_batch] = reading
        root = edge_of(loss)
        leaves = find_leaves([root.node], graph.entry)
        found = differentiate([root], [torch.ones_like(loss)], graph.edges, leaves, graph.entry)
        graph.deliver(found)
        self.sums[len(self.plan.rank_of) - 1].of(self.rows[micro_batch]).add(leaves, found[len(graph.edges) :])
        if not loss._is_view():
            loss.detach_()  # frees the graph: the schedule keeps the loss until the step ends

    def send(
        self, rank: int, subject: Subject, stage: int, micro_batch: int, description: bytes, tensors: list[torch.Tensor]
    ) -> None:
        """Begin to send a message of this step. Every message also carries the number of rows of the micro-batch, the
        base of the random numbers, and whether this rank knows of a stage that has drawn random numbers.
        """
        notes = self.rows.get(micro_batch, 0), self._source.base, int(self._source.has_drawn)
        self.transport.send(rank, Key(self.number, subject, stage, micro_batch), description, tensors, notes)

    def receive(self, rank: int, subject: Subject, stage: int, micro_batch: int) -> Message:
        """Wait for a message of this step and return it.

        Record what the message says about random numbers: their base, and whether a stage has drawn any.
        """
        message = self.transport.receive(rank, Key(self.number, subject, stage, micro_batch))
        _, base, has_drawn = message.notes
        if self.random is None:
            self.random = SharedSource(base)
        self.random.has_drawn |= bool(has_drawn)
        return message

    def end_forwards(self) -> None:
        """End a step without backwards: the last stage's rank sends a message to all other ranks, which wait for it.

        The message says whether a stage has drawn random numbers. Its sender has heard of every stage whose values are
        used.
        """
        *_, last = self.plan.rank_of
        key = Subject.END, len(self.plan.rank_of) - 1, 0
        if self.plan.rank != last:
            self.receive(last, *key)
            return
        for rank in sorted({*self.plan.rank_of} - {last}):
            self.send(rank, *key, *describe_tensors([]))

    def _takers(self, stage: int, micro_batch: int) -> dict[int, dict[int, int]]:
        """Return ``{memory: {rank: taker}}`` for the memory of each tensor that ``stage`` has made: for every rank, the
        last stage that takes a tensor in this memory, if any does.

        Also set ``taken_until`` of these tensors: the last stage on another rank that takes their memory.
        """
        plan = self.plan
        takers: dict[int, dict[int, int]] = {}
        here = []
        kept = self._values[micro_batch]
        for taker, sources in enumerate(plan.takes):
            made = [source for source in sources if maker_of(source) == stage]
            for boundary in boundaries_of([kept[source] for source in made if source in kept]):
                takers.setdefault(memory_of(boundary.tensor), {})[plan.rank_of[taker]] = taker
                here.append(boundary)
        for boundary in here:
            boundary.taken_until = last_elsewhere(takers, boundary.tensor, plan.rank)
        return takers

    def _send_values(
        self, stage: int, micro_batch: int, rank: int, sources: Sequence[Source], takers: dict[int, dict[int, int]]
    ) -> None:
        values = [self._values[micro_batch][source] for source in sources]
        changing = self._may_change(stage, micro_batch, sources)
        description, tensors = describe_values(values, lambda tensor: last_elsewhere(takers, tensor, rank))
        tensors = [tensor.clone() if memory_of(tensor) in changing else tensor for tensor in tensors]
        self.send(rank, Subject.VALUES, stage, micro_batch, description, tensors)
        if self.graphs:
            self._sent[stage, micro_batch, rank] = [  # keep the destinations of the gradients, but not the tensors
                None if one.accumulator is None else (one.accumulator, one.number, one.tensor.device)
                for one in boundaries_of(values)
            ]

    def _may_change(self, stage: int, micro_batch: int, sources: Sequence[Source]) -> set[int]:
        """Return the ids (:func:`memory_of`) of memory that may change while it is sent: that of values still used on
        this rank, and of the stage's parameters and buffers.
        """
        kept, left = self._values[micro_batch], self._uses_left
        taken = [kept[source] for source in sources if left.get((micro_batch, source), self._uses[source]) > 1]
        tensors = [boundary.tensor for boundary in boundaries_of(taken)]
        for module in self.plan.pipeline.stages[stage].modules:
            tensors += [*module.buffers(), *module.parameters()]
        return {memory_of(tensor) for tensor in tensors}

    def _receive_values(self, maker: int, micro_batch: int) -> None:
        message = self.receive(self.plan.rank_of[maker], Subject.VALUES, maker, micro_batch)
        self.rows[micro_batch] = message.notes[0]
        accumulator = self._received[maker, micro_batch] = GradAccumulator()
        values = read_values(message.described, message.tensors, accumulator if self.graphs else None)
        self.keep(micro_batch, self.plan.received[maker], values)

    def _receive_gradients(self, stage: int, micro_batch: int, rank: int) -> None:
        message = self.receive(rank, Subject.GRADIENTS, stage, micro_batch)
        places = self._sent.pop((stage, micro_batch, rank))
        for place, grad in zip(places, read_tensors(message.described, message.tensors), strict=True):
            if place is not None and grad is not None:
                accumulator, number, device = place
                accumulator.add_gradient(number, grad.to(device))


def last_elsewhere(takers: dict[int, dict[int, int]], tensor: torch.Tensor, rank: int) -> int:
    """Return the last stage on a rank other than ``rank`` that takes the memory of a tensor; -1: none does."""
    of_ranks = takers.get(memory_of(tensor), {})
    return max((taker for other, taker in of_ranks.items() if other != rank), default=-1)


# The rank, which runs all mini-batches.

SCHEDULE = Words(
    "pymoe.pipe",
    "Let loss_fn divide a sum by that number for the whole mini-batch, and give the schedule scale_grads=False",
    "give the schedule scale_grads=False",
)


class Rank:
    """The stages of a pipe that were built in this process, and the objects that these stages share."""

    def __init__(self, staged: StagedModel, checkpoint: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.staged = staged
        self._checkpoint = checkpoint
        self._devices: dict[int, torch.device] = {}
        self.rank = dist.get_rank(group)
        self.failure_detector = watching(group)
        self.transport = Transport(group, device)
        self.failure_detector.add(*self.transport.groups)
        self.step: RankStep | None = None
        self._plans: dict[tuple[int, tuple[int, ...]], _Planned] = {}
        self._copies_are_equal = False
        self._begun: set[int] = set()
        self._steps = 0

    def place(self, index: int, device: torch.device) -> None:
        """Add a stage to this rank. Its modules are moved to ``device`` now, its inputs in every forward."""
        self._devices[index] = device
        self._move(self.staged.pipeline, index)
        self._plans.clear()

    def _move(self, pipeline: Pipeline, index: int) -> None:
        for module in pipeline.stages[index].modules:
            module.to(self._devices[index])
            if isinstance(module, StageModule):
                module.update_model()

    def begin(self, stage: int) -> None:
        """Begin a step unless another stage has begun it. Schedules call this for each stage in every step."""
        if self._begun and stage not in self._begun:
            self._begun.add(stage)
            return
        self._begun = {stage}
        self._steps += 1
        self.step = None

    def open(self, rank_of: Sequence[int], count: int, graphs: bool, is_certain: bool) -> RankStep:
        """Begin a step of ``count`` micro-batches, and return it. ``graphs``: backwards will follow the forwards.

        ``rank_of``: the rank of every stage. ``is_certain``: False if ``count`` is a guess, because several schedules
        use these stages.
        """
        random_streams.install()
        self.failure_detector.begin()
        planned = self._plan(tuple(rank_of))
        if not self._copies_are_equal:
            self._make_copies_equal(planned.tied)
        if is_certain:
            for peer, messages in planned.plan.messages(count, graphs).items():
                self.transport.expect(peer, messages)
        # No forward may write to state that several stages share, because every rank has its own copy of it.
        found = turns_of(
            [stage.held.look().layout for stage in planned.recompute], [stage.turns for stage in planned.recompute]
        )
        for stage, turns in zip(planned.recompute, found, strict=True):
            stage.turns = turns
        for turns in {turns for turns in found if turns is not None}:
            turns.begin_step(())
        training = [self.staged.parts[index].training for index in planned.plan.stages]
        in_backward = recomputed(self._checkpoint, count) if any(training) and graphs else range(0)
        self.step = RankStep(planned, self.transport, self._steps, count, graphs, in_backward)
        return self.step

    def reduce(self, stage: int, is_mean: bool, module: nn.Module) -> None:
        """Sum the gradients of a stage whose backwards have run. After the last stage of this rank, add the sums of all
        its stages to ``.grad``, and finish the step.

        ``is_mean``: whether the loss of a micro-batch is a mean over its rows rather than a sum. ``module``: the
        stage's module; if it is a ``DistributedDataParallel``, it averages the gradients that are added.

        Raises:
            ValueError: ``is_mean`` is set, but the losses' graphs show that they are not means over rows.
        """
        step = self.step
        assert step is not None
        if is_mean and stage == len(step.plan.rank_of) - 1:
            read = sorted(step.readings)
            check_mean_over_rows([step.readings[one] for one in read], [step.rows[one] for one in read], SCHEDULE)
        rows = sum(step.rows.values())
        weight_of = {size: size / rows if is_mean and rows else 1.0 for size in step.rows.values()}
        leaves, grads = step.totals[stage] = step.sums[stage].total(weight_of)
        by_leaf = {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True)}
        for (own, rank), shared in step.tied.sent.items():
            if own == stage:
                sums = [by_leaf.get(id(step.tied.of(stage, one))) for one in shared]
                step.send(rank, Subject.TIED_GRADIENTS, stage, 0, *describe_tensors(sums))
        if isinstance(module, DistributedDataParallel):
            step.replicated.append(module)
        if len(step.totals) == len(step.plan.stages):
            self._add_up(step, weight_of)
            self.finish(step)

    def _add_up(self, step: RankStep, weight_of: dict[int, float]) -> None:
        found, step.totals = step.totals, {}
        for stage, shared in step.tied.received.items():
            message = step.receive(step.plan.rank_of[stage], Subject.TIED_GRADIENTS, stage, 0)
            grads = read_tensors(message.described, message.tensors)
            pairs = [(step.tied.own(one), grad) for one, grad in zip(shared, grads, strict=True) if grad is not None]
            found[stage] = [parameter for parameter, _ in pairs], [grad for _, grad in pairs]
        tensors, totals = total((*found.pop(stage), 1.0) for stage in sorted(found))
        sums: list[torch.Tensor | None] = [grad.to(leaf.device) for leaf, grad in zip(tensors, totals, strict=True)]
        totals.clear()
        for micro_batch, inputs in step.inputs.items():
            weight = weight_of[step.rows[micro_batch]]
            tensors += inputs.tensors
            sums += [None if grad is None else grad * weight for grad in inputs.grads]
        for module in step.replicated:
            module.reducer.prepare_for_backward([])
        accumulate(tensors, sums)

    def finish(self, step: RankStep) -> None:
        """End a step: advance the random generator if a stage is known to have drawn, and wait until all messages that
        this rank has sent have arrived. Raise RankError if another rank has failed.
        """
        self.step = None
        if not step.graphs:
            step.end_forwards()
        if step.random is not None and step.random.has_drawn:
            random_streams.draw(None)  # advances the default generator
        self.transport.flush()
        self.failure_detector.end()

    def _plan(self, rank_of: tuple[int, ...]) -> _Planned:
        pipeline = self.staged.pipeline
        key = id(pipeline), rank_of
        found = self._plans.get(key)
        if found is None or found.made_for is not pipeline:
            for index in self._devices:  # layers may have been replaced
                self._move(pipeline, index)
            stages = [
                replace(stage, device=self._devices[number]) if number in self._devices else stage
                for number, stage in enumerate(pipeline.stages)
            ]
            plan = RankPlan(Pipeline(tuple(stages), pipeline.inputs, pipeline.outputs), rank_of, self.rank)
            recompute = [StageRecompute(stage.modules) for stage in stages]
            self._compare(plan)
            found = self._plans[key] = _Planned(pipeline, plan, Tied(self.staged.parts, rank_of, self.rank), recompute)
            self._copies_are_equal = False
        elif not found.tied.holds():
            found = self._plans[key] = found._replace(tied=Tied(self.staged.parts, rank_of, self.rank))
            self._copies_are_equal = False
        return found

    def _compare(self, plan: RankPlan) -> None:
        """Raise ValueError unless all ranks that make a plan in this step have cut the same model in the same way."""
        stages = plan.pipeline.stages
        modules = [[name for name, _ in part.named_modules()] for part in self.staged.parts]
        parameters = [[name for name, _ in part.named_parameters()] for part in self.staged.parts]
        edges = [(stage.inputs, stage.outputs) for stage in stages], plan.pipeline.inputs, plan.pipeline.outputs
        whole = repr((plan.rank_of, modules, parameters, edges))
        mine = hashlib.sha256(whole.encode()).digest(), list(map(len, modules)), self.rank
        first = self.failure_detector.first(f"cut {self.transport.tag} {self._steps}", mine)
        if first is not None and first[0] != mine[0]:
            raise ValueError(
                f"build_stage: every process must make the same pipe, of the same model and cut in the same way, got "
                f"stages of {mine[1]} modules on rank {self.rank} and of {first[1]} on rank {first[2]}"
                + (", and they differ in names or edges" if first[1] == mine[1] else "")
            )

    def _make_copies_equal(self, tied: Tied) -> None:
        """Copy shared parameters from the rank of the first stage that uses them to the other ranks."""
        key = Key(self._steps, Subject.COPY, 0, 0)
        for rank, shared in tied.copied_to.items():
            self.transport.send(rank, key, *describe_tensors([tied.own(one).detach() for one in shared]))
        with torch.no_grad():
            for rank, shared in tied.copied_from.items():
                message = self.transport.receive(rank, key)
                for one, tensor in zip(shared, message.tensors, strict=True):
                    tied.own(one).copy_(tensor)
        self.transport.flush()
        self._copies_are_equal = True


class _Planned(NamedTuple):
    """A pipeline (for one mode of the model) and its plan for one assignment of stages to ranks."""

    made_for: Pipeline
    plan: RankPlan
    tied: Tied
    recompute: list[StageRecompute]


_ranks: WeakKeyDictionary[nn.Module, dict[dist.ProcessGroup, Rank]] = WeakKeyDictionary()


def rank_of_pipe(pipe: Any, group: dist.ProcessGroup, device: torch.device) -> Rank:
    """Return this process's :class:`Rank` for a pipe and a process group: the same object in every call for this pipe
    and group.

    ``device``: the device of the rank; ignored unless this is the first call for the pipe and the group.
    """
    ranks = _ranks.setdefault(pipe, {})
    if group not in ranks:
        ranks[group] = Rank(pipe.staged, pipe.checkpoint, group, device)
    return ranks[group]
