"""The run as text and Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.output import WORDS, as_markdown, measured
from benchmarks.parallel.calls import PYMOE
from pymoe.bench.report import Table, plain, seconds, time_with_spread

Record = dict[str, Any]
PASSES = ("forward", "backward")
BY_PROCESSOR = ("forward_cpu", "backward_cpu")


def times_table(result: Record, kind: str) -> Table:
    """A line for every number of calls and every way: times of both passes, and how many times one call's."""
    rows = []
    for record in result["records"]:
        if record["kind"] != kind:
            continue
        ratio = same(result["ratios"], record)
        rows.append(
            [
                str(record["calls"]),
                record["system"],
                *(time_with_spread(record[one]) for one in PASSES),
                *(f"{ratio[one]['median']:.2f}" for one in PASSES),
                correctness(record),
            ]
        )
    heading = ["calls", "way", *PASSES, "forward / one call", "backward / one call", "gradients"]
    return Table(heading, rows, frozenset({"way", "gradients"}), frozenset({"WRONG"}))


def same(records: list[Record], wanted: Record) -> Record:
    """The record of the same calls in another list."""
    keys = ("kind", "calls", "system")
    return next(record for record in records if all(record[key] == wanted[key] for key in keys))


def correctness(record: Record) -> str:
    """How the results compare with the loop's."""
    return f"close {record['error']:.0e}" if record["verdict"] == "close" else str(record["verdict"])


def overhead_table(result: Record, kind: str) -> Table:
    """Microseconds that the map adds to each call; the processor's, of all threads, hardly see what else is running."""
    rows = [
        [str(record["calls"]), *(microseconds(record[one]) for one in PASSES + BY_PROCESSOR)]
        for record in result["overheads"]
        if record["kind"] == kind and record["system"] == PYMOE
    ]
    heading = ["calls", *(f"{one}, us per call" for one in PASSES), *(f"{one}, processor time" for one in PASSES)]
    return Table(heading, rows)


def microseconds(spread: Record) -> str:
    """A difference of times, which may be negative."""
    return f"{spread['median'] * 1e6:.1f} [{spread['low'] * 1e6:.1f} - {spread['high'] * 1e6:.1f}]"


def targets_table(result: Record) -> Table:
    """What the map is held to."""
    rows = []
    for one in result["targets"]:
        ratio = one["of"] == "ratios"
        name = "time / one call's" if ratio else "beyond the loop, us per call"
        limit = f"<= {one['limit']:g}" if ratio else f"<= {one['limit'] * 1e6:g}"
        found = "-"
        if one["found"]:
            spread = one["found"]
            found = f"{spread['median']:.3f} [{spread['low']:.3f} - {spread['high']:.3f}]"
            found = found if ratio else microseconds(spread)
        calls = f"{one['calls']} {one['kind']} call{'s' * (one['calls'] > 1)}, {one['pass']}"
        rows.append([calls, name, limit, found, WORDS[one["met"]]])
    return Table(["calls", "what", "wanted", "found", ""], rows, frozenset({"calls", "what", ""}))


def floor(result: Record) -> str:
    """What a hand-over between threads costs."""
    one = result["handover"]
    return (
        f"A bare hand-over from thread to thread takes {seconds(one['python']['median'])} between two Python threads "
        f"and {seconds(one['worker']['median'])} to or from a worker of the runtime."
    )


def heading(result: Record, kind: str) -> str:
    """What the calls of a table are."""
    facts = result["kinds"][kind]
    return f"{kind}: {facts['about']}; {on_workers(facts['workers'])}"


def on_workers(count: int | None) -> str:
    """How many threads run the calls, in words."""
    return "the default number of workers" if count is None else f"{count} worker{'s' * (count > 1)}"


def show(result: Record) -> None:
    """All tables, to standard output."""
    for kind in result["kinds"]:
        print(f"\n{heading(result, kind)}\n{plain(times_table(result, kind))}")
    if "tiny" in result["kinds"]:
        print(f"\nwhat the map adds to a tiny call\n{plain(overhead_table(result, 'tiny'))}")
    print(f"\n{floor(result)}\n\ntargets\n{plain(targets_table(result))}")


def markdown(result: Record) -> str:
    """All tables as Markdown."""
    settings = result["settings"]
    rounds = ", ".join(f"{kind}: {one['rounds']}" for kind, one in result["kinds"].items())
    about = (
        f"Medians over interleaved rounds ({rounds}; {settings['slow_rounds']} where a way takes long), quartiles in "
        "brackets; ratios and differences are taken round by round. `/ one call`: over one call of the loop."
    )
    lines = [
        measured(result, about),
        "",
        *(f"- **{name}**: {about}" for name, about in result["systems"].items()),
        "",
        floor(result),
        "",
        "**Targets**",
        "",
        *as_markdown(targets_table(result)),
    ]
    for kind in result["kinds"]:
        lines += ["", f"**{heading(result, kind)}**", "", *as_markdown(times_table(result, kind))]
    if "tiny" in result["kinds"]:
        lines += ["", "**What the map adds to a tiny call**", "", *as_markdown(overhead_table(result, "tiny"))]
    return "\n".join(lines) + "\n"
