"""The threads of a pipe."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Sequence
from typing import Any

from pymoe._runtime import Future, Profiled, WorkerPool
from pymoe._torch_private import profiler_enabled
from pymoe.autograd.fork import renew_engine
from pymoe.autograd.thread_state import ThreadState, current, in_state
from pymoe.pipe.execution.step_state import PlanRun


class _Inside(threading.local):
    workers: tuple[Workers, ...] = ()  # those whose runs this thread is in


inside = _Inside()


class Workers:
    """A persistent thread for every worker but the first, whose actions the calling thread performs.

    They run in the state of the thread that asks: grad mode, autocast, context variables, profiler and so on. Threads
    start when they are first needed and end with this object. In the child of a fork there are none, and new ones
    start. A copy has threads of its own.
    """

    def __init__(self) -> None:
        self._pools: list[WorkerPool] = []
        self._process = os.getpid()
        self.lock = threading.Lock()  # held by whoever runs a plan

    def __reduce__(self) -> Any:
        return Workers, ()

    def prepare(self) -> None:
        """Prepare for a run that the calling thread is about to begin; it must hold :attr:`lock` meanwhile.

        Raises:
            RuntimeError: an action of a run has asked for another.
        """
        if self in inside.workers:
            raise RuntimeError(
                "a stage of a pipe cannot run the pipe itself (torch.utils.checkpoint around a pipe has it run again "
                "in its backward pass: use Pipe(..., checkpoint=...) instead)"
            )
        if self._process != os.getpid():
            self._pools, self._process, self.lock = [], os.getpid(), threading.Lock()

    def run(self, run: PlanRun, workers: int) -> None:
        """Perform what is left of a run: worker 0 on this thread, the others on theirs, in this thread's state.

        Errors are kept by the run. When one comes, actions that have not started are left out, and those that run are
        waited for; so it is with Ctrl-C, but a second one does not wait.
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
            # Workers raise nothing: this is Ctrl-C between two of their lines, or no thread could start. First the
            # other workers must not wait for this one, and no second Ctrl-C can come before that: it is a native call.
            stop()
            # It may have come before a worker that had been started was noted. Every pool has one thread, so what is
            # submitted now ends after that worker.
            _wait_for([pool.submit(int) for pool in self._pools[: workers - 1]])
            raise


def _run_worker(
    run: PlanRun, worker: int, state: ThreadState, around: tuple[Workers, ...], profiled: Profiled | None
) -> None:
    """A worker on a thread of its own, in the state of the calling one. Raises nothing."""
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
