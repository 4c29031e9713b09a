"""Comparison of two runs: lines that became faster or slower by more than noise and the machine's own drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymoe.bench.report import Table, seconds

SMALLEST_CHANGE = 0.03
"""Smallest relative change that is marked: even quiet runs can differ by more than their quartiles."""


@dataclass(frozen=True)
class Change:
    """The change of one line between two runs."""

    name: str
    old: float
    """Median of the old run in seconds."""
    new: float
    """Median of the new run in seconds."""
    machine: float
    """Ratio of the floor's time in the new run to that in the old run; 1 unless both have the same kind of floor."""
    marker: str
    """``"slower"``, ``"faster"`` or ``""``; ``"now WRONG"`` if only the new result is wrong."""

    @property
    def ratio(self) -> float:
        """Return the ratio of the new time to the old time."""
        return self.new / self.old


def compare(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[Change], list[str]]:
    """Compare two results of ``run --json``.

    A line is marked if its time changed by more than :data:`SMALLEST_CHANGE`, and so much that the quartile ranges of
    the two runs no longer overlap. If both runs have the same kind of floor for the line, its times are first divided
    by the time of the floor in the same run. A line is also marked if only its new result is wrong.

    Returns:
        The changes of the lines that both runs timed, and the names of the other lines, followed by ``(now ERROR)`` if
        only the new run failed to compute the line.
    """
    before, after = by_name(old["lines"]), by_name(new["lines"])
    changes = [change(name, before[name], after[name]) for name in after if name in before]
    usable = [one for one in changes if one is not None]
    only = [name for name in (*before, *after) if (name in before) != (name in after)]
    timed = {one.name for one in usable}
    for name in after:
        if name in before and name not in timed:
            failed = before[name]["native"] and after[name]["correctness"]["verdict"] == "ERROR"
            only.append(f"{name} (now ERROR)" if failed else name)
    return usable, only


def by_name(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the records in a dictionary by the names of their lines."""
    return {" ".join(record[key] for key in ("operator", "case", "dtype", "direction")): record for record in records}


def change(name: str, old: dict[str, Any], new: dict[str, Any]) -> Change | None:
    """Return the change of one line; None unless both runs have a time for it."""
    if not old["native"] or not new["native"]:
        return None
    same_floor = old["floor"] and new["floor"] and old["floor"]["kind"] == new["floor"]["kind"]
    machine = new["floor"]["median"] / old["floor"]["median"] if same_floor else 1.0
    was, now = relative(old, bool(same_floor)), relative(new, bool(same_floor))
    marker = ""
    if now[0] > was[2] and now[1] > was[1] * (1 + SMALLEST_CHANGE):
        marker = "slower"
    elif now[2] < was[0] and now[1] < was[1] / (1 + SMALLEST_CHANGE):
        marker = "faster"
    if new["correctness"]["verdict"] == "WRONG" and old["correctness"]["verdict"] != "WRONG":
        marker = "now WRONG"
    return Change(name, old["native"]["median"], new["native"]["median"], machine, marker)


def relative(record: dict[str, Any], to_floor: bool) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of a line's time.

    They are in seconds or, with ``to_floor``, in units of the median time of the line's floor.
    """
    unit = record["floor"]["median"] if to_floor else 1.0
    native = record["native"]
    return native["low"] / unit, native["median"] / unit, native["high"] / unit


def change_table(changes: Sequence[Change]) -> Table:
    """Return a table with one row per line. Its column ``machine`` shows the change of the floor's time."""
    rows = [
        [one.name, seconds(one.old), seconds(one.new), f"{one.ratio:.2f}x", f"{one.machine:.2f}x", one.marker]
        for one in changes
    ]
    heading = ["line", "old", "new", "new/old", "machine", "outside spread"]
    return Table(heading, rows, frozenset({"line", "outside spread"}), frozenset({"slower", "now "}))
