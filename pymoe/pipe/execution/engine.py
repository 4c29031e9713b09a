"""Runs the passes through a pipe's stages, and keeps state between mini-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

import torch

from pymoe.autograd import random_streams
from pymoe.autograd.isolated_graph import graphs_are_made
from pymoe.pipe.context import MicroBatch, running
from pymoe.pipe.execution.graph import (
    BoundaryTensor,
    Grads,
    StageValue,
    accumulate,
    attach,
    boundaries_of,
    end_history,
    memory_of,
    unflatten_value,
)
from pymoe.pipe.execution.held_values import HeldLayout
from pymoe.pipe.execution.plan import ActionPlan, PlanRun, TimedAction, Workers, inside
from pymoe.pipe.execution.shared_layers import Turns, running_step, turns_of
from pymoe.pipe.execution.step_state import StageRecompute, StepState
from pymoe.pipe.loss import (
    CALL,
    STEP,
    LossFunction,
    LossWeights,
    Unflatten,
    check_readings,
    holds_no_tensors,
    with_loss,
    with_reading,
)
from pymoe.pipe.schedules import Kind, Record, Schedule, as_run, build
from pymoe.pipe.stages import INPUT, MicroBatches, Pipeline, Source

ALL, FORWARD, BACKWARD = frozenset(Kind), frozenset({Kind.FORWARD}), frozenset({Kind.BACKWARD})
REMEMBERED = 64
"""Largest number of schedules, and of plans made from them, that are kept."""


class Engine:
    """Runs mini-batches through the stages of one model. A copy gets its own threads and plans."""

    def __init__(self) -> None:
        self._workers = Workers()
        self._plans: dict[tuple[Any, ...], ActionPlan] = {}
        self._states: dict[tuple[int, ...], StageRecompute] = {}  # one for each stage, keyed by the ids of its modules
        self._shared: tuple[list[HeldLayout], list[Turns | None]] = [], []
        self._with_loss: tuple[tuple[Any, ...], Pipeline | None] = (), None
        self._last: tuple[Schedule, list[TimedAction]] | None = None

    def step(
        self,
        pipeline: Pipeline,
        micro_batches: MicroBatches,
        schedule: Schedule,
        recomputed: range,
        loss_fn: LossFunction | None,
        has_target: bool,
        unflatten: Unflatten,
        own_loss: int,
        weights: LossWeights,
    ) -> torch.Tensor:
        """Run forward, loss and backward of all micro-batches, interleaved; add gradients if nothing fails.

        The last value in ``micro_batches`` is the target, if there is one; :func:`pymoe.pipe.loss.with_loss` computes
        the loss. ``recomputed``: the micro-batches whose forward is recomputed. ``weights``: the weights of their
        losses. Returns (micro-batches,): the losses.
        """
        arguments = pipeline, loss_fn, has_target, unflatten, own_loss, weights.uncounted, weights.are_rows
        known, ended = self._with_loss  # most steps have the same arguments as the previous one
        if ended is None or known != arguments:
            ended = with_loss(*arguments)
            self._with_loss = (arguments, ended) if holds_no_tensors(loss_fn) else ((), None)
        graphs = graphs_are_made()
        state = self._begin(ended, micro_batches, graphs, recomputed, weights.shares)
        try:
            self._perform(state, schedule, ALL if graphs else FORWARD)
            if weights.are_rows:
                check_readings(state.readings, micro_batches, STEP)
            inputs, input_grads = state.inputs.tensors, state.inputs.grads
            leaves, grads = state.gradients()
            edited = state.inputs.edited()
        finally:
            state.release()
        accumulate([*inputs, *leaves], [*input_grads, *grads])
        end_history(edited)
        return state.losses()

    def forward(
        self, pipeline: Pipeline, micro_batches: MicroBatches, recomputed: range, own_loss: int | None = None
    ) -> list[list[Any]]:
        """Return for every micro-batch the pipeline's output values, with the pipeline as their autograd history.

        ``own_loss``: the index of the output that is a loss. Raises ValueError if its graph shows that it is not a mean
        over rows.
        """
        schedule = self.schedule("gpipe", len(pipeline.stages), len(micro_batches.rows))
        is_read = own_loss is not None and len(micro_batches.rows) > 1
        read = with_reading(pipeline, own_loss or 0) if is_read else pipeline
        state = self._begin(read, micro_batches, graphs_are_made(), recomputed, None)
        try:
            self._perform(state, schedule, FORWARD)
            outputs = state.outputs()
            if is_read:
                check_readings([values.pop().leaves[0] for values in outputs], micro_batches, CALL)
        except BaseException:
            state.release()
            raise
        crossed = [leaf for values in outputs for leaf in boundaries_of(values) if leaf.accumulator is not None]
        made: dict[int, torch.Tensor] = {}
        if crossed:
            inputs = state.inputs.tensors
            leaves = state.leaves()
            # Outputs of several micro-batches are copied into new tensors, so only those of a single one can share
            # memory.
            tied = _tied(crossed, inputs) if len(outputs) == 1 else ()
            backward = self._backward(state, schedule, crossed, leaves)
            attached = attach(backward, [boundary.tensor for boundary in crossed], [*inputs, *leaves], tied)
            end_history(state.inputs.edited())
            made = {id(boundary): tensor for boundary, tensor in zip(crossed, attached, strict=True)}
        else:
            state.release()
        return [[_value(value, made) for value in values] for values in outputs]

    def _backward(
        self, state: StepState, schedule: Schedule, crossed: Sequence[BoundaryTensor], leaves: Sequence[torch.Tensor]
    ) -> Callable[[Grads, bool], Grads]:
        """Return the function with which autograd turns gradients of outputs into those of inputs and ``leaves``."""
        ends = [(boundary.accumulator, boundary.number) for boundary in crossed]

        def backward(grads: Grads, keep: bool) -> Grads:
            try:
                state.begin_backward(keep)
                for (accumulator, number), grad in zip(ends, grads, strict=True):
                    if grad is not None:
                        assert accumulator is not None
                        accumulator.add_gradient(number, grad)
                self._perform(state, schedule, BACKWARD)
                return _in_order(state, leaves)
            finally:
                if not keep:
                    state.release()
                    ends.clear()

        return backward

    def _begin(
        self,
        pipeline: Pipeline,
        micro_batches: MicroBatches,
        graphs: bool,
        recomputed: range,
        loss_weights: Sequence[float] | None,
    ) -> StepState:
        """Return the state of a mini-batch that goes through ``pipeline``."""
        random_streams.install()
        states = []
        for stage in pipeline.stages:
            key = tuple(map(id, stage.modules))
            state = self._states.get(key)
            if state is None:  # a known pipeline keeps its modules alive, so their ids stay unique
                if len(self._states) >= REMEMBERED + len(pipeline.stages):
                    self._states.clear()
                state = self._states[key] = StageRecompute(stage.modules)
            states.append(state)
        return StepState(pipeline, micro_batches, graphs, states, recomputed, loss_weights, inside.workers)

    def _perform(self, state: StepState, schedule: Schedule, kinds: frozenset[Kind]) -> None:
        """Perform all actions of the schedule that have one of these kinds."""
        workers = self._workers
        workers.prepare()
        with workers.lock:
            around = inside.workers
            held = [stage.held for stage in state.recompute]
            with running_step(held, workers, (*around, *state.around)) as step:
                try:
                    inside.workers = (*around, workers)
                    plan = self._plan(state, schedule, kinds)
                    # The current thread may be autograd's own thread for a device. Only that thread can run the
                    # device's nodes, so workers would wait for it. Therefore all actions run here.
                    inline = plan.workers == 1 or (kinds is BACKWARD and not state.is_on_host)
                    run = PlanRun(plan, state)
                    if not run.run_inline(to_the_end=inline):
                        workers.run(run, plan.workers)
                finally:
                    inside.workers = around
                    random_streams.restore()
        self._last = schedule, run.outcome()
        step.refuse_conflict()

    def _plan(self, state: StepState, schedule: Schedule, kinds: frozenset[Kind]) -> ActionPlan:
        """Return the plan for the next actions. In it, stages that write to shared state take turns."""
        turns: list[Turns] = []
        if Kind.FORWARD in kinds and len(state.recompute) > 1:
            layouts = [stage.held.look().layout for stage in state.recompute]
            known, found = self._shared
            if len(known) != len(layouts) or not all(map(is_, known, layouts)):
                found = turns_of(layouts, found)
                self._shared = layouts, found
            for stage, its_turns in zip(state.recompute, found, strict=True):
                stage.turns = its_turns
            # The same code may write to other state in another mode, and so may another captured graph.
            functions = [stage.function for stage in state.pipeline.stages]
            code = [*functions, *(module.training for one in layouts for module in one.modules.values())]
            turns = [one for one in dict.fromkeys(found) if one is not None and one.begin_step(code)]
        # A loss runs as a part of the last stage.
        in_turns = [tuple(dict.fromkeys(min(n, schedule.stages - 1) for n in one.stages)) for one in turns]
        key = id(schedule), kinds, *in_turns
        plan = self._plans.get(key)
        if plan is None:  # a known plan keeps its schedule alive, so the id stays unique
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            plan = self._plans[key] = ActionPlan(schedule, kinds, in_turns)
        for one, stages in zip(turns, in_turns, strict=True):
            one.is_ordered = stages in plan.keeps
        return plan

    def schedule(self, schedule: str | Schedule, stages: int, micro_batches: int) -> Schedule:
        """Return the schedule with this name, or the given schedule. Raise ValueError if it does not fit."""
        if isinstance(schedule, str):
            return _built(schedule, stages, micro_batches)
        if (schedule.stages, schedule.micro_batches) != (stages, micro_batches):
            raise ValueError(
                f"Pipe.step: expected a schedule for {stages} stages and {micro_batches} micro-batches, got one for "
                f"{schedule.stages} stages and {schedule.micro_batches} micro-batches"
            )
        return schedule

    @property
    def last_run(self) -> Record | None:
        """Return when each action of the last pass started and ended; None before the first pass."""
        return None if self._last is None else as_run(*self._last)

    def __getstate__(self) -> dict[str, Any]:
        of_these_modules: dict[str, Any] = {"_states": {}, "_shared": ([], [])}
        return {**self.__dict__, "_plans": {}, "_last": None, "_with_loss": ((), None), **of_these_modules}


def run_in_one_graph(pipeline: Pipeline, micro_batches: MicroBatches) -> list[list[Any]]:
    """Return the same as :meth:`Engine.forward`, computed on this thread, with the whole autograd history."""
    outputs = []
    for index, inputs in enumerate(micro_batches.values):
        made = {Source(INPUT, number): value for number, value in enumerate(inputs)}
        for number, stage in enumerate(pipeline.stages):
            about = MicroBatch(index, len(micro_batches.rows), micro_batches.weights[index], stage=number)
            with running(about):
                found = stage.function(*[made[source] for source in stage.inputs])
            made.update((Source(number, output), value) for output, value in enumerate(found))
        outputs.append([made[source] for source in pipeline.outputs])
    return outputs


_built = lru_cache(REMEMBERED)(build)


def _tied(crossed: Sequence[BoundaryTensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Return which of the outputs share memory with another output, an input or a leaf."""
    places = [memory_of(boundary.tensor) for boundary in crossed]
    shared = Counter([*places, *dict.fromkeys(map(memory_of, inputs))])
    return [
        number
        for number, (boundary, place) in enumerate(zip(crossed, places, strict=True))
        if boundary.is_fixed or shared[place] > 1
    ]


def _value(value: StageValue, made: dict[int, torch.Tensor]) -> Any:
    leaves = [made.get(id(leaf), leaf.tensor) if type(leaf) is BoundaryTensor else leaf for leaf in value.leaves]
    return unflatten_value(leaves, value.structure)


def _in_order(state: StepState, leaves: Sequence[torch.Tensor]) -> Grads:
    """Return the gradients of the inputs and of ``leaves``; pass on those of other leaves, as ``backward()`` does."""
    found, grads = state.gradients()
    by_leaf = {id(leaf): grad for leaf, grad in zip(found, grads, strict=True)}
    inputs = list(state.inputs.grads)
    ordered = [by_leaf.pop(id(leaf), None) for leaf in leaves]
    # Leaves that only recomputed forwards have found, such as tensors in closures.
    late = [leaf for leaf in found if id(leaf) in by_leaf]
    accumulate(late, [by_leaf[id(leaf)] for leaf in late])
    return [*inputs, *ordered]
