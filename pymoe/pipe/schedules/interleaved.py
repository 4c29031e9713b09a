"""Interleaved 1F1B: several stages a worker, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from itertools import pairwise

from pymoe.pipe.schedules.registry import register
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule, peak_live


@register("interleaved-1f1b")
def interleaved_one_forward_one_backward(stages: int, micro_batches: int, *, virtual_stages: int = 2) -> Schedule:
    """Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), arXiv
    2104.04473, section 2.2.

    ``virtual_stages`` v stages a worker, stage s on worker s mod p, p = ceil(stages / v) workers. Compared with 1F1B of
    the same model cut into p stages, the time lost is divided by v: with m a multiple of p the bubble is
    (p - 1) / (v m + p - 1). Worker r holds up to 2(p - r - 1) + (v - 1) p + 1 activations of a stage 1/v of the size.

    Micro-batches go in groups, each through all stages of a worker before the next. The paper wants groups of p, and m
    a multiple; here the groups of any m differ in size by at most one, none smaller than p unless m is. Where stages
    are not a multiple of v, the last workers have one fewer.
    """
    workers = -(-stages // virtual_stages)
    rounds = max(1, micro_batches // workers)
    bounds = [micro_batches * i // rounds for i in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(bounds)]
    largest = max(map(len, groups))
    total = micro_batches * virtual_stages
    orders = []
    for worker in range(workers):
        chunks = range(worker, workers * virtual_stages, workers)
        forwards = [Action(s, i, Kind.FORWARD) for group in groups for s in chunks for i in group]
        backwards = [Action(s, i, Kind.BACKWARD) for group in groups for s in reversed(chunks) for i in group]
        warm_up = min(total, 2 * (workers - 1 - worker) + (virtual_stages - 1) * largest + 1)
        order = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + i : warm_up + i + 1]]
        # A model that lacks the last stages runs the same order without them: less to wait for, never more.
        orders.append(tuple(action for action in order if action.stage < stages))
    placement = tuple(stage % workers for stage in range(stages))
    limits = tuple(map(peak_live, orders))
    return Schedule("interleaved-1f1b", micro_batches, placement, tuple(orders), limits)
