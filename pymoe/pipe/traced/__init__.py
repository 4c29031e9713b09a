"""Captured models, split into the stages of a pipeline."""

from pymoe.pipe.traced.losses import LossWrapper, TrivialLossWrapper
from pymoe.pipe.traced.policies import split_by_flops, split_by_time, split_into_equal_parameters
from pymoe.pipe.traced.shared_state import MultiUseParameterConfig
from pymoe.pipe.traced.split_points import (
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    annotate_split_points,
    mark_boundary,
    pipe_split,
)

__all__ = [
    "LossWrapper",
    "MultiUseParameterConfig",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "mark_boundary",
    "pipe_split",
    "split_by_flops",
    "split_by_time",
    "split_into_equal_parameters",
]
