"""Makes a pipeline end in a loss instead of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from pymoe.pipe.stages import INPUT, Pipeline, Source

LossFunction = Callable[..., torch.Tensor]
Structure = Callable[[Sequence[Any]], Any]
PLAIN = (type(None), bool, int, float, str)


def with_loss(
    pipeline: Pipeline,
    loss_fn: LossFunction | None,
    has_target: bool,
    structure: Structure,
) -> Pipeline:
    """Return the pipeline with the loss in its last stage as its only output.

    Args:
        pipeline: a pipeline with outputs.
        loss_fn: called with the model's output and, if there is one, the target. None: the output is the loss.
        has_target: the new pipeline takes one more input, the target.
        structure: makes the model's output of the pipeline's output values.
    """
    last = len(pipeline.stages) - 1
    stage = pipeline.stages[last]
    target = (Source(INPUT, pipeline.inputs),) * has_target
    elsewhere = tuple(dict.fromkeys(source for source in pipeline.outputs if source.stage != last))
    own = len(stage.inputs)
    first_target = own + len(elsewhere)
    # Where the outputs are: among what comes from elsewhere, and after it what this stage makes.
    places = [
        elsewhere.index(source) if source in elsewhere else len(elsewhere) + source.number
        for source in pipeline.outputs
    ]

    def function(*values: Any) -> Sequence[Any]:
        there = (*values[own:first_target], *stage.function(*values[:own]))
        output = structure([there[place] for place in places])
        loss = output if loss_fn is None else loss_fn(output, *values[first_target:])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            if loss_fn is None:
                raise ValueError(
                    "Pipe.step: without a loss_fn the model's own output is minimised, so it must be a tensor with one "
                    f"element, got {what}: give step a loss_fn (and a target), or let the model return its loss"
                )
            raise ValueError(f"Pipe.step: loss_fn must return a tensor with one element, got {what}")
        return [loss]

    ending = replace(stage, function=function, inputs=(*stage.inputs, *elsewhere, *target), outputs=1)
    return Pipeline((*pipeline.stages[:last], ending), pipeline.inputs + has_target, (Source(last, 0),))


def holds_no_tensors(loss_fn: LossFunction | None) -> bool:
    """Return whether keeping the function keeps no tensors of a step, as a closure over the targets would."""
    if isinstance(loss_fn, FunctionType):
        defaults = (*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values())
        return not (loss_fn.__closure__ or loss_fn.__dict__) and all([isinstance(value, PLAIN) for value in defaults])
    return loss_fn is None or isinstance(loss_fn, (nn.Module, BuiltinFunctionType))
