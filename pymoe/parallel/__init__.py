"""Runs many calls of functions at the same time, in the forward and in the backward pass."""

import pymoe.autograd  # loads the native runtime  # noqa: F401
from pymoe.parallel.background import BackgroundFuture, run_in_background
from pymoe.parallel.isolated_call import (
    EmulatedAutogradContext,
    IsolatedContext,
    run_isolated_backward,
    run_isolated_forward,
)
from pymoe.parallel.map import map_with_parallel_backward
from pymoe.parallel.workers import get_parallel_workers, parallel_workers, set_parallel_workers

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
