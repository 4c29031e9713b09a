"""The figures that pymoe's runtime is held to: ratios of requests per second within one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.runtime.scenario import Cell
from benchmarks.runtime.systems import BATCHER, DIRECT, HIVEMIND, PYMOE, READY


@dataclass(frozen=True)
class Target:
    """pymoe's rate in a cell, as a multiple of another's there."""

    cell: Cell
    over: str
    ratio: float


MANY = Cell("small", "forward", 1, 64, "threads")
MANY_BACKWARD = Cell("small", "backward", 1, 64, "threads")
TARGETS = (
    Target(MANY, HIVEMIND, 100),
    Target(MANY, BATCHER, 3),
    Target(Cell("small", "forward", 1, 1, "threads"), DIRECT, 0.5),
    Target(Cell("big", "forward", 1, 8, "threads"), READY, 0.9),
    Target(MANY_BACKWARD, HIVEMIND, 60),
    Target(MANY_BACKWARD, BATCHER, 3),
)


def judged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target with the ratio that the run found (median over rounds), and whether it is met; None: not measured."""
    found = {Cell(**record["cell"]): record["systems"].get(PYMOE, {}).get("over", {}) for record in records}
    verdicts = []
    for target in TARGETS:
        ratio = found.get(target.cell, {}).get(target.over)
        verdicts.append(
            {
                "cell": str(target.cell),
                "over": target.over,
                "wanted": target.ratio,
                "found": ratio,
                "met": None if ratio is None else ratio["median"] >= target.ratio,
            }
        )
    return verdicts
