"""Prints records as tables, with rich if it is installed and otherwise as plain text, and writes them as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]

EXPLANATION = """\
native     median time of one call, in brackets the quartiles over interleaved rounds
/reference speed-up over the pure PyTorch reference;  /torch: over plain torch as one would write it
of floor   rate as a share of copy_ (same bytes) or torch.mm (same operations), measured in the same rounds
correct    native against reference on the timed inputs: exact (every bit), close (largest error), WRONG, ERROR
target     the figure that the line should reach, and whether this run did"""
CUDA_EXPLANATION = """
native     as a program calls it, one call after another: events around calls over inputs that no cache holds
in graph   the same calls in one CUDA graph: what a call costs the device, without Python and launches
of copy    bytes that a call must move over its time in a graph, as a share of the copy bandwidth measured first
of floor   on CUDA with both in graphs"""


def in_a_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, cut to 200 characters in all."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; ``left`` names the columns that are aligned to the left."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[str] = frozenset()
    alarms: frozenset[str] = frozenset()
    """A row is shown in red, where rich is installed, if a cell contains one of these words."""


def show(table: Table) -> None:
    """Print a table to standard output."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(plain(table))
        return
    rich_table = RichTable(box=None, header_style="bold", pad_edge=False)
    for name in table.heading:
        rich_table.add_column(name, justify="left" if name in table.left else "right", no_wrap=True)
    for row in table.rows:
        style = "red" if any(word in cell for cell in row for word in table.alarms) else ""
        rich_table.add_row(*(Text(cell, style=style) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, plain(table).find("\n") + 1))
    console.print(rich_table)


def plain(table: Table) -> str:
    """Return the table as text with aligned columns."""
    widths = [max(len(row[i]) for row in (table.heading, *table.rows)) for i in range(len(table.heading))]
    cells = [
        [
            cell.ljust(width) if name in table.left else cell.rjust(width)
            for name, cell, width in zip(table.heading, row, widths, strict=True)
        ]
        for row in (table.heading, *table.rows)
    ]
    return "\n".join("  ".join(row) for row in cells)


def run_table(records: Sequence[Record]) -> Table:
    """Return a table with one row per measured line."""
    on_cuda = any(record["native_in_graph"] or record["not_in_graph"] for record in records)
    rows = [
        [
            record["operator"],
            record["case"],
            record["dtype"],
            "fwd+bwd" if "backward" in record["direction"] else "fwd",
            time_with_spread(record["native"]),
            *(graph_cells(record) if on_cuda else ()),
            times(record["over_reference"]),
            times(record["over_baseline"]),
            share(record),
            correctness(record),
            target(record),
        ]
        for record in records
    ]
    graph = ["in graph", "of copy", "/torch in graph"] if on_cuda else []
    heading = ["operator", "case", "dtype", "what", "native", *graph, "/reference", "/torch", "of floor", "correct"]
    heading.append("target")
    return Table(
        heading,
        rows,
        frozenset({"operator", "case", "dtype", "what", "correct", "target"}),
        frozenset({"WRONG", "ERROR"}),
    )


def graph_cells(record: Record) -> list[str]:
    """Return the additional cells for CUDA: the native call's time in a graph, its share of the copy bandwidth, and its
    speed-up over the baseline in a graph.
    """
    share = f"{100 * record['share_of_copy']:.0f}%" if record["share_of_copy"] else "-"
    return [time_with_spread(record["native_in_graph"]), share, times(record["over_baseline_in_graph"])]


def seconds(value: float) -> str:
    """Return a time in seconds as text with three significant digits and a unit, such as ``1.25 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if float(f"{value / size:.3g}") >= 1:  # 0.9996 s is 1 s, not 1e+03 ms
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def time_with_spread(timing: dict[str, float] | None) -> str:
    """Return a timing as text: the median and quartiles, in the median's unit; ``-`` without a timing."""
    if not timing:
        return "-"
    middle, unit = seconds(timing["median"]).split()
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    return f"{float(middle):g} {unit} [{timing['low'] / scale:.3g}-{timing['high'] / scale:.3g}]"


def times(spread: dict[str, float] | None) -> str:
    """Return the median of a speed-up as text, such as ``2.5x``; ``-`` if it was not measured."""
    if not spread:
        return "-"
    value = spread["median"]
    return f"{value:.0f}x" if value >= 100 else f"{value:.3g}x"


def share(record: Record) -> str:
    """Return the share of the floor, and the kind of floor, as text; ``-`` without a floor."""
    if not record["share_of_floor"]:
        return "-"
    return f"{100 * record['share_of_floor']['median']:.0f}% {record['floor']['kind']}"


def correctness(record: Record) -> str:
    """Return the verdict as one word, followed by the largest error if the verdict is ``close``."""
    found = record["correctness"]
    return f"close {found['max_error']:.0e}" if found["verdict"] == "close" else str(found["verdict"])


def target(record: Record) -> str:
    """Return a line's target and whether it was reached, as text; empty if there is no target."""
    wanted = record["target"]
    if not wanted:
        return ""
    outcome = {True: "reached", False: "missed", None: "not measured"}[wanted["reached"]]
    if wanted["over"] == "seconds":
        return f"<= {seconds(wanted['ratio'])}: {outcome}"
    name = {"reference": "/reference", "baseline": "/torch", "floor": "of floor"}[wanted["over"]]
    figure = f"{100 * wanted['ratio']:.0f}%" if wanted["over"] == "floor" else f"{wanted['ratio']:g}x"
    return f">= {figure} {name}: {outcome}"


def write_json(result: dict[str, Any], file: Path) -> None:
    """Write ``result`` to ``file`` as JSON, atomically: the file is never incomplete, even if the process is killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(file)
