"""Requests to experts, in batches: what an expert takes, its pools, and the runtime that serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.batch_tensor_proto import DUMMY_BATCH_SIZE, BatchTensorProto
from pymoe.runtime.client import ExpertClient
from pymoe.runtime.future import Future
from pymoe.runtime.gradients import NonFiniteGradientError
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack
from pymoe.runtime.parallel import (
    BackgroundFuture,
    IsolatedContext,
    get_parallel_workers,
    map_with_parallel_backward,
    parallel_workers,
    run_in_background,
    run_isolated_backward,
    run_isolated_forward,
    set_parallel_workers,
)
from pymoe.runtime.runtime import Runtime, TesseractRuntime
from pymoe.runtime.task_pool import QueueFull, TaskPool
from pymoe.runtime.waiting import as_completed, wait

if TYPE_CHECKING:
    from pymoe.runtime.mixture import BackendStats, MixtureOfExpertBackends, PassStats, TooFewAnswersError

__all__ = [
    "DUMMY_BATCH_SIZE",
    "BackendStats",
    "BackgroundFuture",
    "BatchTensorProto",
    "ExpertBackend",
    "ExpertClient",
    "Future",
    "IsolatedContext",
    "MixtureOfExpertBackends",
    "NonFiniteGradientError",
    "PassStats",
    "QueueFull",
    "Runtime",
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

_OF_THE_MIXTURE = {"BackendStats", "MixtureOfExpertBackends", "PassStats", "TooFewAnswersError"}


def __getattr__(name: str) -> Any:
    """The mixture is a layer above: it is imported when somebody asks for it."""
    if name in _OF_THE_MIXTURE:
        from pymoe.runtime import mixture

        return getattr(mixture, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
