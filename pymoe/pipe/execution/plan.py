"""Runs forward and backward passes through a pipe's stages: plans of schedules, runs of plans, the threads that perform
the actions, and the engine, which keeps plans, threads and other state between mini-batches.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import repeat
from operator import is_
from queue import Empty, SimpleQueue
from typing import Any

import torch

from pymoe._errors import add_note, describe_error
from pymoe._runtime import Future, Profiled, WorkerPool
from pymoe._torch_private import profiler_enabled
from pymoe.autograd import random_streams
from pymoe.autograd.fork import renew_engine
from pymoe.autograd.isolated_graph import graphs_are_made
from pymoe.autograd.thread_state import ThreadState, current, in_state
from pymoe.pipe import context
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
from pymoe.pipe.execution.held_state import Turns, running_step, turns_of
from pymoe.pipe.execution.held_values import HeldLayout
from pymoe.pipe.execution.step_state import StageRecompute, StepState
from pymoe.pipe.loss import (
    CALL,
    STEP,
    LossWeights,
    Objective,
    check_readings,
    holds_no_tensors,
    with_loss,
    with_reading,
)
from pymoe.pipe.schedules import Action, Kind, Record, Schedule, ScheduleError, as_run, build
from pymoe.pipe.schedules import run as in_order
from pymoe.pipe.stages import INPUT, MicroBatches, Pipeline, Source

INLINE_LIMIT_S = 500e-6
"""Actions shorter than this are best run inline, on the caller's thread."""
LONG_ACTIONS = 3
LONG_ACTIONS_S = 5 * INLINE_LIMIT_S
"""An inline run starts the workers once at least LONG_ACTIONS of its actions took over INLINE_LIMIT_S each, and over
LONG_ACTIONS_S in total. One long action is not enough, because another process may have delayed it.
"""
ALWAYS_THREADS = False
"""Set by tests of threads: use all workers even if actions are short."""

TimedAction = tuple[Action, float, float]
"""An action, and when it started and ended: in seconds, by ``time.perf_counter``."""


class ActionPlan:
    """The order of a schedule's actions, and which of them wait for actions of other workers."""

    def __init__(
        self, schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind), in_turns: Sequence[Sequence[int]] = ()
    ) -> None:
        """Plan the schedule's actions of these kinds; dependencies on actions of other kinds are ignored.

        Raise ScheduleError if the schedule is invalid or would deadlock.

        ``in_turns``: groups of stages. The forwards of a group should run in the order of the model, one micro-batch
        after the other.
        """
        self.schedule = schedule
        self.workers = schedule.workers
        self.policy = InlinePolicy()
        self.orders = [[action for action in order if action.kind in kinds] for order in schedule.orders]
        self.keeps: set[tuple[int, ...]] = set()
        """The groups of ``in_turns`` whose order this plan keeps. Keeping that of the others would cause a deadlock."""
        after: dict[Action, tuple[Action, ...]] = {}
        for stages in in_turns:
            wanted = dict(after)
            for number in range(1, schedule.micro_batches):
                first = Action(stages[0], number, Kind.FORWARD)
                # Only the group's first stage needs another dependency: each further stage waits for the one before it.
                wanted[first] = (*wanted.get(first, ()), Action(stages[-1], number - 1, Kind.FORWARD))
            with suppress(ScheduleError):
                deque(in_order(schedule, wanted), 0)
                after = wanted
                self.keeps.add(tuple(stages))
        self.in_order: list[Action] = []  # the actions, in an order in which one thread can run them
        self.awaited: dict[Action, list[Action]] = {}
        """The actions of other workers that an action waits for."""
        self.waiting: dict[Action, list[Action]] = {}
        """The actions of other workers that wait for an action."""
        for worker, action, dependencies in in_order(schedule, after):
            if action.kind in kinds:
                self.in_order.append(action)
                for needed in dependencies:
                    if needed.kind in kinds and schedule.placement[needed.stage] != worker:
                        self.awaited.setdefault(action, []).append(needed)
                        self.waiting.setdefault(needed, []).append(action)


class InlinePolicy:
    """Decides from earlier runs whether a run of a plan starts all threads at its beginning.

    If actions spend much of their time in Python, threads lose more time waiting for the interpreter's lock than they
    save: stages of two linear layers of width 64 take longer on two threads than on one. So the first run begins
    inline. (Maps of :mod:`pymoe.parallel` decide during each run instead, in native code that may wake a worker in the
    middle. Their calls do not wait for each other, so there is no plan whose runs could be compared.)
    """

    def __init__(self) -> None:
        self._needs_threads = False
        # duration of the last inline run in seconds, doubled by every run on threads since; infinite before the first
        self._inline_s = math.inf

    @property
    def uses_threads(self) -> bool:
        """Return whether a run starts all threads at its beginning."""
        return self._needs_threads or ALWAYS_THREADS

    def saw_inline(self, seconds: float) -> None:
        self._inline_s = seconds

    def saw_threads(self, seconds: float, durations: list[float]) -> None:
        """Record how long a run on several threads took, and how long each of its actions took, in seconds."""
        # Several threads are worthwhile if many actions are long. But short actions take long, too, when they wait for
        # the interpreter's lock, so the run must also be faster than the last inline run. Since the inline run may
        # have had smaller batches, its time is doubled after every run on threads.
        long = sum([duration > INLINE_LIMIT_S for duration in durations])
        self._needs_threads = 4 * long > len(durations) and seconds < self._inline_s
        self._inline_s *= 2


def calls_threads(long: list[float], duration: float) -> bool:
    """Note an action of ``duration`` seconds. Return whether the run, which began inline, should now start the threads.

    ``long``: the durations of the run's long actions so far; ``duration`` is appended if it is long, too.
    """
    if duration <= INLINE_LIMIT_S:
        return False
    long.append(duration)
    return len(long) >= LONG_ACTIONS and sum(long) > LONG_ACTIONS_S


# One run of a plan.

_PASSES = {
    Kind.FORWARD: "the forward pass",
    Kind.BACKWARD: "the backward pass",
    Kind.BACKWARD_INPUT: "the backward pass of inputs",
    Kind.BACKWARD_WEIGHT: "the backward pass of weights",
}


WAIT_SLICE_S = 0.05
"""Waits are divided into slices of this length. A signal that comes just before a wait, or to another thread, does not
end the wait; so it is handled after the slice.
"""


def _pass(gate: SimpleQueue[None]) -> None:
    while True:
        try:
            return gate.get(timeout=WAIT_SLICE_S)
        except Empty:
            pass


class PlanRun:
    """Runs a plan once: inline as long as actions are short, then on the threads of all workers."""

    def __init__(self, plan: ActionPlan, state: StepState) -> None:
        self._plan = plan
        self._state = state
        self._perform: Callable[[Action], None] | None = self._in_range if profiler_enabled() else state.perform
        self._process = os.getpid()
        # For each action that waits for other workers, a queue: it gets an item whenever an awaited action has ended.
        self._gates: dict[Action, SimpleQueue[None]] = {}
        self._stopped: SimpleQueue[None] = SimpleQueue()  # gets an item when no further action may start
        self._stop: Callable[[], object] | None = None
        self._began = time.perf_counter()
        self._timed: list[TimedAction] = []
        self._done: frozenset[Action] = frozenset()  # actions performed inline, before there were several threads
        self._error: BaseException | None = None
        self._failing = threading.Lock()

    def run_inline(self, to_the_end: bool) -> bool:
        """Perform actions on this thread, all of them if ``to_the_end``. Return True if the run has ended.

        If ``to_the_end`` is False, stop when several threads would be faster (:func:`calls_threads`); begin nothing if
        earlier runs have shown that they are (:class:`InlinePolicy`).
        """
        plan = self._plan
        if plan.policy.uses_threads and not to_the_end:
            return False
        self.perform_actions(plan.in_order, None if to_the_end else [])
        self._done = frozenset([action for action, _, _ in self._timed])
        return self._error is not None or len(self._timed) == len(plan.in_order)

    def begin_threads(self) -> Callable[[], object]:
        """Prepare to continue on the threads of all workers, each of which performs its :meth:`actions_of`.

        Return a function that stops them: no further action starts, and no thread keeps waiting. It may be called any
        number of times, and Ctrl-C cannot interrupt it, because it runs no Python code.
        """
        self._gates = {action: SimpleQueue() for action in self._plan.awaited}
        # All calls of `stop` share the iterator, so a second call has nothing left to do.
        tell = map(SimpleQueue.put, [self._stopped, *self._gates.values()], repeat(None))
        stop: Callable[[], object] = partial(deque, tell, 0)
        self._stop = stop
        return stop

    def actions_of(self, worker: int) -> Iterator[Action]:
        """Yield the remaining actions of a worker, each as soon as it can start.

        Raises:
            RuntimeError: this process was forked from the one that began the run.
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
        """Perform actions on this thread, in this order. Raise nothing: an error ends the run, and is kept.

        ``long``: a list that collects the durations of long actions; stop when :func:`calls_threads` says so. None: do
        not stop.
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
        finally:  # Ctrl-C can interrupt a call, but not assignments before the first call
            contexts.micro_batch, streams.stream = outer, outer_stream
            if outer_stream is None:
                random_streams.end_drawing()
            context.count_threads(-1)

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Stop the run because of an error. :meth:`outcome` raises the first one, with notes about the others."""
        with self._failing:
            if self._error is None:
                self._error = error
                note = _place(action)
            else:
                note = f"{_place(action)} failed, too: {describe_error(error)}"
            if action is not None:
                add_note(self._error, note)
        if self._stop is not None:
            self._stop()

    def outcome(self) -> list[TimedAction]:
        """Return the actions with their start and end times, in any order. Call this once, after the end of the run.

        Raises:
            BaseException: the first exception of an action, with a note that names stage and micro-batch.
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
        """Perform an action in a named range that profiles show."""
        with torch.autograd.profiler.record_function(f"pymoe.pipe: {action}"):
            self._state.perform(action)


def _place(action: Action | None) -> str:
    if action is None:
        return "between two micro-batches"
    return f"in {_PASSES[action.kind]} of stage {action.stage}, micro-batch {action.micro_batch}"


# Threads.


class _Inside(threading.local):
    # the Workers of the pipes of which this thread is performing an action, outermost pipe first
    workers: tuple[Workers, ...] = ()


inside = _Inside()


class Workers:
    """Keeps a persistent thread for every worker except the first, whose actions the calling thread performs.

    The threads run in the state of the thread that calls :meth:`run`: grad mode, autocast, context variables, profiler
    and so on. They start when they are first needed, and end with this object. A forked child starts new threads. A
    copy of the object has its own threads.
    """

    def __init__(self) -> None:
        self._pools: list[WorkerPool] = []
        self._process = os.getpid()
        self.lock = threading.Lock()  # held by the thread that runs a plan

    def __reduce__(self) -> Any:
        return Workers, ()

    def prepare(self) -> None:
        """Prepare for a run that the calling thread is about to begin. The thread must take :attr:`lock` after this
        call, and keep it during the run.

        Raises:
            RuntimeError: an action of a run with these workers has started another run with them.
        """
        if self in inside.workers:
            raise RuntimeError(
                "a stage of a pipe cannot run the pipe itself (torch.utils.checkpoint around a pipe has it run again "
                "in its backward pass: use Pipe(..., checkpoint=...) instead)"
            )
        if self._process != os.getpid():
            self._pools, self._process, self.lock = [], os.getpid(), threading.Lock()

    def run(self, run: PlanRun, workers: int) -> None:
        """Perform the rest of a run: the actions of worker 0 on this thread, those of the others on threads of their
        own, which take over this thread's state, such as its grad mode and context variables.

        Errors of actions are not raised but kept by ``run``. After an error no further action starts, and this call
        waits until those that are running have ended. Ctrl-C has the same effect; a second Ctrl-C ends the wait.
        """
        while len(self._pools) < workers - 1:
            renew_engine()
            self._pools.append(WorkerPool(1))
        state, around = current(), inside.workers
        profiled = Profiled() if profiler_enabled() else None
        ended: list[Future] = []
        stop = run.begin_threads()
        try:
            for worker, pool in zip(range(1, workers), self._pools, strict=False):
                context = contextvars.copy_context()
                ended.append(pool.submit(context.run, _run_worker, run, worker, state, around, profiled))
            run.perform_actions(run.actions_of(0))
            _wait_for(ended)
        except BaseException:
            # Either Ctrl-C, or a thread that could not be started: workers raise nothing. First make the workers stop
            # waiting for each other, by a native call that a second Ctrl-C cannot interrupt.
            stop()
            # Ctrl-C may have come after a worker was started and before its future was in `ended`. Every pool has one
            # thread, so a task that is submitted now ends after that worker.
            _wait_for([pool.submit(int) for pool in self._pools[: workers - 1]])
            raise


def _run_worker(
    run: PlanRun, worker: int, state: ThreadState, around: tuple[Workers, ...], profiled: Profiled | None
) -> None:
    """Perform a worker's actions on its own thread, in the state of the thread that called the pipe. Raise nothing."""
    joined = profiled is not None and not profiler_enabled() and profiled.join()
    inside.workers = around
    try:
        in_state(state, run.perform_actions, run.actions_of(worker))
    except BaseException as error:
        run.fail(error, None)
    finally:
        inside.workers = ()
        if joined:
            Profiled.leave()


def _wait_for(ended: Sequence[Future]) -> None:
    for future in ended:
        future.result()


# The engine.

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
        objective: Objective,
        weights: LossWeights,
    ) -> torch.Tensor:
        """Run forward, loss and backward of all micro-batches, interleaved. If nothing fails, add the gradients to
        ``.grad``. Return the losses, of shape (micro-batches,).

        If the loss has a target, the target is the last value of every micro-batch. ``recomputed``: the indices of the
        micro-batches whose forwards are recomputed. ``weights``: the weight of each micro-batch's loss.
        """
        arguments = pipeline, objective, weights.uncounted, weights.are_rows
        known, ended = self._with_loss  # most steps have the same arguments as the previous one
        if ended is None or known != arguments:
            ended = with_loss(*arguments)
            self._with_loss = (arguments, ended) if holds_no_tensors(objective.loss_fn) else ((), None)
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
        """Run all forwards. Return every micro-batch's output values; their autograd history runs the pipeline's
        backwards.

        ``own_loss``: the index of the output that is a loss; None: no output is. Raises ValueError if there are several
        micro-batches and the autograd graph of the loss shows that it is not a mean over rows.
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
        """Return the function that autograd calls in the backward pass. It takes the gradients of the outputs, and
        returns those of the inputs and ``leaves``.
        """
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
        """Return a new state for a mini-batch that is to go through ``pipeline``."""
        random_streams.install()
        states = []
        for stage in pipeline.stages:
            key = tuple(map(id, stage.modules))
            state = self._states.get(key)
            if state is None:  # ids are safe as keys: each state keeps its modules alive
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
        """Return the plan for actions of these kinds. Stages that may write to shared state take turns, if possible."""
        turns: list[Turns] = []
        if Kind.FORWARD in kinds and len(state.recompute) > 1:
            layouts = [stage.held.look().layout for stage in state.recompute]
            known, found = self._shared
            if len(known) != len(layouts) or not all(map(is_, known, layouts)):
                found = turns_of(layouts, found)
                self._shared = layouts, found
            for stage, its_turns in zip(state.recompute, found, strict=True):
                stage.turns = its_turns
            # In another training mode, a module may write to other state; so may another graph of the same model.
            functions = [stage.function for stage in state.pipeline.stages]
            code = [*functions, *(module.training for one in layouts for module in one.modules.values())]
            turns = [one for one in dict.fromkeys(found) if one is not None and one.begin_step(code)]
        # The loss function is numbered as a stage after the last, but runs within the last stage.
        in_turns = [tuple(dict.fromkeys(min(n, schedule.stages - 1) for n in one.stages)) for one in turns]
        key = id(schedule), kinds, *in_turns
        plan = self._plans.get(key)
        if plan is None:  # ids are safe as keys: the remembered plans keep their schedules alive
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            plan = self._plans[key] = ActionPlan(schedule, kinds, in_turns)
        for one, stages in zip(turns, in_turns, strict=True):
            one.is_ordered = stages in plan.keeps
        return plan

    def schedule(self, schedule: str | Schedule, stages: int, micro_batches: int) -> Schedule:
        """Return the schedule with this name, or the given schedule. Raise ValueError if there is no such name, or the
        schedule has a different number of stages or micro-batches.
        """
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
        """Return a record of when each action of the last successful pass started and ended; None before the first."""
        return None if self._last is None else as_run(*self._last)

    def __getstate__(self) -> dict[str, Any]:
        of_these_modules: dict[str, Any] = {"_states": {}, "_shared": ([], [])}
        return {**self.__dict__, "_plans": {}, "_last": None, "_with_loss": ((), None), **of_these_modules}


def run_in_one_graph(pipeline: Pipeline, micro_batches: MicroBatches) -> list[list[Any]]:
    """Compute the result of :meth:`Engine.forward` on this thread, in one ordinary autograd graph."""
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
    """Return the indices of the outputs that share memory with another output or an input, or with a leaf."""
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
    """Return the gradients of the inputs, then of ``leaves``. Add the gradients of other leaves to their ``.grad``."""
    found, grads = state.gradients()
    by_leaf = {id(leaf): grad for leaf, grad in zip(found, grads, strict=True)}
    inputs = list(state.inputs.grads)
    ordered = [by_leaf.pop(id(leaf), None) for leaf in leaves]
    # Leaves that were found only when forwards were recomputed, such as tensors in closures.
    late = [leaf for leaf in found if id(leaf) in by_leaf]
    accumulate(late, [by_leaf[id(leaf)] for leaf in late])
    return [*inputs, *ordered]
