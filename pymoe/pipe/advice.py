"""Warnings of steps that cannot gain anything from a pipeline."""

from __future__ import annotations

import sys
import warnings

from torch import nn

from pymoe.pipe.module_hooks import CALL_HOOKS
from pymoe.pipe.schedules import Schedule

__all__ = ["warn_of_no_gain"]


def warn_of_no_gain(schedule: Schedule, rows_are_few: bool, model: nn.Module | None) -> None:
    """Warn with UserWarning at the line of the user's code that calls the step.

    Args:
        schedule: what is about to run.
        rows_are_few: there are fewer rows than micro-batches were asked for.
        model: whose own hooks a step does not call; None: a step calls them.
    """
    for message in (_no_overlap(schedule, rows_are_few), _no_hooks(model)):
        if message:
            warnings.warn(f"Pipe.step: {message}", UserWarning, stacklevel=_level_of_the_user())


def _level_of_the_user() -> int:
    """Return the ``stacklevel`` of the user's frame for the caller. torch's compiler adds frames of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("pymoe", "torch"):
        frame, level = frame.f_back, level + 1
    return level


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
