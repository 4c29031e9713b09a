"""The run over captured models as text and Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.output import as_markdown, measured
from benchmarks.pipeline.report import correctness, spread
from benchmarks.pipeline.traced_work import MODELS, TracedCase
from pymoe.bench.report import Table, plain, time_with_spread

Record = dict[str, Any]


def cell_table(record: Record) -> Table:
    """A line for every system."""
    rows = []
    for name, one in record["systems"].items():
        if "seconds" not in one:
            found = correctness(one) if "verdict" in one else "-"
            rows.append([name, "-", "-", "-", "-", f"{found}; failed: {one['failure']}"])
            continue
        ideal = [f"{one['ideal']:.2f}", spread(one["share"], "{:.0%}")] if "ideal" in one else ["-", "-"]
        speed_up = spread(one["speed_up"], "{:.2f}")
        rows.append([name, time_with_spread(one["seconds"]), speed_up, *ideal, correctness(one)])
    heading = ["system", "step", "speed-up", "ideal", "of ideal", "gradients"]
    return Table(heading, rows, frozenset({"system", "gradients"}), frozenset({"WRONG"}))


def heading_of(record: Record) -> str:
    """A cell in words."""
    case = TracedCase(**record["case"])
    return f"{case}: {case.layers} layers, {MODELS[case.work][0]}"


def show(result: Record) -> None:
    """All tables, to standard output."""
    for record in result["cells"]:
        print(f"\n{heading_of(record)}\n{plain(cell_table(record))}")


def markdown(result: Record) -> str:
    """All tables as Markdown."""
    about = (
        f"Medians over {result['settings']['rounds']} interleaved rounds, quartiles in brackets; speed-ups over the "
        "model alone in one process are taken round by round. Gradients of every parameter, by every name that it "
        "has, are compared with that run's before anything is timed."
    )
    lines = [
        measured(result, about, "one torch thread a process or stage"),
        "",
        *(f"- **{name}** {one['version']}: {one['about']}" for name, one in result["systems"].items()),
    ]
    for record in result["cells"]:
        lines += ["", f"**{heading_of(record)}**", "", *as_markdown(cell_table(record))]
    return "\n".join(lines) + "\n"
