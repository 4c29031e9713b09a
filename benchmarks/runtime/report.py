"""The run as text and Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.output import WORDS, as_markdown, measured
from benchmarks.runtime.scenario import Cell
from benchmarks.runtime.systems import BATCHER, DIRECT, HIVEMIND, POOL, PYMOE, READY
from pymoe.bench.report import Table, plain

NAMES = (PYMOE, POOL, HIVEMIND, BATCHER, DIRECT, READY)
RATIOS = (HIVEMIND, BATCHER, DIRECT, READY)
Record = dict[str, Any]


def line(record: Record) -> str:
    """A cell in one line, while the run goes on."""
    parts = [f"{name} {rate(record, name)}" for name in record["systems"]]
    return f"{Cell(**record['cell'])}: {', '.join(parts)}"


def rate(record: Record, name: str) -> str:
    """A system's requests per second with quartiles, or why there are none."""
    one = record["systems"].get(name)
    if not one:
        return "-"
    if "rate" not in one:
        return one["verdict"]
    text = f"{count(one['rate']['median'])} [{count(one['rate']['low'])}-{count(one['rate']['high'])}]"
    starved = f" ({one['starved']} clients starved)" if one["starved"] else ""
    return text + starved if one["verdict"] == "right" else f"{text} {one['verdict']}"


def count(value: float) -> str:
    """A number with three digits."""
    return f"{float(f'{value:.3g}'):,.10g}"


def over(record: Record, other: str) -> str:
    """How many times another's rate pymoe's is."""
    ratio = record["systems"].get(PYMOE, {}).get("over", {}).get(other)
    return f"{ratio['median']:.3g}" if ratio else "-"


def present(result: Record) -> list[str]:
    """The systems that were measured."""
    return [name for name in NAMES if any(name in record["systems"] for record in result["cells"])]


def rates_table(result: Record) -> Table:
    """Requests per second, and pymoe's over the others'."""
    names = present(result)
    ratios = [name for name in RATIOS if name in names and PYMOE in names]
    rows = [
        [
            *cell_of(record),
            *(rate(record, name) for name in names),
            *(over(record, name) for name in ratios),
        ]
        for record in result["cells"]
    ]
    return Table([*CELL, *names, *(f"pymoe / {name}" for name in ratios)], rows, frozenset(CELL))


CELL = ("expert", "pass", "rows", "clients")


def cell_of(record: Record) -> list[str]:
    """The columns that say which cell a row is."""
    cell = Cell(**record["cell"])
    return [cell.expert, cell.direction, str(cell.rows), f"{cell.clients} {cell.kind}"]


def latency_table(result: Record) -> Table:
    """Latencies in milliseconds, and processor time."""
    names = present(result)
    rows = []
    for record in result["cells"]:
        cells = []
        for name in names:
            one = record["systems"].get(name, {})
            if "rate" in one:
                p50, p99, cpu = (one[key]["median"] for key in ("p50", "p99", "cpu"))
                cells.append(f"{p50 * 1e3:.3g} / {p99 * 1e3:.3g} / {cpu * 1e6:.3g}")
            else:
                cells.append("-")
        rows.append([*cell_of(record), *cells])
    return Table([*CELL, *names], rows, frozenset(CELL))


def targets_table(result: Record) -> Table:
    """What pymoe is held to."""
    rows = [
        [
            one["cell"],
            f"{PYMOE} / {one['over']}",
            f">= {one['wanted']:g}",
            f"{one['found']['median']:.3g} [{one['found']['low']:.3g}-{one['found']['high']:.3g}]"
            if one["found"]
            else "-",
            WORDS[one["met"]],
        ]
        for one in result["targets"]
    ]
    return Table(
        ["load", "requests per second", "wanted", "found", ""], rows, frozenset({"load", "requests per second"})
    )


def show(result: Record) -> None:
    """All tables, to standard output."""
    print(f"\nrequests per second [quartiles]\n{plain(rates_table(result))}")
    print(f"\nlatency p50 ms / p99 ms / processor time us per request\n{plain(latency_table(result))}")
    print(f"\ntargets\n{plain(targets_table(result))}")
    for one in result.get("profiles", []):
        print(f"\n{one['heading']}\n{plain(profile_table(one))}")


def profile_table(one: Record) -> Table:
    """A profile's lines."""
    rows = [[row["what"], f"{row['value']:.3g}", row["unit"], row["note"]] for row in one["rows"]]
    return Table(["what", "", "unit", "how it was found"], rows, frozenset({"what", "unit", "how it was found"}))


def markdown(result: Record) -> str:
    """All tables as Markdown."""
    settings = result["settings"]
    about = (
        f"Medians over {settings['rounds']} interleaved windows of at least {settings['seconds']} s (fewer in slow "
        "cells), quartiles in brackets; ratios are taken round by round."
    )
    lines = [
        measured(result, about),
        "",
    ]
    for name, one in result["systems"].items():
        said = (
            f"left out, {one['absent']}"
            if one["absent"]
            else f"WRONG: {one['fault']}"
            if one["fault"]
            else "answers checked"
        )
        lines.append(f"- **{name}** {one['version']}{' ' * bool(one['version'])}({one['about']}): {said}")
    lines += ["", "**Targets**", "", *as_markdown(targets_table(result))]
    lines += ["", "**Requests per second**", "", *as_markdown(rates_table(result))]
    lines += [
        "",
        "**Latency, p50 ms / p99 ms / processor time in µs per request** (of clients and system together)",
        "",
        *as_markdown(latency_table(result)),
    ]
    for one in result.get("profiles", []):
        lines += ["", f"**{one['heading']}**", "", *as_markdown(profile_table(one))]
    return "\n".join(lines) + "\n"
