"""Zero bubble (ZB-H1): 1F1B in which the gradients of weights wait for a gap."""

from __future__ import annotations

from pymoe.pipe.schedules.registry import register
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule


@register("zero-bubble")
def zero_bubble(stages: int, micro_batches: int, *, live_limit: int | None = None) -> Schedule:
    """ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (2023), arXiv 2401.10241, section 2.

    One stage a worker. Worker r starts as in 1F1B, and runs the backward of weights r micro-batches after the backward
    of inputs, so every worker holds at most min(m, p) activations (from forward to backward of weights), no more than
    the first of 1F1B.

    With forward, backward of inputs and backward of weights of the times F, I and W in every stage, and m >= p, the
    step takes m (F + I + W) + (p - 1) max(F, I, F + I - W). The paper's bubble, (p - 1)(F + I - W), leaves out a
    worker's waits before its first action (F) and after its last gradient (I). With equal times all
    workers end together, after a third of 1F1B's bubble. Then nothing is shorter, where the update waits for all
    stages: the last worker gets its first micro-batch after (p - 1) F and has all its work before it. That is why this
    is H1: ZB-H2 and the paper's automatic schedules gain where every stage updates by itself, and H2 holds 2p - 1
    activations.

    The first stage runs its backward whole: nothing waits for the gradients of its inputs. ``live_limit`` lowers the
    number of activations that any worker holds, at the price of time.
    """
    limit = min(micro_batches, stages, live_limit or stages)
    orders = []
    for stage in range(stages):
        warm_up = min(stages - stage, limit)
        delay = stage if limit == micro_batches else min(stage, limit - warm_up)
        order = [Action(stage, i, Kind.FORWARD) for i in range(warm_up)]
        for i in range(micro_batches):
            order.append(Action(stage, i, Kind.BACKWARD_INPUT if stage else Kind.BACKWARD))
            if stage and i >= delay:
                order.append(Action(stage, i - delay, Kind.BACKWARD_WEIGHT))
            if warm_up + i < micro_batches:
                order.append(Action(stage, warm_up + i, Kind.FORWARD))
        if stage:
            left = range(max(0, micro_batches - delay), micro_batches)
            order += [Action(stage, i, Kind.BACKWARD_WEIGHT) for i in left]
        orders.append(tuple(order))
    return Schedule("zero-bubble", micro_batches, tuple(range(stages)), tuple(orders), (limit,) * stages)
