"""Presents runs over schedules and over captured models as targets, tables and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.picture import picture
from benchmarks.common.run import Sections, as_report, closeness, measured, show_sections, spread_of
from benchmarks.common.targets import checked_target, targets_table
from benchmarks.pipeline.systems import SEQUENTIAL
from pymoe.bench.report import Table, time_with_spread

Record = dict[str, Any]
SCHEDULE = "pymoe 1f1b"
SHARES = {2: 0.97, 4: 0.95}
"""Minimum share of the ideal speed-up for sleeping stages, by number of workers."""
MICRO_BATCHES = (8, 16)
COST = 60e-6
"""Maximum processor seconds per stage and micro-batch, forward and backward, in addition to the sequential run."""
COLUMNS = (
    *("system", "step", "speed-up", "ideal", "of ideal", "with its times", "processor, us"),
    *("live", "live, simulated", "gradients"),
)
LEFT = frozenset({"system", "live", "live, simulated", "gradients"})


def judged(result: Record) -> list[Record]:
    """Return the targets, each with the measured value and whether it was reached."""
    targets = []
    for workers, wanted in SHARES.items():
        for count in MICRO_BATCHES:
            found = looked_up(result["cells"], "sleep", workers, count, SCHEDULE).get("share")
            what = f"share of the ideal, {workers} sleeping workers, {count} micro-batches, 1f1b"
            targets.append(checked_target(what, ">=", wanted, found, "%"))
    for record in result["bookkeeping"]:
        case = record["case"]
        stages = f"{case['workers']} {case['work']} stages, {case['micro_batches']} micro-batches"
        found = record["systems"].get(SCHEDULE, {}).get("cpu")
        what = f"processor time a stage and micro-batch, {stages}, 1f1b"
        targets.append(checked_target(what, "<=", COST, found, "us"))
    runs = [one for record in result["cells"] for name, one in record["systems"].items() if name.startswith("pymoe ")]
    equal = [one["live"] == one["planned_live"] for one in runs if "planned_live" in one]
    share = sum(equal) / len(equal) if equal else 0.0
    what = f"share of {len(equal)} runs whose peak of live micro-batches is the simulator's in every stage"
    found = {"low": share, "median": share, "high": share} if equal else None
    return [*targets, checked_target(what, ">=", 1.0, found, "%")]


def looked_up(records: list[Record], work: str, workers: int, micro_batches: int, system: str) -> Record:
    """Return a system's results for a case; empty if it was not measured."""
    case = {"work": work, "workers": workers, "micro_batches": micro_batches}
    return next((record["systems"].get(system, {}) for record in records if record["case"] == case), {})


def cell_table(record: Record) -> Table:
    """Return a row for every system, with columns for the figures that were measured for at least one system."""
    cells = [cells_of(name, one) for name, one in record["systems"].items()]
    heading = [column for column in COLUMNS if any(column in own for own in cells)]
    rows = [[own.get(column, "-") for column in heading] for own in cells]
    return Table(heading, rows, LEFT, frozenset({"WRONG"}))


def cells_of(name: str, one: Record) -> dict[str, str]:
    """Return the cells of a system's row by column."""
    if "seconds" not in one:
        found = f"{closeness(one)}; " if "verdict" in one else ""
        return {"system": name, "gradients": f"{found}failed: {one['failure']}"}
    cells = {"system": name, "step": time_with_spread(one["seconds"]), "speed-up": spread_of(one["speed_up"], "{:.2f}")}
    if name != SEQUENTIAL and "ideal" in one:
        cells |= {"ideal": f"{one['ideal']:.2f}", "of ideal": spread_of(one["share"], "{:.0f} %", 100)}
        if own := one.get("own_share"):
            cells["with its times"] = spread_of(own, "{:.1f} %", 100)
        if one.get("live"):
            cells["processor, us"] = spread_of(one["cpu"], "{:.0f}", 1e6)
    if one.get("live"):  # counted only in sequential models
        cells["live"] = " ".join(map(str, one["live"]))
        if name != SEQUENTIAL and "planned_live" in one:
            cells["live, simulated"] = " ".join(map(str, one["planned_live"]))
    return cells | {"gradients": closeness(one)}


def bookkeeping_table(record: Record) -> Table:
    """Return the overhead per stage and micro-batch, forward and backward together."""
    rows = []
    for name, one in record["systems"].items():
        if "cpu" not in one and name != SEQUENTIAL:
            rows.append([name, "-", "-", "-", f"failed: {one['failure']}"])
        elif name != SEQUENTIAL:
            costs = (spread_of(one[what], "{:.0f}", 1e6) for what in ("cpu", "wall"))
            rows.append([name, str(one["stages"]), *costs, closeness(one)])
    return Table(["system", "stages", "processor, us", "wall, us", "gradients"], rows, LEFT, frozenset({"WRONG"}))


def sections(result: Record) -> Sections:
    """Yield all tables with their headings, the targets first."""
    if result.get("targets"):
        yield "Targets", targets_table(result["targets"])
    for record in result.get("bookkeeping", ()):
        yield f"What a stage and a micro-batch cost besides, {record['about']}", bookkeeping_table(record)
    for record in result["cells"]:
        yield record["about"], cell_table(record)


def show(result: Record) -> None:
    """Print all tables."""
    show_sections(sections(result))
    if result.get("profile"):
        print("\n" + "\n".join(result["profile"]))


def markdown(result: Record) -> str:
    """Return all tables as Markdown."""
    about = (
        f"Medians over {result['settings']['rounds']} interleaved rounds, quartiles in brackets; speed-ups over the "
        "sequential run, other ratios and differences are taken round by round. Gradients are compared with the "
        "sequential run's before anything is timed. `live`: for every stage, the most micro-batches whose saved "
        "tensors were alive at once."
    )
    systems = [f"- **{name}** {one['version']}: {one['about']}" for name, one in result["systems"].items()]
    text = as_report([measured(result, about, "one torch thread a process or stage"), "", *systems], sections(result))
    if result.get("profile"):
        text += "\n".join(["", "**Where the time goes**", "", "```", *result["profile"], "```", ""])
    return text


def draw(result: Record, file: Path) -> None:
    """Draw a panel for every kind of work and number of workers: speed-ups with quartiles, and lines at the ideal."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in result["cells"]:
        groups.setdefault((record["case"]["work"], record["case"]["workers"]), []).append(record)
    if not groups:
        return
    names = [name for name in result["systems"] if name != SEQUENTIAL]
    title = "Speed-up over the sequential run, forward and backward (lines: the simulated ideal)"
    with picture(file, len(groups), 1, (11, 0.6 + 3.1 * len(groups)), title, result) as (figure, panels):
        width = 0.84 / len(names)
        for panel, ((work, workers), records) in zip(panels[:, 0], groups.items(), strict=True):
            for i, name in enumerate(names):
                for position, record in enumerate(records):
                    one = record["systems"].get(name, {})
                    if "speed_up" not in one:
                        continue
                    x, seen = position - 0.42 + (i + 0.5) * width, one["speed_up"]
                    error = [[seen["median"] - seen["low"]], [seen["high"] - seen["median"]]]
                    panel.bar(x, seen["median"], 0.9 * width, yerr=error, color=colour(i, name), error_kw={"lw": 0.8})
                    if "ideal" in one:
                        panel.hlines(one["ideal"], x - 0.45 * width, x + 0.45 * width, color="black", lw=1.4)
            panel.axhline(1, color="0.6", lw=0.8, ls=":")
            counts = [f"{record['case']['micro_batches']} micro-batches" for record in records]
            panel.set_xticks(range(len(records)), counts)
            panel.set_title(f"{work}, {workers} workers", fontsize=10)
            panel.set_ylabel("speed-up", fontsize=9)
        handles = [panels[0, 0].bar(0, 0, color=colour(i, name)) for i, name in enumerate(names)]
        figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)


def colour(i: int, name: str) -> Any:
    """Return a shade of green for pymoe, grey for torchgpipe, and a shade of blue for torch."""
    from matplotlib import colormaps

    if name.startswith("pymoe"):
        return colormaps["Greens"](0.45 + 0.12 * (i % 5))
    return "0.55" if name == "torchgpipe" else colormaps["Blues"](0.35 + 0.09 * (i % 7))
