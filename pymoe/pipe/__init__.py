"""Pipelines: a model cut into stages, and micro-batches that travel through them."""

import pymoe.autograd  # loads the native runtime  # noqa: F401
from pymoe.pipe import balance, schedules, skip
from pymoe.pipe.capture import CaptureError
from pymoe.pipe.context import MicroBatch, is_checkpointing, is_recomputing, micro_batch
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm, convert_deferred_batch_norm
from pymoe.pipe.loss import LossWrapper, TrivialLossWrapper
from pymoe.pipe.pipe import Pipe, pipeline
from pymoe.pipe.stages import INPUT, Source, Whole
from pymoe.pipe.traced.partition import MultiUseParameterConfig, MultiUseParamSpec
from pymoe.pipe.traced.policies import split_by_flops, split_by_time, split_into_equal_parameters
from pymoe.pipe.traced.split_points import (
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    annotate_split_points,
    aten_pipe_split_alias,
    mark_boundary,
    pipe_split,
)

__all__ = [
    "INPUT",
    "CaptureError",
    "DeferredBatchNorm",
    "LossWrapper",
    "MicroBatch",
    "MultiUseParamSpec",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "PipeSplitWrapper",
    "Source",
    "SplitPoint",
    "TrivialLossWrapper",
    "Whole",
    "annotate_split_points",
    "aten_pipe_split_alias",
    "balance",
    "convert_deferred_batch_norm",
    "is_checkpointing",
    "is_recomputing",
    "mark_boundary",
    "micro_batch",
    "pipe_split",
    "pipeline",
    "schedules",
    "skip",
    "split_by_flops",
    "split_by_time",
    "split_into_equal_parameters",
]
