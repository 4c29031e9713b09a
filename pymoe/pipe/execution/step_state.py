"""One mini-batch on its way through a pipeline, and the loops that perform the actions of a plan for it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue

import torch

from pymoe._errors import describe_error
from pymoe._torch_private import profiler_enabled
from pymoe.autograd import random_streams
from pymoe.autograd.random_streams import Source as RandomSource
from pymoe.autograd.random_streams import Stream
from pymoe.autograd.thread_state import current
from pymoe.pipe import context
from pymoe.pipe.context import MicroBatch
from pymoe.pipe.execution.activation import Activation
from pymoe.pipe.execution.gradients import LeafSums, total
from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, StageValue, is_fixed, pack, receive
from pymoe.pipe.execution.plan import Plan, TimedAction, calls_threads
from pymoe.pipe.execution.recompute import StageRecompute
from pymoe.pipe.loss_graph import LossReading
from pymoe.pipe.micro_batches import MicroBatches
from pymoe.pipe.schedules.schedule import Action, Kind
from pymoe.pipe.stages import INPUT, Pipeline, Source

FORWARD, BACKWARD, BACKWARD_INPUT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT  # found faster
_PASSES = {
    Kind.FORWARD: "the forward pass",
    Kind.BACKWARD: "the backward pass",
    Kind.BACKWARD_INPUT: "the backward pass of inputs",
    Kind.BACKWARD_WEIGHT: "the backward pass of weights",
}


class StepInputs(GradAccumulator):
    """The tensors that a step was given and that need gradients."""

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
        self.grads.append(None)
        return BoundaryTensor(tensor.detach(), self, len(self.tensors) - 1, is_fixed(tensor))

    def edited(self) -> list[torch.Tensor]:
        """Return those of the tensors that have been changed in place since."""
        return [
            tensor for tensor, version in zip(self.tensors, self._versions, strict=True) if tensor._version != version
        ]


class StepState:
    """Everything that belongs to one mini-batch: :meth:`perform` does one action of a schedule, on any thread.

    For one micro-batch and stage actions come in the order of the pipeline, for one stage and kind in the order of the
    micro-batches. So all sums are made in an order that threads do not change.
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
        """Take the values of the pipeline's inputs, whose forwards are recomputed for the micro-batches ``recomputed``.

        ``graphs``: there will be backward passes. ``loss_weights``: the pipeline ends in a loss, in a stage that no
        schedule has, and the loss of each micro-batch has this gradient; None: it does not. ``around``: the threads of
        the pipes of which a stage runs this one.
        """
        self.inputs = StepInputs()
        self._sums = [LeafSums() for _ in pipeline.stages]
        self._pipeline = pipeline
        self.recompute = recompute
        self.around = around
        self._recomputed = recomputed
        self._graphs = graphs
        self._thread_state = current()
        self._random = RandomSource()
        self.stream_between_actions = Stream(self._random, -1)
        self._weights = micro_batches.weights
        self._uses = pipeline.uses
        cross = self.inputs.cross if graphs else BoundaryTensor
        given = [(number, Source(INPUT, number)) for number in range(pipeline.inputs)]
        given = [(number, source) for number, source in given if self._uses[source]]
        self._values: list[dict[Source, StageValue]] = [
            {source: pack(values[number], cross) for number, source in given} for values in micro_batches.values
        ]
        count = len(self._values)
        self._uses_left: list[dict[Source, int]] = [{} for _ in range(count)]  # of values with several
        self._activations: list[list[Activation | None]] = [[None] * count for _ in pipeline.stages]
        self._begun = [0] * len(pipeline.stages)  # forwards, by stage
        self._keep = False
        self._loss_weights = loss_weights
        self._last = len(pipeline.stages) - (1 if loss_weights is None else 2)  # of those in schedules
        self.readings: list[LossReading | None] = [None] * count
        """What the graphs of the losses tell; see :func:`pymoe.pipe.loss.with_loss`."""
        self._losses: list[torch.Tensor | None] = [None] * count
        self._loss_grads: dict[tuple[float, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}
        if recomputed:
            for stage in recompute:
                stage.begin_step()

    def perform(self, action: Action) -> None:
        """Do one action, on a thread that is in the pipeline: see :meth:`PlanRun.perform_actions`."""
        stage, micro_batch, kind = action
        if kind is FORWARD:
            self._forward(stage, micro_batch)
            if self._loss_weights is not None and stage == self._last:
                self._forward(stage + 1, micro_batch)
            return
        if self._loss_weights is not None and stage == self._last and kind is not Kind.BACKWARD_WEIGHT:
            self._backward_loss(micro_batch)
        activation = self._activations[stage][micro_batch]
        assert activation is not None
        if kind is BACKWARD:
            activation.backward(self._sums[stage], self._keep)
        elif kind is BACKWARD_INPUT:
            activation.backward_input()
            return
        else:
            activation.backward_weight(self._sums[stage])
        if not self._keep:
            self._activations[stage][micro_batch] = None

    def _forward(self, number: int, index: int) -> None:
        stages, here, uses = self._pipeline.stages, self._values[index], self._uses
        stage = stages[number]
        received = [*map(here.__getitem__, stage.inputs)]
        count, last = len(self._weights), self._last
        is_loss = number > last
        begun = self._begun[number] = self._begun[number] + 1
        about = MicroBatch(
            index, count, self._weights[index], False, False, min(number, last), begun == count, self._random
        )
        position = count * number + index if is_loss else index * (last + 1) + number
        activation = Activation(stage, about, self._random, position, self._thread_state)
        of_stage = self.recompute[number]
        is_recomputed = index in self._recomputed and not is_loss
        with nullcontext() if of_stage.turns is None else of_stage.turns.forward():
            sent = activation.forward(received, self._graphs, of_stage if is_recomputed else None)
        if self._graphs:
            self._activations[number][index] = activation
        del received
        for source in stage.inputs:
            if uses[source] > 1:
                left = self._uses_left[index]
                left[source] = left.get(source, uses[source]) - 1
                if left[source]:
                    continue
            del here[source]
        if is_loss:
            self._take_loss(index, sent[0].leaves[0])
            self.readings[index] = sent[1].leaves[0]
        for source, value in zip(self._pipeline.made[number], sent, strict=False):
            if uses[source]:
                here[source] = value

    def _take_loss(self, index: int, loss: BoundaryTensor) -> None:
        """The loss of a micro-batch, whose backward begins with its weight."""
        tensor = self._losses[index] = loss.tensor
        if not self._graphs:
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

    def _backward_loss(self, index: int) -> None:
        activations = self._activations[self._last + 1]
        activation, activations[index] = activations[index], None
        assert activation is not None
        activation.backward(self._sums[self._last + 1])

    def functions(self) -> list[Callable[..., Sequence[object]]]:
        """Return what the stages run."""
        return [stage.function for stage in self._pipeline.stages]

    def losses(self) -> torch.Tensor:
        """Return (micro-batches,): the losses."""
        return torch.stack([loss.reshape(()) if loss.dim() else loss for loss in self._losses if loss is not None])

    def outputs(self) -> list[list[StageValue]]:
        """Return for every micro-batch the pipeline's outputs, after all forwards. Lets go of them.

        Raises:
            RuntimeError: a later stage has changed one in place that needs gradients.
        """
        values, self._values = self._values, []
        outputs = [[here[source] for source in self._pipeline.outputs] for here in values]
        for leaf in [leaf for row in outputs for value in row for leaf in value.leaves]:
            if type(leaf) is BoundaryTensor and leaf.accumulator is not None:
                receive(leaf, None)
        return outputs

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves to which backwards will add, as far as they are known, each once, after all forwards."""
        activations = [activation for row in self._activations for activation in row if activation is not None]
        return list({id(leaf): leaf for activation in activations for leaf in activation.leaves()}.values())

    @property
    def is_on_host(self) -> bool:
        """Whether its graphs need none of autograd's own threads, which serve devices."""
        tensors = [*self.inputs.tensors, *(p for s in self._pipeline.stages for m in s.modules for p in m.parameters())]
        return all(tensor.is_cpu or tensor.is_meta for tensor in tensors)

    def begin_backward(self, keep: bool) -> None:
        """The backwards of one of possibly several backward passes begin. ``keep``: there will be another."""
        self._keep = keep
        self._sums = [LeafSums() for _ in self._pipeline.stages]
        self.inputs.grads = [None] * len(self.inputs.tensors)

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves that have gradients, and these, after all backwards."""
        return total((sums.leaves, sums.sums, 1.0) for sums in self._sums)

    def release(self) -> None:
        """Let go of all values, graphs and gradients."""
        self._values, self._activations, self._sums = [], [], []
        self.inputs = StepInputs()


WAIT_SLICE_S = 0.05
"""What a signal may come late by: one that comes just before a wait, or to another thread, does not end it."""


def _pass(gate: SimpleQueue[None]) -> None:
    while True:
        try:
            return gate.get(timeout=WAIT_SLICE_S)
        except Empty:
            pass


class PlanRun:
    """One run of a plan: actions are performed inline as long as they are short, then by the threads of all workers."""

    def __init__(self, plan: Plan, state: StepState) -> None:
        self._plan = plan
        self._state = state
        self._perform: Callable[[Action], None] | None = self._in_range if profiler_enabled() else state.perform
        self._process = os.getpid()
        # When there are several threads: for each action what it gets when one of another worker has ended.
        self._gates: dict[Action, SimpleQueue[None]] = {}
        self._stopped: SimpleQueue[None] = SimpleQueue()  # has something once no further action is to start
        self._stop: Callable[[], object] | None = None
        self._began = time.perf_counter()
        self._timed: list[TimedAction] = []
        self._done: frozenset[Action] = frozenset()  # inline, before there were several threads
        self._error: BaseException | None = None
        self._failing = threading.Lock()

    def run_inline(self, to_the_end: bool) -> bool:
        """Perform actions on this thread as long as they are short, or all of them; True if nothing is left to do."""
        plan = self._plan
        if plan.policy.uses_threads and not to_the_end:
            return False
        self.perform_actions(plan.in_order, None if to_the_end else [])
        self._done = frozenset([action for action, _, _ in self._timed])
        return self._error is not None or len(self._timed) == len(plan.in_order)

    def begin_threads(self) -> Callable[[], object]:
        """Go on with the threads of all workers, each of which performs its :meth:`actions_of`.

        Returns what stops them: no further action starts, and nobody waits. It may be called any number of times, and
        no Ctrl-C can come before it has done all that, since nothing in it is Python.
        """
        self._gates = {action: SimpleQueue() for action in self._plan.awaited}
        # What is left of the one iterator is what has not been told yet; once all are told, it is used up.
        tell = map(SimpleQueue.put, [self._stopped, *self._gates.values()], repeat(None))
        stop: Callable[[], object] = partial(deque, tell, 0)
        self._stop = stop
        return stop

    def actions_of(self, worker: int) -> Iterator[Action]:
        """The actions of a worker that are left, each when it can start.

        Raises:
            RuntimeError: the process is a fork of the one that began the run.
        """
        plan, gates, stopped = self._plan, self._gates, self._stopped
        for action in plan.orders[worker]:
            if self._process != os.getpid():
                raise RuntimeError("a step cannot go on in a fork: its workers exist only in the parent process")
            for _ in plan.awaited.get(action, ()):
                _pass(gates[action])
                if not stopped.empty():
                    return
            if not stopped.empty():
                return
            if action not in self._done:
                yield action
            for waiting in plan.waiting.get(action, ()):
                gates[waiting].put(None)

    def perform_actions(self, actions: Iterable[Action], long: list[float] | None = None) -> None:
        """Perform actions on this thread, in this order. Raises nothing; an error ends the run.

        ``long``: note the times of long actions there, and stop when they call for threads. None: do not stop.
        """
        perform, timed = self._perform, self._timed
        assert perform is not None
        clock = time.perf_counter
        action = None
        streams, contexts = random_streams.this_thread, context.this_thread
        outer_stream, outer = streams.stream, contexts.micro_batch
        context.count_threads(1)
        try:
            streams.stream = self._state.stream_between_actions
            if outer_stream is None:
                random_streams.begin_drawing()
            for action in actions:
                start = clock()
                perform(action)
                end = clock()
                timed.append((action, start, end))
                if long is not None and calls_threads(long, end - start):
                    break
                action = None
        except BaseException as error:
            self.fail(error, action)
        finally:  # first what no Ctrl-C can come before: no call
            contexts.micro_batch, streams.stream = outer, outer_stream
            if outer_stream is None:
                random_streams.end_drawing()
            context.count_threads(-1)

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Stop the run; the first error is the one that is raised."""
        with self._failing:
            if self._error is None:
                self._error = error
                note = _place(action)
            else:
                note = f"{_place(action)} failed, too: {describe_error(error)}"
            if action is not None and hasattr(self._error, "add_note"):  # Python 3.11
                self._error.add_note(note)
        if self._stop is not None:
            self._stop()

    def outcome(self) -> list[TimedAction]:
        """Return when each action started and ended, in any order, after the end of the run.

        Raises:
            BaseException: what an action has raised first, with a note of stage and micro-batch.
        """
        error, self._error, self._perform = self._error, None, None
        if error is None:
            seconds = time.perf_counter() - self._began
            if self._stop is None:
                self._plan.policy.saw_inline(seconds)
            else:
                self._plan.policy.saw_threads(seconds, [end - start for _, start, end in self._timed])
            return self._timed
        try:
            raise error
        finally:
            del error

    def _in_range(self, action: Action) -> None:
        """Perform an action in a range of the profile."""
        with torch.autograd.profiler.record_function(f"pymoe.pipe: {action}"):
            self._state.perform(action)


def _place(action: Action | None) -> str:
    if action is None:
        return "between two micro-batches"
    return f"in {_PASSES[action.kind]} of stage {action.stage}, micro-batch {action.micro_batch}"
