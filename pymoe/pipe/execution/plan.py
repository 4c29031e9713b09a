"""A schedule prepared to be run, one run of it, and the threads that run it."""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

import torch

from pymoe._errors import add_note, describe_error
from pymoe._runtime import Future, Profiled, WorkerPool
from pymoe._torch_private import profiler_enabled
from pymoe.autograd import random_streams
from pymoe.autograd.fork import renew_engine
from pymoe.autograd.thread_state import ThreadState, current, in_state
from pymoe.pipe import context
from pymoe.pipe.execution.step_state import StepState
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule, ScheduleError
from pymoe.pipe.schedules.schedule import run as in_order

INLINE_LIMIT_S = 500e-6
"""Actions that take less time are best run inline, on the caller's thread."""
LONG_ACTIONS = 3
LONG_ACTIONS_S = 5 * INLINE_LIMIT_S
"""An inline run starts the workers after this many longer actions with this many seconds in total, because other
processes may have delayed a single action.
"""
ALWAYS_THREADS = False
"""For tests of threads: use all workers, even if actions are short."""

TimedAction = tuple[Action, float, float]
"""An action, and when it started and ended: in seconds, by ``time.perf_counter``."""


class ActionPlan:
    """Holds the order of a schedule's actions, and which of them wait for actions of other workers."""

    def __init__(
        self, schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind), in_turns: Sequence[Sequence[int]] = ()
    ) -> None:
        """Raise ScheduleError if the schedule cannot run.

        Args:
            schedule: what to do.
            kinds: the actions to run; the results of the others exist already.
            in_turns: stages whose forwards must run in the order of the model, one micro-batch after the other.
        """
        self.schedule = schedule
        self.workers = schedule.workers
        self.policy = InlinePolicy()
        self.orders = [[action for action in order if action.kind in kinds] for order in schedule.orders]
        self.keeps: set[tuple[int, ...]] = set()
        """The entries of ``in_turns`` whose order this plan keeps. The others would deadlock the workers."""
        after: dict[Action, tuple[Action, ...]] = {}
        for stages in in_turns:
            wanted = dict(after)
            for number in range(1, schedule.micro_batches):
                first = Action(stages[0], number, Kind.FORWARD)
                # Between these two actions, each stage waits for the one before it.
                wanted[first] = (*wanted.get(first, ()), Action(stages[-1], number - 1, Kind.FORWARD))
            with suppress(ScheduleError):
                deque(in_order(schedule, wanted), 0)
                after = wanted
                self.keeps.add(tuple(stages))
        self.in_order: list[Action] = []  # an order for one thread
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
    save: a stage of two linear layers of width 64 takes longer on two threads than on one. So the first run begins
    inline. (Maps of :mod:`pymoe.parallel` decide for each call instead, in native code that may wake a worker in the
    middle of a run. Their calls do not wait for each other, so there is no plan whose runs could be compared.)
    """

    def __init__(self) -> None:
        self._needs_threads = False
        self._inline_s = math.inf  # seconds of an inline run, if known

    @property
    def uses_threads(self) -> bool:
        """Return whether a run starts all threads at its beginning."""
        return self._needs_threads or ALWAYS_THREADS

    def saw_inline(self, seconds: float) -> None:
        self._inline_s = seconds

    def saw_threads(self, seconds: float, durations: list[float]) -> None:
        """Record the seconds that a run on threads took, and those of its actions."""
        # Threads are worthwhile if many actions are long. But on threads, short actions seem long if they wait for each
        # other, so the run must also be faster than the last inline run. That may have had smaller batches, so its time
        # is doubled after every run on threads.
        long = sum([duration > INLINE_LIMIT_S for duration in durations])
        self._needs_threads = 4 * long > len(durations) and seconds < self._inline_s
        self._inline_s *= 2


def calls_threads(long: list[float], duration: float) -> bool:
    """Return whether a run that has begun inline starts the other threads now, after one more action of this duration.

    ``long``: the times of its longer actions so far; this one is added if it is long.
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
"""Waits are divided into slices of this length, because a signal that comes just before a wait, or to another thread,
does not end the wait: it is handled after the slice.
"""


def _pass(gate: SimpleQueue[None]) -> None:
    while True:
        try:
            return gate.get(timeout=WAIT_SLICE_S)
        except Empty:
            pass


class PlanRun:
    """Runs a plan once: performs actions inline as long as they are short, then on the threads of all workers."""

    def __init__(self, plan: ActionPlan, state: StepState) -> None:
        self._plan = plan
        self._state = state
        self._perform: Callable[[Action], None] | None = self._in_range if profiler_enabled() else state.perform
        self._process = os.getpid()
        # With several threads: a queue for each action, which gets an item when an action of another worker has ended.
        self._gates: dict[Action, SimpleQueue[None]] = {}
        self._stopped: SimpleQueue[None] = SimpleQueue()  # gets an item when no further action may start
        self._stop: Callable[[], object] | None = None
        self._began = time.perf_counter()
        self._timed: list[TimedAction] = []
        self._done: frozenset[Action] = frozenset()  # actions performed inline, before there were several threads
        self._error: BaseException | None = None
        self._failing = threading.Lock()

    def run_inline(self, to_the_end: bool) -> bool:
        """Perform actions on this thread while they are short, or all of them. Return True if none is left."""
        plan = self._plan
        if plan.policy.uses_threads and not to_the_end:
            return False
        self.perform_actions(plan.in_order, None if to_the_end else [])
        self._done = frozenset([action for action, _, _ in self._timed])
        return self._error is not None or len(self._timed) == len(plan.in_order)

    def begin_threads(self) -> Callable[[], object]:
        """Continue with the threads of all workers, each of which performs its :meth:`actions_of`.

        Returns a function that stops them: no further action starts, and no thread keeps waiting. It may be called any
        number of times, and Ctrl-C cannot interrupt it, because nothing in it is Python.
        """
        self._gates = {action: SimpleQueue() for action in self._plan.awaited}
        # The iterator is shared: a second call of `stop` continues where the first was interrupted.
        tell = map(SimpleQueue.put, [self._stopped, *self._gates.values()], repeat(None))
        stop: Callable[[], object] = partial(deque, tell, 0)
        self._stop = stop
        return stop

    def actions_of(self, worker: int) -> Iterator[Action]:
        """Yield the remaining actions of a worker, each as soon as it can start.

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

        ``long``: collects the times of long actions; stop when they call for threads. None: do not stop.
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
        finally:  # assignments first, without a call, so that no Ctrl-C can prevent them
            contexts.micro_batch, streams.stream = outer, outer_stream
            if outer_stream is None:
                random_streams.end_drawing()
            context.count_threads(-1)

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Stop the run; of several errors, the first is raised."""
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
        """Return when each action started and ended, in any order, after the end of the run.

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
        """Perform an action, shown as a named range in profiles."""
        with torch.autograd.profiler.record_function(f"pymoe.pipe: {action}"):
            self._state.perform(action)


def _place(action: Action | None) -> str:
    if action is None:
        return "between two micro-batches"
    return f"in {_PASSES[action.kind]} of stage {action.stage}, micro-batch {action.micro_batch}"


# Threads.


class _Inside(threading.local):
    workers: tuple[Workers, ...] = ()  # threads of the pipes whose runs this thread takes part in


inside = _Inside()


class Workers:
    """Keeps a persistent thread for every worker except the first, whose actions the calling thread performs.

    They run in the state of the thread that calls :meth:`run`: grad mode, autocast, context variables, profiler and so
    on. Threads start when they are first needed and end with this object. A forked child starts new threads. A copy has
    its own threads.
    """

    def __init__(self) -> None:
        self._pools: list[WorkerPool] = []
        self._process = os.getpid()
        self.lock = threading.Lock()  # held by the thread that runs a plan

    def __reduce__(self) -> Any:
        return Workers, ()

    def prepare(self) -> None:
        """Prepare for a run that the calling thread is about to begin; it must hold :attr:`lock` meanwhile.

        Raises:
            RuntimeError: an action of a run has started another run.
        """
        if self in inside.workers:
            raise RuntimeError(
                "a stage of a pipe cannot run the pipe itself (torch.utils.checkpoint around a pipe has it run again "
                "in its backward pass: use Pipe(..., checkpoint=...) instead)"
            )
        if self._process != os.getpid():
            self._pools, self._process, self.lock = [], os.getpid(), threading.Lock()

    def run(self, run: PlanRun, workers: int) -> None:
        """Perform the rest of a run: worker 0 on this thread, the others on theirs, in this thread's state.

        Errors are kept by the run. After an error no further action starts, and this call waits for the running ones.
        Ctrl-C has the same effect, but a second Ctrl-C does not wait.
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
            # Workers raise nothing, so this is Ctrl-C between two lines, or a thread that could not start. First stop
            # the other workers' waits for this one: a native call, so no second Ctrl-C can precede it.
            stop()
            # Ctrl-C may have come after a worker was started and before that was noted. Every pool has one thread, so a
            # task that is submitted now ends after that worker.
            _wait_for([pool.submit(int) for pool in self._pools[: workers - 1]])
            raise


def _run_worker(
    run: PlanRun, worker: int, state: ThreadState, around: tuple[Workers, ...], profiled: Profiled | None
) -> None:
    """Run a worker on its own thread, in the calling thread's state. Raises nothing."""
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
