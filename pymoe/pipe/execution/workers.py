"""The threads of a pipe, and how they run a plan."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pymoe._errors import describe_error
from pymoe._runtime import Future, PipelineRun, Profiled, WorkerPool
from pymoe.autograd.fork import renew_engine
from pymoe.autograd.thread_state import ThreadState, current, in_state
from pymoe.pipe.execution.plan import Plan, Timed
from pymoe.pipe.execution.worth import Alone
from pymoe.pipe.schedules.action import Action, Kind

__all__ = ["Workers"]

Perform = Callable[[Action], None]
Around = Callable[..., Any]

_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_PASSES = {
    Kind.FORWARD: "the forward pass",
    Kind.BACKWARD: "the backward pass",
    Kind.BACKWARD_INPUT: "the backward pass of inputs",
    Kind.BACKWARD_WEIGHT: "the backward pass of weights",
}


class _Inside(threading.local):
    workers: tuple[Workers, ...] = ()


_inside = _Inside()


class Workers:
    """A persistent thread for every worker of a plan but the first, whose part is run by the thread that asks.

    That thread does everything as long as all actions are short: others would cost more than they gain.
    They run in the state of the thread that asks: grad mode, autocast, context variables, profiler and so on. Threads
    start when they are first needed and end with this object. In the child of a fork there are none, and new ones
    start. A copy has threads of its own.
    """

    def __init__(self) -> None:
        self._pools: list[WorkerPool] = []
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Workers, ()

    def run(self, plan: Plan, perform: Perform, around: Around, *, here: bool = False) -> list[Timed]:
        """``perform(action)`` for all actions of the plan. Returns when each started and ended, in any order.

        Runs of several threads come one after the other.

        Args:
            plan: what is to be run.
            perform: called on the thread of the action's worker.
            around: ``around(part, *args)`` is ``part(*args)``, in which a thread performs actions.
            here: this thread does everything.

        Raises:
            BaseException: what ``perform`` raised first, with a note of stage and micro-batch. Then actions that have
                not started are left out, and those that run are waited for; so it is with Ctrl-C, but a second one
                does not wait.
            RuntimeError: an action of a run has asked for another.
        """
        if self in _inside.workers:
            raise RuntimeError(
                "a stage of a pipe cannot run the pipe itself (torch.utils.checkpoint around a pipe has it run again "
                "in its backward pass: use Pipe(..., checkpoint=...) instead)"
            )
        if self._process != os.getpid():
            self._pools, self._process, self._lock = [], os.getpid(), threading.Lock()
        with self._lock:
            before = _inside.workers
            try:
                _inside.workers = inside = (*before, self)
                work = _Work(inside, plan, perform, around)
                if not around(work.alone, here or plan.workers == 1):
                    self._together(work)
            finally:
                _inside.workers = before
        return work.outcome()

    def _together(self, work: _Work) -> None:
        while len(self._pools) < work.plan.workers - 1:
            renew_engine()
            self._pools.append(WorkerPool(1))
        state = current()
        profiled = Profiled() if _is_profiled() else None
        parts: list[Future] = []
        run = work.begin()
        try:
            for lane, pool in zip(range(1, work.plan.workers), self._pools, strict=False):
                parts.append(pool.submit(contextvars.copy_context().run, work.elsewhere, lane, state, profiled))
            work.around(work.lane, 0)
            _wait(parts)
        except BaseException:
            # Lanes raise nothing: this is Ctrl-C between two of their lines, or there are no more threads. First the
            # other lanes must not wait for this one, and no second Ctrl-C can come before that: it is a native call.
            run.cancel()
            _wait(parts)
            raise


def _wait(parts: Sequence[Future]) -> None:
    for part in parts:
        part.result()


class _Work:
    """One run of a plan."""

    def __init__(self, inside: tuple[Workers, ...], plan: Plan, perform: Perform, around: Around) -> None:
        """``inside``: whose run this is, after those of which it is a part."""
        self.plan = plan
        self.around = around
        self._inside = inside
        self._perform: Perform | None = _with_ranges(perform) if _is_profiled() else perform
        self._run: PipelineRun | None = None
        self._began = time.perf_counter()
        self._timed: list[Timed] = []
        self._done: frozenset[Action] = frozenset()  # by one thread, before there were several
        self._error: BaseException | None = None
        self._failing = threading.Lock()

    def alone(self, to_the_end: bool) -> bool:
        """Begin on this thread, and go on as long as actions are short; True if there is nothing left to do."""
        plan, perform, timed = self.plan, self._perform, self._timed
        assert perform is not None
        if plan.worth.is_known and not to_the_end:
            return False
        clock = time.perf_counter
        action = None
        looking = Alone()
        try:
            start = clock()
            for action in plan.in_order:
                perform(action)
                end = clock()
                timed.append((action, start, end))
                if not to_the_end and looking.is_too_long(end - start):
                    break
                start = end
        except BaseException as error:
            self.fail(error, action)
            return True
        self._done = frozenset([action for action, _, _ in timed])
        return len(timed) == len(plan.in_order)

    def begin(self) -> PipelineRun:
        """Go on with the threads of all workers."""
        self._run = run = self.plan.run()
        return run

    def elsewhere(self, lane: int, state: ThreadState, profiled: Profiled | None) -> None:
        """A lane on a thread of its own, in the state of another. Raises nothing."""
        joined = profiled is not None and not _is_profiled() and profiled.join()
        _inside.workers = self._inside
        try:
            in_state(state, self.around, self.lane, lane)
        except BaseException as error:
            self.fail(error, None)
        finally:
            _inside.workers = ()
            if joined:
                Profiled.leave()

    def lane(self, lane: int) -> None:
        """The part of one worker, on this thread. Raises nothing."""
        run, actions, perform, timed, done = self._run, self.plan.actions, self._perform, self._timed, self._done
        assert run is not None
        assert perform is not None
        clock = time.perf_counter
        action = None
        try:
            node = run.next(lane)
            while node is not None:
                action = actions[node]
                if action not in done:
                    start = clock()
                    perform(action)
                    timed.append((action, start, clock()))
                action = None
                node = run.next(lane, node)
        except BaseException as error:
            self.fail(error, action)

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
        if self._run is not None:
            self._run.cancel()

    def outcome(self) -> list[Timed]:
        """After the end."""
        error, self._error, self._perform = self._error, None, None
        if error is None:
            seconds = time.perf_counter() - self._began
            if self._run is None:
                self.plan.worth.saw_alone(seconds)
            else:
                self.plan.worth.saw_together(seconds, [end - start for _, start, end in self._timed])
            return self._timed
        try:
            raise error
        finally:
            del error


def _place(action: Action | None) -> str:
    if action is None:
        return "between two micro-batches"
    return f"in {_PASSES[action.kind]} of stage {action.stage}, micro-batch {action.micro_batch}"


def _with_ranges(perform: Perform) -> Perform:
    """Every action as a range in the profile."""

    def perform_in_range(action: Action) -> None:
        with torch.autograd.profiler.record_function(f"pymoe.pipe: {action}"):
            perform(action)

    return perform_in_range
