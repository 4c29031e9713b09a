"""Serves experts: pools collect requests of many clients, and a runtime runs them in batches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pymoe.autograd  # loads the native runtime  # noqa: F401
from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.batch_tensor_proto import DUMMY_BATCH_SIZE, BatchTensorProto
from pymoe.runtime.client import ExpertClient
from pymoe.runtime.future import Future, as_completed, wait
from pymoe.runtime.gradients import NonFiniteGradientError
from pymoe.runtime.monitoring.statistics import PoolStats, StatsReader
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack
from pymoe.runtime.protocols import Backend
from pymoe.runtime.runtime import Runtime, TesseractRuntime
from pymoe.runtime.task_pool import QueueFull, TaskPool

if TYPE_CHECKING:
    from pymoe.mixture import BackendStats, MixtureOfExpertBackends, PassStats, TooFewAnswersError
    from pymoe.parallel import (
        BackgroundFuture,
        EmulatedAutogradContext,
        IsolatedContext,
        get_parallel_workers,
        map_with_parallel_backward,
        parallel_workers,
        run_in_background,
        run_isolated_backward,
        run_isolated_forward,
        set_parallel_workers,
    )

__all__ = [
    "DUMMY_BATCH_SIZE",
    "Backend",
    "BackendStats",
    "BackgroundFuture",
    "BatchTensorProto",
    "EmulatedAutogradContext",
    "ExpertBackend",
    "ExpertClient",
    "Future",
    "IsolatedContext",
    "MixtureOfExpertBackends",
    "NonFiniteGradientError",
    "PassStats",
    "PoolStats",
    "QueueFull",
    "Runtime",
    "StatsReader",
    "TaskPool",
    "TesseractRuntime",
    "TooFewAnswersError",
    "as_completed",
    "get_parallel_workers",
    "map_with_parallel_backward",
    "nested_compare",
    "nested_flatten",
    "nested_map",
    "nested_pack",
    "parallel_workers",
    "run_in_background",
    "run_isolated_backward",
    "run_isolated_forward",
    "set_parallel_workers",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Import names of pymoe.parallel and pymoe.mixture on demand, so that programs may import them from here, too."""
    if name in __all__:
        homes = (importlib.import_module(package) for package in ("pymoe.parallel", "pymoe.mixture"))
        for home in homes:
            if hasattr(home, name):
                value = globals()[name] = getattr(home, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
