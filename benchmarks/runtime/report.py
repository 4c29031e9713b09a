"""Presents a run as targets, tables and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.picture import doubling, line, picture
from benchmarks.common.run import Sections, as_report, measured, show_sections
from benchmarks.common.targets import checked_target, targets_table
from benchmarks.runtime.scenario import DIRECTIONS, EXPERTS, ROWS, Cell
from benchmarks.runtime.systems import BATCHER, DIRECT, HIVEMIND, POOL, PYMOE, READY
from pymoe.bench.report import Table

STYLES = {
    PYMOE: ("C2", "o"),
    POOL: ("C4", "v"),
    HIVEMIND: ("C3", "s"),
    BATCHER: ("C0", "^"),
    DIRECT: ("0.55", "."),
    READY: ("0.2", "."),
}
"""Colour and marker of each system, in the order of the tables."""
RATIOS = (HIVEMIND, BATCHER, DIRECT, READY)
CELL = ("expert", "pass", "rows", "clients")
TARGETS = (
    (Cell("small", "forward", 1, 64, "threads"), HIVEMIND, 100),
    (Cell("small", "forward", 1, 64, "threads"), BATCHER, 3),
    (Cell("small", "forward", 1, 1, "threads"), DIRECT, 0.5),
    (Cell("big", "forward", 1, 8, "threads"), READY, 0.9),
    (Cell("small", "backward", 1, 64, "threads"), HIVEMIND, 60),
    (Cell("small", "backward", 1, 64, "threads"), BATCHER, 3),
)
"""For each target: the cell, the other system, and the minimum ratio of pymoe's requests per second to the other's."""
Record = dict[str, Any]


def judged(records: list[Record]) -> list[Record]:
    """Return the targets, each with the measured ratio and whether it was reached."""
    found = {Cell(**record["cell"]): record["systems"].get(PYMOE, {}).get("over", {}) for record in records}
    return [
        {"cell": asdict(cell)}
        | checked_target(f"{cell}: {PYMOE} / {over}", ">=", wanted, found.get(cell, {}).get(over))
        for cell, over, wanted in TARGETS
    ]


def in_short(record: Record) -> str:
    """Return one line about a cell, to print during the run."""
    parts = [f"{name} {rate(record, name)}" for name in record["systems"]]
    return f"{Cell(**record['cell'])}: {', '.join(parts)}"


def rate(record: Record, name: str) -> str:
    """Return a system's requests per second with quartiles, or the reason why there are none."""
    one = record["systems"].get(name)
    if not one:
        return "-"
    if "rate" not in one:
        return str(one["verdict"])
    text = f"{count(one['rate']['median'])} [{count(one['rate']['low'])}-{count(one['rate']['high'])}]"
    starved = f" ({one['starved']} clients starved)" if one["starved"] else ""
    return text + starved if one["verdict"] == "right" else f"{text} {one['verdict']}"


def count(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.10g}"


def over(record: Record, other: str) -> str:
    """Return pymoe's rate as a multiple of another's."""
    ratio = record["systems"].get(PYMOE, {}).get("over", {}).get(other)
    return f"{ratio['median']:.3g}" if ratio else "-"


def latency(record: Record, name: str) -> str:
    """Return a system's latencies in milliseconds, and processor time in microseconds."""
    one = record["systems"].get(name, {})
    if "rate" not in one:
        return "-"
    p50, p99, cpu = (one[key]["median"] for key in ("p50", "p99", "cpu"))
    return f"{p50 * 1e3:.3g} / {p99 * 1e3:.3g} / {cpu * 1e6:.3g}"


def sections(result: Record) -> Sections:
    """Yield all tables with their headings, the targets first."""
    names = [name for name in STYLES if any(name in record["systems"] for record in result["cells"])]
    ratios = [name for name in RATIOS if name in names and PYMOE in names]
    rates, latencies = [], []
    for record in result["cells"]:
        cell = Cell(**record["cell"])
        own = [cell.expert, cell.direction, str(cell.rows), f"{cell.clients} {cell.kind}"]
        rates.append([*own, *(rate(record, name) for name in names), *(over(record, name) for name in ratios)])
        latencies.append([*own, *(latency(record, name) for name in names)])
    yield "Targets: requests per second of one over another's", targets_table(result["targets"])
    heading = [*CELL, *names, *(f"{PYMOE} / {name}" for name in ratios)]
    yield "Requests per second [quartiles]", Table(heading, rates, frozenset(CELL))
    about = "Latency, p50 ms / p99 ms / processor time in µs per request (of clients and system together)"
    yield about, Table([*CELL, *names], latencies, frozenset(CELL))
    for one in result.get("profiles", []):
        rows = [[row["what"], f"{row['value']:.3g}", row["unit"], row["note"]] for row in one["rows"]]
        yield one["heading"], Table(["what", "", "unit", "note"], rows, frozenset({"what", "unit", "note"}))


def show(result: Record) -> None:
    """Print all tables."""
    show_sections(sections(result))


def markdown(result: Record) -> str:
    """Return all tables as Markdown."""
    settings = result["settings"]
    about = (
        f"Medians over {settings['rounds']} interleaved windows of at least {settings['seconds']} s (fewer in slow "
        "cells), quartiles in brackets; ratios are taken round by round."
    )
    lines = [measured(result, about), ""]
    for name, one in result["systems"].items():
        wrong = f"WRONG: {one['fault']}" if one["fault"] else "answers checked"
        said = f"left out, {one['absent']}" if one["absent"] else wrong
        lines.append(f"- **{name}** {one['version']}{' ' * bool(one['version'])}({one['about']}): {said}")
    return as_report(lines, sections(result))


def draw(result: Record, file: Path) -> None:
    """Draw a panel for each expert, direction and size: rates above, latencies below; coroutines are dashed."""
    panels_of: dict[tuple[str, int, str], list[Record]] = {
        (expert, rows, direction): [] for expert in EXPERTS for direction in DIRECTIONS for rows in ROWS
    }
    for record in result["cells"]:
        cell = Cell(**record["cell"])
        panels_of[cell.expert, cell.rows, cell.direction].append(record)
    shown = {load: records for load, records in panels_of.items() if records}
    sizes = ", ".join(f"{name}: {h} -> {f} -> {h}" for name, (h, f) in EXPERTS.items())
    title = f"Requests to one expert ({sizes}); backward includes an optimizer step"
    with picture(file, 2, len(shown), (2.1 + 2.5 * len(shown), 6.4), title, result, sharex=True) as (figure, panels):
        counts = sorted({record["cell"]["clients"] for record in result["cells"]})
        for column, ((expert, rows, direction), records) in enumerate(shown.items()):
            above, below = panels[:, column]
            for name, (colour, marker) in STYLES.items():
                for kind, dash in (("threads", "-"), ("asyncio", "--")):
                    own = [r for r in records if r["cell"]["kind"] == kind and "rate" in r["systems"].get(name, {})]
                    bound = name in (DIRECT, READY)
                    if not own or (bound and kind == "asyncio"):
                        continue
                    clients = [record["cell"]["clients"] for record in own]
                    style = {"ls": dash, "color": colour, "marker": marker}
                    label = name if kind == "threads" else f"{name}, coroutines"
                    line(above, clients, [r["systems"][name]["rate"] for r in own], label=label, **style)
                    for key, alpha in () if bound else (("p50", 1.0), ("p99", 0.5)):
                        middle = [record["systems"][name][key]["median"] * 1e3 for record in own]
                        below.plot(clients, middle, ms=3, lw=1, alpha=alpha, **style)
            above.set_title(f"{expert} {direction}\n{rows} row{'s' * (rows > 1)} a request", fontsize=9)
            below.set_xlabel("clients", fontsize=8)
            for panel in (above, below):
                doubling(panel, counts)
        panels[0, 0].set_ylabel("requests per second", fontsize=8)
        panels[1, 0].set_ylabel("latency, ms: p50, and p99 faint", fontsize=8)
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
