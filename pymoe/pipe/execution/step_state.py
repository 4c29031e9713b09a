"""The state of one mini-batch in a pipeline, and of each of its micro-batches in each stage, from the forward to the
end of the backward. The backward may recompute the forward.

A recomputed forward keeps its inputs instead of its graph. Source: Chen et al., "Training Deep Nets with Sublinear
Memory Cost" (2016), arXiv 1604.06174. The recomputation draws the same random numbers (from the same stream), sees the
state that the first run saw (a spectral norm reads its own writes), and leaves the present state unchanged (a batch
norm would count the micro-batch twice).

The first run also makes a graph, which is released when the run ends: modules may ask for gradients and hooks within
it, and values that they keep between runs (the weights of ``parametrize.cached``, autocast's casts) need a history.
The graph takes no more memory at a time than the recomputation will. If the run has changed state that cannot be put
back, or that was not copied, the graph is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pymoe.autograd import random_streams
from pymoe.autograd.graph_nodes import version_of
from pymoe.autograd.isolated_graph import differentiate
from pymoe.autograd.random_streams import RandomSource, RandomStream, with_stream
from pymoe.autograd.thread_state import ThreadState, current, in_state
from pymoe.pipe import context
from pymoe.pipe.context import MicroBatch
from pymoe.pipe.execution.graph import (
    BoundaryTensor,
    GradAccumulator,
    Graph,
    LeafSums,
    StageValue,
    boundaries_of,
    flatten_value,
    receive,
    receive_value,
    total,
)
from pymoe.pipe.execution.held_state import HeldState, PutBack, Seen, Turns, note_put_back
from pymoe.pipe.loss_graph import LossReading
from pymoe.pipe.schedules.schedule import Action, Kind
from pymoe.pipe.split_backward import SplitBackward
from pymoe.pipe.stages import INPUT, MicroBatches, Pipeline, Source, Stage


class Activation(GradAccumulator):
    """Runs one micro-batch through one stage, and keeps what its backward needs: the graph, or the means to recompute
    it.

    Call :meth:`forward` first; then either :meth:`backward`, or :meth:`backward_input` and :meth:`backward_weight`.
    Call all of them within :func:`pymoe.pipe.context.in_pipeline` or :meth:`.PlanRun.perform_actions`. Before the
    backward, later stages add to this object the gradients of the tensors that the stage has sent.
    """

    __slots__ = ("_graph", "_micro_batch", "_position", "_random", "_recomputation", "_split", "_stage", "_state")

    def __init__(
        self, stage: Stage, micro_batch: MicroBatch, random: RandomSource, position: int, state: ThreadState
    ) -> None:
        """Prepare a forward.

        Args:
            stage: the stage to run.
            micro_batch: the micro-batch to run it on.
            random: the random streams of the mini-batch.
            position: the index of the stream in ``random`` from which the forward draws.
            state: the state of the thread that called the pipe; the forward and its recomputation run in this state.
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
        """Run the stage's function on ``received``, the values of its inputs. Return the values that the stage sends.

        ``graphs``: whether a backward will follow; if not, nothing is kept for it. ``recompute``: if given, keep the
        inputs instead of the graph, and recompute the forward for the backward, unless nothing requires gradients or
        the forward has changed something that cannot be restored; None: keep the graph.
        """
        device, about, stream = self._stage.device, self._micro_batch, RandomStream(self._random, self._position)
        if not graphs:
            outputs = self._call(stream, about, [receive_value(value, device) for value in received])
            return [flatten_value(output, BoundaryTensor) for output in outputs]
        graph = Graph(stream, device)
        if recompute is not None and not recompute.trains:  # if no graph is made, recomputing saves no memory
            recompute = recompute if any(leaf.accumulator is not None for leaf in boundaries_of(received)) else None
        if recompute is not None:
            about, arguments = about.in_run(checkpointing=True), graph.begin(received)
            with recompute.lock:
                before = recompute.before(received)
                outputs = self._call(graph.stream, about, arguments)
                self._recomputation = recompute.after(received, before)
            if self._recomputation is not None:
                graph.close()
                sent = [flatten_value(output, self.cross) for output in outputs]
                graph.refuse_hidden_tensors(sent)
                return sent
        else:
            outputs = self._call(graph.stream, about, graph.begin(received))
        self._graph = graph
        sent = graph.end(outputs, self)
        self.grads = [None] * len(graph.roots)
        return sent

    def backward(self, sums: LeafSums, keep: bool = False) -> None:
        """Run the whole backward; add the gradients of leaves to ``sums``. ``keep``: the backward will run again."""
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
        """Run the first part of the backward: compute the stage's input gradients and pass them on."""
        graph = self._graph = self._graph or self._recompute(False)
        self._split = with_stream(
            graph.stream, SplitBackward, graph.roots, self.grads, graph.edges, graph.leaves, graph.is_compiled
        )
        graph.deliver(self._split.input_gradients)

    def backward_weight(self, sums: LeafSums) -> None:
        """Run the second part of the backward: compute the gradients of leaves, and add them to ``sums``."""
        graph, split = self._graph, self._split
        assert graph is not None
        assert split is not None
        sums.add(graph.leaves, with_stream(graph.stream, split.weight_gradients))
        self.release()

    def release(self) -> None:
        self._graph = self._recomputation = self._split = None
        self.grads = []

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the leaves of the graph; if the graph is still to be recomputed, the stage's trainable parameters."""
        if self._graph is not None:
            return self._graph.leaves
        modules = () if self._recomputation is None else self._stage.modules
        return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]

    def _call(self, stream: RandomStream, micro_batch: MicroBatch, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the stage's function. The ``finally`` block makes no calls, because Ctrl-C could interrupt them."""
        streams, contexts = random_streams.this_thread, context.this_thread
        outer_stream, streams.stream = streams.stream, stream
        outer, contexts.micro_batch = contexts.micro_batch, micro_batch
        try:
            return self._stage.function(*arguments)
        finally:
            contexts.micro_batch, streams.stream = outer, outer_stream

    def _recompute(self, again: bool) -> Graph:
        """Run the forward again and return its graph. ``again``: the forward will be recomputed once more later."""
        # The stream starts anew, so it gives the same random numbers as in the first run.
        graph = Graph(RandomStream(self._random, self._position), self._stage.device)
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
        about, received = self._micro_batch.in_run(recomputing=True), recomputation.inputs(again)
        stage, seen = recomputation.stage, recomputation.seen
        with stage.lock:
            note_put_back(stage.held, seen)  # before PutBack changes the state
            try:
                with PutBack(stage.held, seen):
                    graph.end(self._call(graph.stream, about, graph.begin(received)), self)
            finally:
                note_put_back(stage.held, seen)  # also for steps that have begun meanwhile


# Recomputation.


def recomputed(checkpoint: str, micro_batches: int) -> range:
    """Return the indices of the recomputed micro-batches. ``checkpoint``: "always", "except_last" or "never"."""
    return range({"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[checkpoint])


_NOTHING = nullcontext()
BeforeRun = tuple[list[BoundaryTensor], dict[int, torch.Tensor], Seen | None]
"""The input tensors of a forward; copies, by index, of those that earlier forwards have changed in place; the state
before the forward, or None if forwards change state that cannot be restored.
"""


class StageRecompute:
    """Finds out what the forwards of one stage change, and makes the :class:`Recomputation` of each."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.turns: Turns | None = None
        """Orders the forwards of this stage and of those that share state with it; None if it shares none. Set by
        :class:`.Engine` or, on several processes, by :class:`.Rank`.
        """
        self.held = HeldState(("", module) for module in modules)
        self._modules = modules
        self.trains = False
        self._edited: set[int] = set()  # indices of inputs to copy: forwards change them in place

    def begin_step(self) -> None:
        """Begin a step: determine anew whether the stage has parameters that require gradients."""
        self.trains = any(parameter.requires_grad for module in self._modules for parameter in module.parameters())

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return the lock for first runs and recomputations; if no state is shared, a context that does nothing."""
        return _NOTHING if self.turns is None else self.turns.lock

    def turn(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward of this stage runs; if no state is shared, it does nothing."""
        return _NOTHING if self.turns is None else self.turns.forward()

    def before(self, received: Sequence[StageValue]) -> BeforeRun:
        """Prepare for the first run of a forward that takes ``received``. Return the state that :meth:`after` needs."""
        edited = self._edited
        taken = boundaries_of(received)
        copies = {number: leaf.tensor.clone() for number, leaf in enumerate(taken) if number in edited}
        return taken, copies, self.held.before()

    def after(self, received: Sequence[StageValue], before: BeforeRun) -> Recomputation | None:
        """Return the means to recompute a forward, after its first run; None if its graph must be kept.

        The graph must be kept if the forward has changed state, or an input, that cannot be restored or was not copied.
        """
        edited = self._edited
        taken, copies, seen = before[0], before[1], self.held.after(before[2])
        changed = {number for number, leaf in enumerate(taken) if version_of(leaf.tensor) != leaf.version}
        if not changed <= edited:
            self._edited = edited | changed
            return None
        if seen is None:
            return None
        # The sender shares these inputs, so it keeps them as changed. Only the recomputation takes the copies.
        replaced = {id(taken[number]): _like(taken[number], copies[number]) for number in changed}
        return Recomputation(received, self, seen, replaced)


class Recomputation:
    """Keeps the inputs and the state from which a forward is recomputed."""

    __slots__ = ("_edited", "_received", "seen", "stage")

    def __init__(
        self,
        received: Sequence[StageValue],
        stage: StageRecompute,
        seen: Seen,
        edited: dict[int, BoundaryTensor],
    ) -> None:
        """Keep the inputs. ``edited``: copies of the inputs that the first run changed in place, by the inputs' ids."""
        self.stage = stage
        self.seen = seen
        self._edited = list(edited.values())
        self._received = _replaced(received, edited) if edited else received

    def inputs(self, again: bool) -> Sequence[StageValue]:
        """Return the inputs for a recomputation. ``again``: keep them unchanged for a further recomputation."""
        if again and self._edited:
            return _replaced(self._received, {id(x): _like(x, x.tensor.clone()) for x in self._edited})
        return self._received


def _like(boundary: BoundaryTensor, tensor: torch.Tensor) -> BoundaryTensor:
    return BoundaryTensor(tensor, boundary.accumulator, boundary.number)


def _replaced(values: Sequence[StageValue], others: dict[int, BoundaryTensor]) -> list[StageValue]:
    """Return ``values`` with some boundary tensors replaced. ``others``: the new tensors, by ids of the old ones."""
    return [StageValue([others.get(id(leaf), leaf) for leaf in value.leaves], value.structure) for value in values]


# The mini-batch.

FORWARD, BACKWARD, BACKWARD_INPUT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT  # read faster as globals


class StepInputs(GradAccumulator):
    """The input tensors of a step that require gradients, and the sums of their gradients."""

    __slots__ = ("_versions", "tensors")

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self._versions: list[int] = []

    def cross(self, tensor: torch.Tensor) -> BoundaryTensor:
        if not tensor.requires_grad:
            return BoundaryTensor(tensor)
        self.tensors.append(tensor)
        self._versions.append(tensor._version)
        return super().cross(tensor)

    def edited(self) -> list[torch.Tensor]:
        """Return the tensors that have been changed in place since the pipeline took them."""
        return [
            tensor for tensor, version in zip(self.tensors, self._versions, strict=True) if tensor._version != version
        ]


class Step:
    """The values and activations of one mini-batch. A value is released after its last use."""

    def __init__(
        self,
        pipeline: Pipeline,
        uses: Mapping[Source, int],
        count: int,
        graphs: bool,
        recompute: Sequence[StageRecompute],
        recomputed: range,
    ) -> None:
        """Begin a step.

        Args:
            pipeline: the stages to run.
            uses: how often each value is used.
            count: the number of micro-batches.
            graphs: whether backward passes will follow.
            recompute: an item for every stage.
            recomputed: the indices of the micro-batches whose forwards are recomputed for their backwards.
        """
        self.count = count
        self.graphs = graphs
        self.recompute = recompute
        self._stages = pipeline.stages
        self._made = pipeline.made
        self._uses = uses
        # The values of each micro-batch. ``count`` may be a guess of a rank, so there may be more micro-batches.
        self._values: defaultdict[int, dict[Source, StageValue]] = defaultdict(dict)
        # How many uses of a value are still to come, by micro-batch and source. A value has an entry from its first use
        # on, and only if it is used several times.
        self._uses_left: dict[tuple[int, Source], int] = {}
        self._activations: dict[tuple[int, int], Activation] = {}  # by stage and micro-batch
        self._begun = [0] * len(pipeline.stages)  # the number of forwards so far, by stage
        self._recomputed = recomputed
        self._thread_state = current()
        if recomputed:
            for of_stage in recompute:
                of_stage.begin_step()

    def keep(self, micro_batch: int, sources: Iterable[Source], values: Iterable[StageValue]) -> None:
        """Store the values that a later stage or the output of the pipeline uses; drop the others."""
        here, uses = self._values[micro_batch], self._uses
        for source, value in zip(sources, values, strict=False):
            if uses[source]:
                here[source] = value

    def count_use(self, micro_batch: int, sources: Iterable[Source]) -> None:
        """Count one use of each of these values, and release those that were used for the last time."""
        here, uses = self._values[micro_batch], self._uses
        for source in sources:
            if uses[source] > 1:
                key = micro_batch, source
                left = self._uses_left[key] = self._uses_left.get(key, uses[source]) - 1
                if left:
                    continue
            del here[source]

    def run_forward(
        self, number: int, micro_batch: int, weight: float, random: RandomSource, position: int, is_loss: bool = False
    ) -> list[StageValue]:
        """Run the forward of stage ``number`` for a micro-batch. Store and return the values that the stage sends.

        ``weight``: see :attr:`MicroBatch.weight`. ``position``: the index of the stream in ``random`` from which the
        forward draws. ``is_loss``: the stage computes the loss; it runs as a part of the stage before it, and is never
        recomputed.
        """
        stage, recompute, here = self._stages[number], self.recompute[number], self._values[micro_batch]
        received = [*map(here.__getitem__, stage.inputs)]
        begun = self._begun[number] = self._begun[number] + 1
        about = MicroBatch(micro_batch, self.count, weight, False, False, number - is_loss, begun == self.count, random)
        activation = Activation(stage, about, random, position, self._thread_state)
        is_recomputed = micro_batch in self._recomputed and not is_loss
        with recompute.turn():
            sent = activation.forward(received, self.graphs, recompute if is_recomputed else None)
        if self.graphs:
            self._activations[number, micro_batch] = activation
        del received
        self.count_use(micro_batch, stage.inputs)
        for source, value in zip(self._made[number], sent, strict=False):  # the same as self.keep(), inlined
            if self._uses[source]:
                here[source] = value
        return sent


class StepState(Step):
    """The state of one mini-batch. :meth:`perform` performs one action of a schedule, on any thread.

    The actions of a micro-batch must be performed in the order of the pipeline; the actions of one kind in one stage,
    in the order of the micro-batches. So the order of all sums does not depend on the threads.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: MicroBatches,
        graphs: bool,
        recompute: Sequence[StageRecompute],
        recomputed: range,
        loss_weights: Sequence[float] | None,
        around: Sequence[object] = (),
    ) -> None:
        """Take the values of the pipeline's inputs.

        Args:
            pipeline: the stages to run.
            micro_batches: the inputs of every micro-batch.
            graphs: whether backward passes will follow.
            recompute: an item for every stage.
            recomputed: the indices of the micro-batches whose forwards are recomputed for their backwards.
            loss_weights: the gradient of each micro-batch's loss, which the last stage of ``pipeline`` computes;
                schedules leave out this stage. None: there is no loss.
            around: the :class:`.Workers` of the pipes that run this pipe inside one of their stages.
        """
        count = len(micro_batches.values)
        super().__init__(pipeline, pipeline.uses, count, graphs, recompute, recomputed)
        self.inputs = StepInputs()
        self._sums = [LeafSums() for _ in pipeline.stages]
        self.pipeline = pipeline
        self.around = around
        self._random = RandomSource()
        self.stream_between_actions = RandomStream(self._random, -1)
        self._weights = micro_batches.weights
        cross = self.inputs.cross if graphs else BoundaryTensor
        given = [(number, source) for number in range(pipeline.inputs) if self._uses[source := Source(INPUT, number)]]
        for index, values in enumerate(micro_batches.values):
            self._values[index] = {source: flatten_value(values[number], cross) for number, source in given}
        self._will_repeat = False  # true if another backward pass may follow
        self._loss_weights = loss_weights
        # The index of the last stage in schedules, which leave out the loss.
        self._last = len(pipeline.stages) - (1 if loss_weights is None else 2)
        self.readings: list[LossReading | None] = [None] * count
        """The readings of the losses' graphs; see :func:`pymoe.pipe.loss.with_loss`."""
        self._losses: list[torch.Tensor | None] = [None] * count
        self._loss_grads: dict[tuple[float, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}

    def perform(self, action: Action) -> None:
        """Perform one action, on a thread of the pipeline: see :meth:`PlanRun.perform_actions`."""
        stage, micro_batch, kind = action
        if kind is FORWARD:
            weight, random, stages = self._weights[micro_batch], self._random, self._last + 1
            self.run_forward(stage, micro_batch, weight, random, micro_batch * stages + stage)
            if self._loss_weights is not None and stage == self._last:
                position = self.count * stages + micro_batch
                loss, reading = self.run_forward(stages, micro_batch, weight, random, position, is_loss=True)
                self._take_loss(micro_batch, loss.leaves[0])
                self.readings[micro_batch] = reading.leaves[0]
            return
        if self._loss_weights is not None and stage == self._last and kind is not Kind.BACKWARD_WEIGHT:
            self._activations.pop((stage + 1, micro_batch)).backward(self._sums[stage + 1])
        activation = self._activations[stage, micro_batch]
        if kind is BACKWARD:
            activation.backward(self._sums[stage], self._will_repeat)
        elif kind is BACKWARD_INPUT:
            activation.backward_input()
            return
        else:
            activation.backward_weight(self._sums[stage])
        if not self._will_repeat:
            del self._activations[stage, micro_batch]

    def _take_loss(self, index: int, loss: BoundaryTensor) -> None:
        """Keep the loss of micro-batch ``index``. Its backward begins with the micro-batch's weight as gradient.

        Raise RuntimeError if a backward is to follow, the weight is not 0, and the loss does not require gradients.
        """
        tensor = self._losses[index] = loss.tensor
        if not self.graphs:
            return
        assert self._loss_weights is not None
        weight = self._loss_weights[index]
        if loss.accumulator is None:
            if weight == 0.0:
                return
            raise RuntimeError("Pipe.step: the loss does not require gradients: nothing that it depends on does")
        kind = weight, tensor.dtype, tensor.device, tensor.shape
        grad = self._loss_grads.get(kind)
        if grad is None:
            grad = self._loss_grads[kind] = torch.full_like(tensor, weight)
        loss.accumulator.add_gradient(loss.number, grad)

    def losses(self) -> torch.Tensor:
        """Return the losses of the micro-batches as one tensor, of shape (micro-batches,)."""
        return torch.stack([loss.reshape(()) if loss.dim() else loss for loss in self._losses if loss is not None])

    def outputs(self) -> list[list[StageValue]]:
        """Return the pipeline's outputs for every micro-batch, and release them. Call this after all forwards.

        Raises:
            RuntimeError: a later stage has changed in place an output that requires gradients.
        """
        values, self._values = self._values, defaultdict(dict)
        outputs = [[here[source] for source in self.pipeline.outputs] for here in values.values()]
        for leaf in [leaf for row in outputs for leaf in boundaries_of(row)]:
            if leaf.accumulator is not None:
                receive(leaf, None)
        return outputs

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves known so far that may get gradients, each once. Call this after all forwards."""
        activations = [self._activations[place] for place in sorted(self._activations)]
        return list({id(leaf): leaf for activation in activations for leaf in activation.leaves()}.values())

    @property
    def is_on_host(self) -> bool:
        """Return whether the graphs of this mini-batch run without autograd's own threads, which serve devices."""
        tensors = [*self.inputs.tensors, *(p for s in self.pipeline.stages for m in s.modules for p in m.parameters())]
        return all(tensor.is_cpu or tensor.is_meta for tensor in tensors)

    def begin_backward(self, keep: bool) -> None:
        """Begin a backward pass through all stages. ``keep``: there may be another backward pass."""
        self._will_repeat = keep
        self._sums = [LeafSums() for _ in self.pipeline.stages]
        self.inputs.grads = [None] * len(self.inputs.tensors)

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves that have gradients, and the gradients. Call this after all backwards."""
        return total((sums.leaves, sums.sums, 1.0) for sums in self._sums)

    def release(self) -> None:
        """Release all values, graphs and gradients."""
        self._values, self._activations, self._sums = defaultdict(dict), {}, []
        self.inputs = StepInputs()
