"""The run as text and Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.output import WORDS, as_markdown, measured
from benchmarks.pipeline.systems import SEQUENTIAL
from benchmarks.pipeline.work import WORKS, Case
from pymoe.bench.report import Table, plain, time_with_spread

Record = dict[str, Any]


def cell_table(record: Record) -> Table:
    """A line for every system."""
    cells = [cells_of(name, one) for name, one in record["systems"].items()]
    heading = list(cells[0])
    rows = [[own.get(column, "-") for column in heading] for own in cells]
    return Table(heading, rows, frozenset({"system", "live", "live, simulated", "gradients"}), frozenset({"WRONG"}))


def cells_of(name: str, one: Record) -> dict[str, str]:
    """A line's cells by column. The first line's, that of the sequential run, has all columns."""
    if "seconds" not in one:
        return {"system": name, "gradients": f"failed: {one['failure']}"}
    planned = name != SEQUENTIAL and "ideal" in one
    own = one.get("own_share")
    return {
        "system": name,
        "step": time_with_spread(one["seconds"]),
        "speed-up": spread(one["speed_up"], "{:.2f}"),
        "ideal": f"{one['ideal']:.2f}" if planned else "-",
        "of ideal": spread(one["share"], "{:.0%}") if planned else "-",
        "with its times": spread(own, "{:.1%}") if own else "-",
        "processor, us": microseconds(one["cpu"]) if planned else "-",
        "live": counts(one["live"]),
        "live, simulated": counts(one["planned_live"]) if planned else "-",
        "gradients": correctness(one),
    }


def bookkeeping_table(record: Record) -> Table:
    """What a stage and a micro-batch cost besides, forward and backward together."""
    rows = []
    for name, one in record["systems"].items():
        if name == SEQUENTIAL:
            continue
        if "cpu" not in one:
            rows.append([name, "-", "-", "-", f"failed: {one['failure']}"])
            continue
        rows.append(
            [name, str(one["stages"]), *(microseconds(one[what]) for what in ("cpu", "wall")), correctness(one)]
        )
    heading = ["system", "stages", "processor, us", "wall, us", "gradients"]
    return Table(heading, rows, frozenset({"system", "gradients"}), frozenset({"WRONG"}))


def targets_table(result: Record) -> Table:
    """What pymoe is held to."""
    rows = []
    for one in result["targets"]:
        relation, limit, found = one["relation"], one["limit"], one["found"]
        if relation == ">=":
            wanted, seen = f">= {limit:.0%}", spread(found, "{:.1%}") if found else "-"
        elif relation == "<=":
            wanted, seen = f"<= {limit * 1e6:g} us", microseconds(found) if found else "-"
        else:
            wanted, seen = f"all of {limit}", str(found["median"]) if found else "-"
        rows.append([one["what"], wanted, seen, WORDS[one["met"]]])
    return Table(["what", "wanted", "found", ""], rows, frozenset({"what", ""}), frozenset({"missed"}))


def spread(found: Record, form: str) -> str:
    """Median and quartiles."""
    return f"{form.format(found['median'])} [{form.format(found['low'])} - {form.format(found['high'])}]"


def microseconds(found: Record) -> str:
    """A difference of times, which may be negative."""
    return f"{found['median'] * 1e6:.0f} [{found['low'] * 1e6:.0f} - {found['high'] * 1e6:.0f}]"


def correctness(one: Record) -> str:
    """How the gradients compare with the sequential run's."""
    return f"close {one['error']:.0e}" if one["verdict"] == "close" else str(one["verdict"])


def counts(peaks: list[int]) -> str:
    """For every stage."""
    return " ".join(map(str, peaks))


def heading_of(record: Record) -> str:
    """A cell in words."""
    case = Case(**record["case"])
    return f"{case}: {case.layers} layers, each {WORKS[case.work].about}"


def sections(result: Record) -> list[tuple[str, Table]]:
    """All tables with their headings, the targets first."""
    found = [("Targets", targets_table(result))] if result["targets"] else []
    found += [
        (f"What a stage and a micro-batch cost besides, {heading_of(record)}", bookkeeping_table(record))
        for record in result["bookkeeping"]
    ]
    return found + [(heading_of(record), cell_table(record)) for record in result["cells"]]


def show(result: Record) -> None:
    """All tables, to standard output."""
    for heading, table in sections(result):
        print(f"\n{heading}\n{plain(table)}")
    if result["profile"]:
        print("\n" + "\n".join(result["profile"]))


def markdown(result: Record) -> str:
    """All tables as Markdown."""
    about = (
        f"Medians over {result['settings']['rounds']} interleaved rounds, quartiles in brackets; ratios and "
        "differences are taken round by round. Gradients are compared with the sequential run's before anything is "
        "timed. `live`: for every stage, the most micro-batches whose saved tensors were alive at once."
    )
    lines = [
        measured(result, about),
        "",
        *(f"- **{name}** {one['version']}: {one['about']}" for name, one in result["systems"].items()),
    ]
    for heading, table in sections(result):
        lines += ["", f"**{heading}**", "", *as_markdown(table)]
    if result["profile"]:
        lines += ["", "**Where the time goes**", "", "```", *result["profile"], "```"]
    return "\n".join(lines) + "\n"
