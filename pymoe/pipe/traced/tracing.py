"""From any model to its stages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.traced.losses import LossWrapper
from pymoe.pipe.traced.model import TracedModel
from pymoe.pipe.traced.shared_state import Spec
from pymoe.pipe.traced.split_points import SplitPoint
from pymoe.pipe.traced.trace import SplitPolicy, Trace, why_one_stage

__all__ = ["trace_model"]


def trace_model(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None,
    split_spec: Mapping[str, SplitPoint] | None,
    split_policy: SplitPolicy | None,
    *,
    devices: Sequence[torch.device | str | int] | None,
    multi_use_param_spec: Spec,
    output_loss_value_spec: Any,
    dynamic_shapes: Any,
    opaque: Sequence[type[nn.Module] | str],
) -> TracedModel:
    """Capture a model and cut it into stages; :func:`pymoe.pipeline` documents the arguments and errors."""
    if split_spec and split_policy is not None:
        raise ValueError("pipeline: split_spec or split_policy, not both")
    if not isinstance(module, nn.Module):
        raise TypeError(f"pipeline: the model must be an nn.Module, got {type(module).__name__}")
    if not isinstance(mb_args, (tuple, list)):
        raise TypeError(f"pipeline: mb_args must be a tuple of arguments, got {type(mb_args).__name__}")
    if output_loss_value_spec is None and isinstance(module, LossWrapper):
        output_loss_value_spec = module.loss_spec
    options: dict[str, Any] = {"dynamic_shapes": dynamic_shapes}
    if opaque:
        options["opaque"] = opaque
    trace = Trace(split_spec, split_policy, options)
    staged = TracedModel(
        module,
        tuple(mb_args),
        dict(mb_kwargs or {}),
        trace,
        multi_use=multi_use_param_spec,
        loss_spec=output_loss_value_spec,
        devices=devices,
    )
    if len(staged.parts) == 1 and (why := why_one_stage(trace)) is not None:
        warnings.warn(f"pipeline: the model is one stage: {why}", stacklevel=stack_level())
    return staged
