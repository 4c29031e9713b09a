"""The figures that the map is held to, each within one run."""

from __future__ import annotations

from typing import Any

from benchmarks.parallel.calls import PYMOE

PASSES = ("forward", "backward")
AT_ONCE = 1.1
"""Times one call's time, for 8 calls that sleep."""
TINY = 50e-6
"""Seconds that the map adds to a call that does nothing, in a pass."""


def judged(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with what the run found (medians over rounds) and whether it is met; None: not measured."""
    wanted = [("ratios", "sleep", 8, one, AT_ONCE) for one in PASSES]
    counts = [count for count in (8, 16) if count == 8 or not result["settings"]["quick"]]
    wanted += [("overheads", "tiny", count, one, TINY) for count in counts for one in PASSES]
    verdicts = []
    for table, kind, calls, one, limit in wanted:
        found = next(
            (
                record[one]
                for record in result[table]
                if (record["kind"], record["calls"], record["system"]) == (kind, calls, PYMOE)
            ),
            None,
        )
        verdicts.append(
            {
                "of": table,
                "kind": kind,
                "calls": calls,
                "pass": one,
                "limit": limit,
                "found": found,
                "met": None if found is None else found["median"] <= limit,
            }
        )
    return verdicts
