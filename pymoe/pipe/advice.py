"""Warnings of steps that cannot gain anything from a pipeline."""

from __future__ import annotations

import warnings

from torch import nn

from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.module_hooks import CALL_HOOKS
from pymoe.pipe.schedules import Schedule


def warn_of_no_gain(schedule: Schedule, rows_are_few: bool, model: nn.Module | None) -> None:
    """Warn with UserWarning at the line of the user's code that calls the step.

    Args:
        schedule: what is about to run.
        rows_are_few: there are fewer rows than micro-batches were asked for.
        model: whose own hooks a step does not call; None: a step calls them.
    """
    for message in (_no_overlap(schedule, rows_are_few), _no_hooks(model)):
        if message:
            warnings.warn(f"Pipe.step: {message}", UserWarning, stacklevel=stack_level())


def _no_overlap(schedule: Schedule, rows_are_few: bool) -> str | None:
    stages = schedule.stages
    if stages == 1:
        return (
            "the pipe has one stage, so nothing runs at the same time: cut the model into more, by balance=[...] with "
            "the number of layers of each stage, or by more split points"
        )
    if schedule.workers == 1:
        return (
            f"the schedule {schedule.name!r} has one worker run all {stages} stages, so nothing runs at the same time: "
            "cut the model into more stages than a worker has, or take schedule='1f1b'"
        )
    if schedule.micro_batches == 1:
        return (
            f"there is one micro-batch, so {stages} stages wait for each other: "
            + ("give it more rows" if rows_are_few else "give the pipe, or the step, chunks=")
            + ("" if rows_are_few else f"{4 * stages}, say: several for each stage")
        )
    return None


def _no_hooks(model: nn.Module | None) -> str | None:
    if model is None or not any(model.__dict__[kind] for kind in CALL_HOOKS):
        return None
    return (
        "hooks of the model itself are not called, as they see whole mini-batches and a step has micro-batches alone: "
        "register them on its layers, or call the pipe, pipe(x)"
    )
