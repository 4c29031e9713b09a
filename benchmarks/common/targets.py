"""Targets: figures that pymoe must reach within one run, and whether the run reached them."""

from __future__ import annotations

from typing import Any

from benchmarks.common.run import spread_of
from pymoe.bench.report import Table

Record = dict[str, Any]
WORDS = {True: "met", False: "missed", None: "not measured"}
FORMS = {"": ("{:.3g}", 1.0), "%": ("{:.1f} %", 100.0), "us": ("{:.1f} us", 1e6)}
"""For each unit, the format in which figures are shown and the factor by which they are multiplied."""


def checked_target(what: str, relation: str, limit: float, found: Record | None, unit: str = "") -> Record:
    """Return a target: the median of ``found`` must satisfy ``relation`` (``">="`` or ``"<="``) with ``limit``.

    ``met`` says whether it does; None where the figure was not measured.
    """
    met = None if found is None else found["median"] >= limit if relation == ">=" else found["median"] <= limit
    return {"what": what, "relation": relation, "limit": limit, "unit": unit, "found": found, "met": met}


def targets_table(targets: list[Record]) -> Table:
    """Return a table with a row for every target."""
    rows = []
    for one in targets:
        form, scale = FORMS[one["unit"]]
        limit = f"{one['relation']} {one['limit'] * scale:g} {one['unit']}".rstrip()
        found = "-" if one["found"] is None else spread_of(one["found"], form, scale)
        rows.append([one["what"], limit, found, WORDS[one["met"]]])
    return Table(["what", "wanted", "found", ""], rows, frozenset({"what", ""}), frozenset({"missed"}))
