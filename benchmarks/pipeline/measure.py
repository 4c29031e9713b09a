"""Times steps of all systems in interleaved rounds.

Reports speed-ups over the sequential run, and the overhead per stage and micro-batch.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.comparison import from_turn, verdict
from benchmarks.pipeline.systems import SEQUENTIAL, Check, Running, System
from benchmarks.pipeline.work import TOLERANCE, Case
from pymoe.bench.timing import Quartiles
from pymoe.pipe.schedules import mean_times, simulate

Record = dict[str, Any]
Sample = tuple[float, float]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Contender:
    """A system in one cell: what it reports about itself, and its samples."""

    system: System
    running: Running | None = None
    check: Check | None = None
    failure: str = ""
    samples: list[Sample] | None = None
    own: list[float] | None = None
    """For each step, the simulated time of the plan with the step's mean action times, divided by the step's time."""
    baseline: list[Sample] | None = None
    """A sequential run for each sample, if the system does not run in this process."""

    def attempt(self, function: Callable[[], Any]) -> Any:
        """Return the function's result; if it fails, return None and exclude this contender from now on."""
        try:
            return function()
        except Exception as error:  # a peer that fails must not stop the measurement of the others
            text = re.sub(r"\[/\S+\] ", "", str(error))  # strips the path of a library's sources
            self.failure = f"{type(error).__name__}: {text}".split("\n")[0][:200]
            return None


def cell(case: Case, systems: Sequence[System], rounds: int) -> Record:
    """Measure one case: correctness first, then times in interleaved rounds. The first system is the sequential run."""
    contenders = [Contender(system, samples=[], own=[]) for system in systems]
    for one in contenders:
        one.running = one.attempt(lambda one=one: one.system.open(case))
        if one.running is not None:
            one.check = one.attempt(one.running.check)
    take_turns([one for one in contenders if not one.failure], rounds)
    reference = contenders[0].samples or []
    found = {one.system.name: record_of(case, one, reference) for one in contenders}
    for one in contenders:
        if one.running is not None and not one.failure:
            one.attempt(one.running.close)
    return {"case": asdict(case), "about": case.about, "systems": found}


def take_turns(contenders: list[Contender], rounds: int) -> None:
    """Have each contender take one step per round; every round begins with a different one."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for one in from_turn(contenders, turn):
                if one.failure:
                    continue
                assert one.running is not None
                assert one.samples is not None
                plain = getattr(one.running, "plain", None)
                if plain is not None and one.baseline is not None:
                    sample = one.attempt(plain)
                    if sample is None:
                        continue
                    one.baseline.append(sample)
                sample = one.attempt(one.running.step)
                if sample is not None:
                    one.samples.append(sample)
                    note_own_share(one, sample)
            gc.collect()
    finally:
        if collecting:
            gc.enable()


def note_own_share(one: Contender, sample: Sample) -> None:
    """Append the last step's value to ``one.own``, if the system reports its actions."""
    record, plan = getattr(one.running, "record", None), getattr(one.running, "planned", None)
    if one.own is not None and record is not None and plan is not None:
        one.own.append(simulate(plan, mean_times(record())).makespan / sample[0])


def record_of(case: Case, one: Contender, reference: list[Sample]) -> Record:
    """Return the results of a contender; ratios are computed for each round."""
    record: Record = {"failure": one.failure}
    if one.check is not None:
        record |= {"verdict": verdict(one.check.error, TOLERANCE), "error": one.check.error, "live": one.check.live}
    if one.failure or not one.samples:
        return record
    assert one.running is not None
    record["seconds"] = asdict(Quartiles.of([wall for wall, _ in one.samples]))
    pairs = list(zip(reference, one.samples, strict=True))
    speed_ups = [theirs[0] / mine[0] for theirs, mine in pairs]
    record["speed_up"] = asdict(Quartiles.of(speed_ups))
    if one.running.planned is not None:
        plan = simulate(one.running.planned, case.times(one.running.planned.stages))
        ideal = plan.speed_up
        actions = one.running.planned.stages * case.micro_batches
        costs = [(mine[1] - theirs[1]) / actions for theirs, mine in pairs]
        reachable = ideal if case.work == "sleep" else min(ideal, CORES)
        record |= {
            "stages": one.running.planned.stages,
            "ideal": ideal,
            "reachable": reachable,
            "share": asdict(Quartiles.of([speed_up / reachable for speed_up in speed_ups])),
            "own_share": asdict(Quartiles.of(one.own)) if one.own else None,
            "cpu": asdict(Quartiles.of(costs)),
            "planned_live": list(plan.peak_live_of_stages),
        }
    return record


def bookkeeping(case: Case, systems: Mapping[str, tuple[System, int]], rounds: int) -> Record:
    """Return the time of a step minus the time of the sequential run, per stage and micro-batch.

    ``systems`` maps names to systems and their numbers of stages.
    """
    contenders = [Contender(system, samples=[], baseline=[]) for system, _ in systems.values()]
    for one in contenders:
        one.running = one.attempt(lambda one=one: one.system.open(case))
        if one.running is not None:
            one.check = one.attempt(one.running.check)
    take_turns([one for one in contenders if not one.failure], rounds)
    found: Record = {}
    for one, (_, stages) in zip(contenders, systems.values(), strict=True):
        record: Record = {"failure": one.failure, "stages": stages}
        if one.check is not None:
            record |= {"verdict": verdict(one.check.error, TOLERANCE), "error": one.check.error}
        if not one.failure and one.samples:
            beside = one.baseline or contenders[0].samples or []
            actions = stages * case.micro_batches
            for i, what in enumerate(("wall", "cpu")):
                differences = [
                    (mine[i] - theirs[i]) / actions for mine, theirs in zip(one.samples, beside, strict=True)
                ]
                record[what] = asdict(Quartiles.of(differences))
                record[f"step_{what}"] = asdict(Quartiles.of([mine[i] for mine in one.samples]))
        found[one.system.name] = record
        if one.running is not None and not one.failure:
            one.attempt(one.running.close)
    return {"case": asdict(case), "about": case.about, "systems": found}


def wrong(result: Record) -> list[str]:
    """Return the systems that gave wrong gradients, with their cases."""
    return [
        f"{name}: {Case(**record['case'])}"
        for part in ("cells", "bookkeeping")
        for record in result[part]
        for name, one in record["systems"].items()
        if one.get("verdict") == "WRONG"
    ]


__all__ = ["CORES", "SEQUENTIAL", "bookkeeping", "cell", "wrong"]
