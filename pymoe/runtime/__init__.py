"""Requests to experts, in batches: what an expert takes, its pools, and the runtime that serves them."""

from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.batch_tensor_proto import DUMMY_BATCH_SIZE, BatchTensorProto
from pymoe.runtime.client import ExpertClient
from pymoe.runtime.future import Future
from pymoe.runtime.gradients import NonFiniteGradientError
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack
from pymoe.runtime.runtime import Runtime, TesseractRuntime
from pymoe.runtime.task_pool import QueueFull, TaskPool
from pymoe.runtime.waiting import as_completed, wait

__all__ = [
    "DUMMY_BATCH_SIZE",
    "BatchTensorProto",
    "ExpertBackend",
    "ExpertClient",
    "Future",
    "NonFiniteGradientError",
    "QueueFull",
    "Runtime",
    "TaskPool",
    "TesseractRuntime",
    "as_completed",
    "nested_compare",
    "nested_flatten",
    "nested_map",
    "nested_pack",
    "wait",
]
