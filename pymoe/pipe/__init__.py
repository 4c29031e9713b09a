"""Pipelines: a model cut into stages, and micro-batches that travel through them."""

from pymoe.pipe import balance, schedules, skip
from pymoe.pipe.context import MicroBatch, is_checkpointing, is_recomputing, micro_batch
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm, convert_deferred_batch_norm
from pymoe.pipe.micro_batches import Whole
from pymoe.pipe.pipe import Pipe

__all__ = [
    "DeferredBatchNorm",
    "MicroBatch",
    "Pipe",
    "Whole",
    "balance",
    "convert_deferred_batch_norm",
    "is_checkpointing",
    "is_recomputing",
    "micro_batch",
    "schedules",
    "skip",
]
