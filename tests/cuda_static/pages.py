"""The tables of predictions, and the page that shows them between its marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import products
from machine_code import ROOT

PAGE = ROOT / "docs" / "concepts" / "predicted_gpu_times.md"
BEFORE = ROOT / "benchmarks" / "gpu" / "predictions_before.json"
"""The predictions for the code before it was read, at commit d97e4c9, by the same compiler and the same model."""


def cell(value: Any) -> str:
    """Return a value as a table shows it."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def table(stored: dict[str, Any]) -> str:
    """Return the stored predictions as a table."""
    head = [
        "operator", "shape", "registers", "blocks an SM", "KiB in flight an SM", "epochs", "instructions an element",
        "bytes a sector", "H100, µs", "H200, µs", "limit", "goal, H200, µs",
    ]  # fmt: skip
    rows = [
        [
            name, one["shape"], one["registers"], one["blocks a multiprocessor"], one["KiB in flight"] or None,
            one["epochs a round"], f"{one['instructions an element']:g} ({one['element']})", one["bytes a sector"],
            one["us"]["H100"], one["us"]["H200"], one["limit"], one["goal us, H200"],
        ]
        for name, one in stored.items()
    ]  # fmt: skip
    return markdown(head, rows)


def changes(before: dict[str, Any], stored: dict[str, Any]) -> str:
    """Return a table of what the code was and what it is, an arrow between the two where they differ."""
    head = ["operator", "registers", "epochs", "instructions an element", "launches", "H200, µs", "goal, H200, µs"]

    def change(was: Any, now: Any) -> str:
        return cell(now) if was == now else f"{cell(was)} → {cell(now)}"

    rows = []
    for name, now in stored.items():
        was = before[name]
        keys = ("registers", "epochs a round", "instructions an element", "launches")
        figures = [change(was[key], now[key]) for key in keys]
        rows.append([name, *figures, change(was["us"]["H200"], now["us"]["H200"]), now["goal us, H200"]])
    return markdown(head, rows)


def tables(stored: dict[str, Any]) -> dict[str, str]:
    """Return every table of the page by the name in its marks."""
    return {
        "predictions": table(stored),
        "products": markdown(products.HEAD, products.rows()),
        "changes": changes(json.loads(BEFORE.read_text()), stored),
    }


def page_with(page: str, found: dict[str, str]) -> str:
    """Return the page with tables between their marks."""
    for name, text in found.items():
        begin, end = f"<!-- {name}: written by tests/cuda_static/check.py -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


def write(stored: dict[str, Any], page: Path = PAGE) -> None:
    """Write the tables into the page."""
    page.write_text(page_with(page.read_text(), tables(stored)))
