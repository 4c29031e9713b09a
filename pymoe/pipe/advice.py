"""Warns of steps that cannot gain from a pipeline, and of results that are not those of the whole mini-batch."""

from __future__ import annotations

import warnings

from torch import nn

from pymoe._torch_private import BatchNormBase
from pymoe.pipe.auxiliary import has_capacity
from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.schedules import Schedule
from pymoe.pipe.stages import CALL_HOOKS


def warn_of_micro_batches(model: nn.Module) -> None:
    """Give a UserWarning, at the line of the user's code, for the first layer that mixes the rows of a call and has no
    other rows than those of a micro-batch.
    """
    for name, layer in model.named_modules():
        # A DeferredBatchNorm was asked for.
        if isinstance(layer, BatchNormBase) and not isinstance(layer, DeferredBatchNorm) and _normalises(layer):
            how = (
                "normalises each micro-batch by itself",
                "take LayerNorm or GroupNorm; pymoe.pipe.convert_deferred_batch_norm(model) mends the running "
                "statistics alone",
            )
        elif has_capacity(layer):
            how = "may drop tokens past the capacity of each micro-batch", "take capacity_factor=None"
        else:
            continue
        does, remedy = how
        warnings.warn(
            f"Pipe: {type(layer).__name__} {name!r} {does}, so outputs and gradients may not be those of the "
            f"whole mini-batch: {remedy}",
            UserWarning,
            stacklevel=stack_level(),
        )
        return


def _normalises(layer: BatchNormBase) -> bool:
    """Return whether a batch norm takes the statistics of the rows that it gets, and not the running ones."""
    return layer.training or layer.running_mean is None


def warn_of_no_gain(schedule: Schedule, rows_are_few: bool, model: nn.Module | None) -> None:
    """Give a UserWarning, at the line of the user's code that calls the step, if no stages can run at the same time, or
    if the step does not call the model's own hooks.

    Args:
        schedule: the schedule that is about to run.
        rows_are_few: whether there are fewer rows than the requested micro-batches.
        model: the model, whose own hooks a step does not call; None: a step calls them.
    """
    stages, messages = schedule.stages, []
    if stages == 1:
        messages.append(
            "the pipe has one stage, so nothing runs at the same time: cut the model into more, by balance=[...] with "
            "the number of layers of each stage, or by more split points"
        )
    elif schedule.workers == 1:
        messages.append(
            f"the schedule {schedule.name!r} has one worker run all {stages} stages, so nothing runs at the same time: "
            "cut the model into more stages than a worker has, or take schedule='1f1b'"
        )
    elif schedule.micro_batches == 1:
        chunks = f"give the pipe, or the step, chunks={4 * stages}, say: several for each stage"
        remedy = "give it more rows" if rows_are_few else chunks
        messages.append(f"there is one micro-batch, so {stages} stages wait for each other: {remedy}")
    if model is not None and any(model.__dict__[kind] for kind in CALL_HOOKS):
        messages.append(
            "hooks of the model itself are not called, as they see whole mini-batches and a step has micro-batches "
            "alone: register them on its layers, or call the pipe, pipe(x)"
        )
    for message in messages:
        warnings.warn(f"Pipe.step: {message}", UserWarning, stacklevel=stack_level())
