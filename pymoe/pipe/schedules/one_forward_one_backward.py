"""1F1B: after a few forwards, one backward and one forward in turn."""

from __future__ import annotations

from pymoe.pipe.schedules.registry import register
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule


@register("1f1b")
def one_forward_one_backward(stages: int, micro_batches: int, *, live_limit: int | None = None) -> Schedule:
    """Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush, 2021), arXiv 2006.09503;
    the alternation is that of PipeDream (2019), arXiv 1806.03377, with a flush at the end of the step.

    One stage a worker. The bubble is GPipe's, (p - 1) / (m + p - 1) of the time for p stages and m micro-batches, and
    worker r holds min(m, p - r) activations instead of m. ``live_limit`` lowers that further, at the price of time: no
    worker holds more than so many.
    """
    limits = tuple(min(micro_batches, stages - stage, live_limit or stages) for stage in range(stages))
    orders = []
    for stage, warm_up in enumerate(limits):
        order = [Action(stage, i, Kind.FORWARD) for i in range(warm_up)]
        for i in range(micro_batches):
            order.append(Action(stage, i, Kind.BACKWARD))
            if warm_up + i < micro_batches:
                order.append(Action(stage, warm_up + i, Kind.FORWARD))
        orders.append(tuple(order))
    return Schedule("1f1b", micro_batches, tuple(range(stages)), tuple(orders), limits)
