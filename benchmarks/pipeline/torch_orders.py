"""Converts the orders that torch's pipeline schedules plan into schedules that pymoe can simulate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pymoe.pipe.schedules import Action, Kind, Schedule, build, peak_live

SAME_AS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
"""Schedules with one stage per rank, and pymoe's schedules with the same order.

torch does not execute the order that it reports for these two, so pymoe's order is simulated instead.
"""
SEVERAL = {
    "ScheduleLoopedBFS": "loop",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}
"""Schedules with two stages per rank, which place the second half of the model on the ranks in the same order
("loop") or in reverse order ("v")."""
STAGES_PER_RANK = 2
KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": Kind.BACKWARD_WEIGHT,
}


def stages_of(name: str, ranks: int) -> int:
    """Return the number of stages that schedule ``name`` needs on ``ranks`` ranks."""
    return ranks if name in SAME_AS else STAGES_PER_RANK * ranks


def rank_of(name: str, ranks: int, stage: int) -> int:
    """Return the rank that runs stage ``stage``."""
    if SEVERAL.get(name) == "v" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def actions(order: Iterable[Any]) -> list[tuple[int, int, str]]:
    """Return (stage, micro-batch, kind) of one rank's computations in the order in which torch runs them.

    torch runs the parts of an overlapped action one after another.
    """
    found = []
    for action in order:
        if action is None:
            continue
        if action.computation_type.name == "OVERLAP_F_B":
            found += actions(action.sub_actions)
        elif action.computation_type.name in KINDS:
            found.append((action.stage_index, action.microbatch_index, action.computation_type.name))
    return found


def schedule(name: str, ranks: int, micro_batches: int, orders: list[list[tuple[int, int, str]]]) -> Schedule:
    """Return torch's plan for all ranks as a schedule of pymoe."""
    if name in SAME_AS:
        return build(SAME_AS[name], ranks, micro_batches)
    table = tuple(tuple(Action(stage, i, KINDS[kind]) for stage, i, kind in order) for order in orders)
    placement = tuple(rank_of(name, ranks, stage) for stage in range(stages_of(name, ranks)))
    return Schedule(name, micro_batches, placement, table, tuple(map(peak_live, table)))
