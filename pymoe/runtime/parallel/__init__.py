"""Calls of autograd functions that run at the same time, in both passes."""

from pymoe.runtime.parallel.background import BackgroundFuture, run_in_background
from pymoe.runtime.parallel.map import map_with_parallel_backward
from pymoe.runtime.parallel.pool import get_parallel_workers, parallel_workers, set_parallel_workers
from pymoe.runtime.parallel.standalone import (
    EmulatedAutogradContext,
    IsolatedContext,
    run_isolated_backward,
    run_isolated_forward,
)

__all__ = [
    "BackgroundFuture",
    "EmulatedAutogradContext",
    "IsolatedContext",
    "get_parallel_workers",
    "map_with_parallel_backward",
    "parallel_workers",
    "run_in_background",
    "run_isolated_backward",
    "run_isolated_forward",
    "set_parallel_workers",
]
