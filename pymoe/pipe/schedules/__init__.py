"""Schedules of a pipeline as data: the actions of every worker in order. Functions build, validate and draw them.

>>> from pymoe.pipe.schedules import build, simulate, text
>>> print(text(simulate(build("1f1b", stages=2, micro_batches=3))))
worker 0  |F0F1    B0--F2B1--  B2--|
worker 1  |  F0B0--F1B1--F2B2--    |

A worker runs the actions of its stages, one at a time: forward (F), backward (B), or one of the two parts of a split
backward, which compute the gradients of inputs (I) and of weights (W). :func:`build` makes a :class:`Schedule` by name,
:func:`register` adds a name, :func:`validate` checks any schedule, :func:`simulate` computes a :class:`Record` of its
times, :func:`as_run` makes one from a real run, and :func:`text` and :func:`png` draw records. In a shell:

    python -m pymoe.pipe.schedules 1f1b zero-bubble --stages 4 --micro-batches 8
"""

from pymoe.pipe.schedules.record import Record, Span, Times, as_run, mean_times, png, simulate, text
from pymoe.pipe.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    build,
    gpipe,
    interleaved_one_forward_one_backward,
    live_counts,
    names,
    one_forward_one_backward,
    options,
    peak_live,
    register,
    run,
    validate,
    zero_bubble,
)

__all__ = [
    "Action",
    "Kind",
    "Record",
    "Schedule",
    "ScheduleError",
    "Span",
    "Times",
    "as_run",
    "build",
    "gpipe",
    "interleaved_one_forward_one_backward",
    "live_counts",
    "mean_times",
    "names",
    "one_forward_one_backward",
    "options",
    "peak_live",
    "png",
    "register",
    "run",
    "simulate",
    "text",
    "validate",
    "zero_bubble",
]
