"""Presents the run as targets, tables and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.picture import doubling, line, picture
from benchmarks.common.run import Sections, as_report, closeness, measured, show_sections, spread_of
from benchmarks.common.targets import checked_target, targets_table
from benchmarks.parallel.calls import AUTOGRAD, LOOP, PYMOE
from pymoe.bench.report import Table, seconds, time_with_spread

Record = dict[str, Any]
PASSES = ("forward", "backward")
BY_PROCESSOR = ("forward_cpu", "backward_cpu")
AT_ONCE = 1.1
"""Maximum time of 8 sleeping calls, as a multiple of one call's time."""
TINY = 50e-6
"""Maximum seconds per pass that the map may add to a call that does nothing."""
STYLES = {LOOP: ("0.4", "o", "-"), AUTOGRAD: ("C0", "s", "--"), PYMOE: ("C2", "o", "-")}


def judged(result: Record) -> list[Record]:
    """Return the verdict on each target."""
    counts = [count for count in (8, 16) if count == 8 or not result["settings"]["quick"]]
    cases = [("ratios", "sleep", 8, "time / one call's", AT_ONCE, "")]
    cases += [("overheads", "tiny", count, "beyond the loop, per call", TINY, "us") for count in counts]
    targets = []
    for table, kind, calls, what, limit, unit in cases:
        found = record_of(result[table], kind, calls, PYMOE)
        for one in PASSES:
            targets.append(checked_target(f"{calls} {kind} calls, {one}: {what}", "<=", limit, found.get(one), unit))
    return targets


def record_of(records: list[Record], kind: str, calls: int, system: str) -> Record:
    """Return the record of these calls; an empty one if they were not measured."""
    wanted = {"kind": kind, "calls": calls, "system": system}
    return next((record for record in records if wanted.items() <= record.items()), {})


def times_table(result: Record, kind: str) -> Table:
    """Return a row for every number of calls and every way: times of both passes, also as multiples of one call's
    time.
    """
    rows = []
    for record in result["records"]:
        if record["kind"] != kind:
            continue
        ratio = record_of(result["ratios"], kind, record["calls"], record["system"])
        own = [str(record["calls"]), record["system"], *(time_with_spread(record[one]) for one in PASSES)]
        rows.append([*own, *(f"{ratio[one]['median']:.2f}" for one in PASSES), closeness(record)])
    heading = ["calls", "way", *PASSES, "forward / one call", "backward / one call", "gradients"]
    return Table(heading, rows, frozenset({"way", "gradients"}), frozenset({"WRONG"}))


def overhead_table(result: Record) -> Table:
    """Return the microseconds that the map adds to each tiny call.

    Processor time is given too, since other programs hardly affect it.
    """
    rows = [
        [str(record["calls"]), *(spread_of(record[one], "{:.1f}", 1e6) for one in PASSES + BY_PROCESSOR)]
        for record in result["overheads"]
        if (record["kind"], record["system"]) == ("tiny", PYMOE)
    ]
    heading = ["calls", *(f"{one}, us per call" for one in PASSES), *(f"{one}, processor time" for one in PASSES)]
    return Table(heading, rows)


def floor(result: Record) -> str:
    """Return a sentence about the cost of a handover between threads."""
    one = result["handover"]
    return (
        f"A bare hand-over from thread to thread takes {seconds(one['python']['median'])} between two Python threads "
        f"and {seconds(one['worker']['median'])} to or from a worker of the runtime."
    )


def on_workers(count: int | None) -> str:
    """Return how many threads run the calls, in words."""
    return "the default number of workers" if count is None else f"{count} worker{'s' * (count > 1)}"


def sections(result: Record) -> Sections:
    """Yield all tables with their headings, the targets first."""
    yield "Targets", targets_table(result["targets"])
    for kind, facts in result["kinds"].items():
        yield f"{kind}: {facts['about']}; {on_workers(facts['workers'])}", times_table(result, kind)
    if "tiny" in result["kinds"]:
        yield "What the map adds to a tiny call", overhead_table(result)


def show(result: Record) -> None:
    """Print all tables."""
    show_sections(sections(result))
    print(f"\n{floor(result)}")


def markdown(result: Record) -> str:
    """Return all tables as Markdown."""
    rounds = ", ".join(f"{kind}: {one['rounds']}" for kind, one in result["kinds"].items())
    about = (
        f"Medians over interleaved rounds ({rounds}; {result['settings']['slow_rounds']} where a way takes long), "
        "quartiles in brackets; ratios and differences are taken round by round. `/ one call`: over one call of the "
        "loop."
    )
    systems = [f"- **{name}**: {about}" for name, about in result["systems"].items()]
    return as_report([measured(result, about), "", *systems, "", floor(result)], sections(result))


def draw(result: Record, file: Path) -> None:
    """Draw a column for each kind of calls, forward above backward; a dotted line marks the time of one call."""
    kinds = result["kinds"]
    title = "Time of each pass over the number of calls (dotted: one call)"
    with picture(file, 2, len(kinds), (1.2 + 3.4 * len(kinds), 5.6), title, result, sharex=True) as (_, panels):
        counts = sorted({record["calls"] for record in result["records"]})
        for column, kind in enumerate(kinds):
            for panel, one in zip(panels[:, column], PASSES, strict=True):
                for name, (colour, marker, dash) in STYLES.items():
                    own = [r for r in result["records"] if (r["kind"], r["system"]) == (kind, name)]
                    calls, spreads = [record["calls"] for record in own], [record[one] for record in own]
                    line(panel, calls, spreads, 1e3, color=colour, marker=marker, ls=dash, label=name)
                    if name == LOOP and 1 in calls:
                        panel.axhline(spreads[calls.index(1)]["median"] * 1e3, color="0.6", ls=":", lw=1)
                doubling(panel, counts)
                panels[PASSES.index(one), 0].set_ylabel(f"{one}, ms", fontsize=9)
            panels[0, column].set_title(f"{kind} calls, {on_workers(kinds[kind]['workers'])}", fontsize=10)
            panels[1, column].set_xlabel("calls", fontsize=9)
        panels[0, 0].legend(fontsize=8, frameon=False)
