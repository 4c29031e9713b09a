"""The figures that pymoe is held to, each within one run."""

from __future__ import annotations

from typing import Any

SCHEDULE = "pymoe 1f1b"
SHARES = {2: 0.97, 4: 0.95}
"""Of the ideal speed-up, where stages sleep; by workers."""
MICRO_BATCHES = (8, 16)
COST = 60e-6
"""Seconds of the processor a stage and micro-batch, forward and backward together, beyond the sequential run."""
Record = dict[str, Any]


def judged(result: Record) -> list[Record]:
    """Each target with what the run found and whether it is met; None: not measured."""
    verdicts = []
    for workers, wanted in SHARES.items():
        for count in MICRO_BATCHES:
            found = looked_up(result["cells"], "sleep", workers, count, SCHEDULE).get("share")
            what = f"share of the ideal, {workers} sleeping workers, {count} micro-batches, 1f1b"
            verdicts.append(one(what, ">=", wanted, found))
    for record in result["bookkeeping"]:
        case = record["case"]
        stages = f"{case['workers']} {case['work']} stages, {case['micro_batches']} micro-batches"
        found = record["systems"].get(SCHEDULE, {}).get("cpu")
        what = f"processor time a stage and micro-batch, {stages}, 1f1b"
        verdicts.append(one(what, "<=", COST, found))
    verdicts.append(live(result))
    return verdicts


def one(what: str, relation: str, limit: float, found: Record | None) -> Record:
    """A verdict on a median."""
    met = None if found is None else found["median"] >= limit if relation == ">=" else found["median"] <= limit
    return {"what": what, "relation": relation, "limit": limit, "found": found, "met": met}


def live(result: Record) -> Record:
    """Whether pymoe's stages never held more micro-batches, by the tensors alive, than the simulator says."""
    found = [
        (system["live"], system["planned_live"])
        for record in result["cells"]
        for name, system in record["systems"].items()
        if name.startswith("pymoe ") and "planned_live" in system
    ]
    equal = sum(seen == planned for seen, planned in found)
    what = "runs whose peak of live micro-batches is the simulator's in every stage"
    counted = {"median": equal, "low": equal, "high": equal} if found else None
    return {
        "what": what,
        "relation": "=",
        "limit": len(found),
        "found": counted,
        "met": equal == len(found) if found else None,
    }


def looked_up(records: list[Record], work: str, workers: int, micro_batches: int, system: str) -> Record:
    """What was found of a system in a case; empty where that was not measured."""
    case = {"work": work, "workers": workers, "micro_batches": micro_batches}
    return next((record["systems"].get(system, {}) for record in records if record["case"] == case), {})
