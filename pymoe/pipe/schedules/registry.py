"""The names of schedules, in one place. To add one, write one function:

    @register("gpipe")
    def gpipe(stages: int, micro_batches: int) -> Schedule: ...

Keywords after ``stages`` and ``micro_batches`` are options of that schedule alone (``virtual_stages``, ``live_limit``).
A module in this package is imported in its ``__init__``; one of a user's own, wherever the user imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from pymoe.pipe.schedules.schedule import Schedule, ScheduleError
from pymoe.pipe.schedules.validate import validate

Builder = TypeVar("Builder", bound=Callable[..., Schedule])

_builders: dict[str, Callable[..., Schedule]] = {}

OTHER_NAMES = {
    "filldrain": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "schedulegpipe": "gpipe",
    "schedule1f1b": "1f1b",
    "scheduleinterleaved1f1b": "interleaved-1f1b",
}
"""What other packages, ``torch.distributed.pipelining`` among them, call the same schedules; in small letters."""
NOT_HERE = {"loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"}
"""Schedules of torch that have no equal here, in small letters."""


def register(name: str) -> Callable[[Builder], Builder]:
    """Decorates the function that builds the schedule ``name``. Raises ValueError if the name is taken."""

    def remember(builder: Builder) -> Builder:
        if name in _builders:
            raise ValueError(f"schedule {name!r} is registered already, by {_builders[name].__module__}")
        _builders[name] = builder
        return builder

    return remember


def names() -> tuple[str, ...]:
    """Return the names of all schedules, in the order of registration."""
    return tuple(_builders)


def options(name: str) -> tuple[str, ...]:
    """Return the keywords that the schedule ``name`` takes besides stages and micro-batches."""
    return tuple(inspect.signature(_builder(name)).parameters)[2:]


def build(name: str, stages: int, micro_batches: int, **chosen: int | None) -> Schedule:
    """Build the schedule ``name`` for so many stages and micro-batches, and validate it.

    Args:
        name: one of :func:`names`, or as torch spells it ("GPipe", "1F1B", "Interleaved1F1B").
        stages: of the model, 1 or more.
        micro_batches: of a mini-batch, 1 or more.
        chosen: options of the schedule, positive numbers; None stands for the default, whatever the schedule.

    Raises:
        ValueError: the name is not registered, a number is below 1, or the schedule has no such option.
        ScheduleError: (a ValueError) what was built cannot run.
    """
    builder = _builder(name)
    chosen = {option: value for option, value in chosen.items() if value is not None}
    for option in chosen:
        if option not in options(name):
            has = ", ".join(options(name)) or "no options"
            raise ValueError(f"schedule {name!r} has no {option}: it has {has}")
    for what, number in {"stages": stages, "micro_batches": micro_batches, **chosen}.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"schedule {name!r}: {what} must be a positive integer, got {number!r}")
    schedule = builder(stages, micro_batches, **chosen)
    if (schedule.stages, schedule.micro_batches) != (stages, micro_batches):
        asked = f"{stages} stages and {micro_batches} micro-batches"
        raise ScheduleError(f"schedule {name!r}: asked for {asked}, got {schedule.stages} and {schedule.micro_batches}")
    validate(schedule)
    return schedule


def _builder(name: str) -> Callable[..., Schedule]:
    small = name.lower()
    for known in (name, small, OTHER_NAMES.get(small)):
        if known in _builders:
            return _builders[known]
    why = ""
    if small.removeprefix("schedule") in NOT_HERE:
        why = (
            ", of which 'zero-bubble' and 'interleaved-1f1b' come nearest; torch's own schedules run the stages that "
            "Pipe.build_stage makes"
        )
    raise ValueError(f"no schedule {name!r}: there are {', '.join(names())}{why}")
