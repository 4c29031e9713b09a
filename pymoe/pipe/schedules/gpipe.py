"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from pymoe.pipe.schedules.registry import register
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule


@register("gpipe")
def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2018), arXiv
    1811.06965. One stage a worker; with p stages and m micro-batches the bubble is (p - 1) / (m + p - 1) of the time,
    and every worker holds all m activations.

    The paper's figure runs backwards from the last micro-batch to the first. Here, as in every schedule of this
    package, a stage runs them from the first to the last: the bubble is the same, and gradients are summed in the same
    order whatever the schedule.
    """
    orders = tuple(
        tuple(Action(stage, i, kind) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule("gpipe", micro_batches, tuple(range(stages)), orders, live_limits=(micro_batches,) * stages)
