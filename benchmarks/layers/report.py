"""Computes the targets and tables of ``python -m benchmarks.model_layers`` from its records."""

from __future__ import annotations

from typing import Any

from benchmarks.common.run import as_markdown
from benchmarks.layers.contenders import KT_KERNEL, PYMOE, TRANSFORMERS
from pymoe.bench.report import Table, time_with_spread

Record = dict[str, Any]
SPEED_UP = 1.0
"""Minimum speed-up over the best of transformers' implementations, in every case."""
OF_READ = 0.75
"""Decoding: minimum ratio of the time for reading every touched weight once to pymoe's time."""
OF_MM = ((64.0, 0.9), (8.0, 0.65))
"""Prefill and training: pairs of rows per expert and the minimum ratio of the time of dense ``torch.mm`` to pymoe's
time.
"""
QUANTISED = {"pymoe int8": 2.5, "pymoe int4": 3.5}
"""Decoding: minimum speed-up of each quantised layer over pymoe in float32."""
CLOCKS = {
    "wall": "Wall time, all threads",
    "cpu": "Processor time, one thread on one core",
}
LIMITS = {"read": "read once", "mm": "dense mm"}
ABOUT = """\
Everyone computes the same block on the same random weights. Times are medians over rounds in which all take turns, \
quartiles in brackets; shares and speed-ups are taken round by round. Training is forward and backward, with gradients \
of the input and of all parameters. `read once`: every weight that the tokens touch, read once by the fastest of \
torch's reductions; `dense mm`: the same floating-point operations in dense `torch.mm` of the dtype. `error`: the \
largest relative error of sampled rows, and in training of their gradients and of the gradients of two experts, \
against float64 (float32 for 16-bit blocks)."""


def row_of(case: Record, *names: str) -> Record | None:
    """Return the row of the first of ``names`` that was measured."""
    rows = {row["name"]: row for row in case["rows"]}
    return next((rows[name] for name in names if name in rows), None)


def ours(case: Record) -> Record | None:
    """Return the row that the targets apply to: pymoe's experts in transformers' block or, without such a row, pymoe's
    layer.
    """
    return row_of(case, *PYMOE)


def limit_of(case: Record) -> str:
    """Return the limit that a case is compared with."""
    return "read" if case["mode"] == "decode" else "mm"


def over_fp32(case: Record, cases: list[Record], name: str) -> float | None:
    """Return the speed-up of ``name`` over pymoe in float32; None if either was not measured."""
    mine = row_of(case, name)
    same = ("clock", "block", "mode", "tokens")
    other = (one for one in cases if one["dtype"] == "float32" and all(one[key] == case[key] for key in same))
    wide = next((row for one in other if (row := ours(one))), None)
    return wide["seconds"]["median"] / mine["seconds"]["median"] if mine and wide else None


def missed(case: Record, cases: list[Record]) -> list[str]:
    """Return the targets that a case missed, in words."""
    found = [f"{row['name']} is WRONG" for row in case["rows"] if row["verdict"] != "close"]
    row = ours(case)
    if row is None:
        return [*found, "pymoe was not measured"]
    if row["speed_up"] and row["speed_up"]["median"] < SPEED_UP:
        found.append(f"{SPEED_UP:.1f}x transformers")
    share = row["of"].get(limit_of(case))
    if (wanted := wanted_share(case)) and share and share["median"] < wanted:
        found.append(f"{100 * wanted:.0f} % of {limit_of(case)}")
    if case["mode"] == "decode":
        for name, wanted in QUANTISED.items():
            reached = over_fp32(case, cases, name)
            if reached is not None and reached < wanted:
                found.append(f"{name.removeprefix('pymoe ')} {wanted}x fp32")
    return found


def wanted_share(case: Record) -> float | None:
    """Return the share of the limit that a case should reach; None if it has no such target."""
    if case["mode"] == "decode":
        return OF_READ
    return next((share for rows, share in OF_MM if case["rows_per_expert"] >= rows), None)


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    lines = [*paragraphs(result)]
    cases = result["cases"]
    for clock, title in CLOCKS.items():
        if chosen := [case for case in cases if case["clock"] == clock]:
            lines += ["", f"## {title}", "", *as_markdown(summary(chosen))]
            for block in dict.fromkeys(case["block"] for case in chosen):
                of_block = [case for case in chosen if case["block"] == block]
                lines += ["", f"### {of_block[0]['title']}, {clock} clock", "", *as_markdown(details(of_block))]
                lines += ["", *left_out(of_block)]
    return "\n".join(lines) + "\n"


def paragraphs(result: Record) -> list[str]:
    """Return the introduction: the commands, the machine, the method and the memory's bandwidth."""
    facts, runs = result["environment"], result["runs"]
    made = " and ".join(f"`{command}`" for command in dict.fromkeys(run["command"] for run in runs))
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers"))
    threads = {run["clock"]: run["threads"] for run in runs}
    reads = []
    for clock in dict.fromkeys(run["clock"] for run in runs):
        rates = [max(run["bandwidth"]["rates"].values()) / 1e9 for run in runs if run["clock"] == clock]
        names = dict.fromkeys(run["bandwidth"]["name"] for run in runs if run["clock"] == clock)
        between = f"{min(rates):.1f}" if len(rates) == 1 else f"{min(rates):.1f} to {max(rates):.1f}"
        reads.append(f"{between} GB/s by the {clock} clock on {threads[clock]} thread(s) ({', '.join(names)})")
    loads = [value for run in runs for value in run["load"]]
    return [
        f"Made by {made} on {facts['date'][:10]}: {facts['cpu']} ({', '.join(facts['cpu_flags'])}), {facts['cores']} "
        f"cores, last-level cache {facts['cache_bytes'] / 2**20:.0f} MiB, {facts['memory_gib']} GiB; kernels of pymoe "
        f"for {facts['cpu_isa']}, {versions}; load average {min(loads)} to {max(loads)}.",
        "",
        ABOUT,
        "",
        f"Memory was read with {'; '.join(reads)}.",
    ]


def call_of(case: Record) -> str:
    """Return the mode and the number of tokens of a case, in words."""
    return f"{case['mode']} T {case['tokens']}"


def summary(cases: list[Record]) -> Table:
    """Return a table with one row per case: pymoe compared with the best of transformers and with the limit."""
    rows = []
    for case in cases:
        row, whole = ours(case), row_of(case, PYMOE[1])
        best = row_of(case, case["best"]) if case["best"] else None
        quantised = (over_fp32(case, cases, name) for name in QUANTISED)
        rows.append(
            [
                case["title"].split(":")[0],
                case["dtype"],
                call_of(case),
                f"{case['rows_per_expert']:.3g}",
                f"{time_with_spread(best['seconds'])} {best['name'].split()[-1]}" if best else "-",
                time_with_spread(row["seconds"]) if row else "-",
                times(row["speed_up"]["median"] if row and row["speed_up"] else None),
                share(row, limit_of(case)),
                times(whole["speed_up"]["median"] if whole and whole["speed_up"] else None),
                *(times(value) for value in quantised),
                ", ".join(missed(case, cases)) or "-",
            ]
        )
    heading = ["block", "dtype", "call", "rows an expert", "best of transformers", "pymoe", "speed-up", "of limit"]
    heading += ["nn.MoE", "int8 / fp32", "int4 / fp32", "missed"]
    return Table(heading, rows, frozenset({"block", "dtype", "call", "missed"}), frozenset({"WRONG"}))


def times(value: float | None) -> str:
    """Return a speed-up as text."""
    return "-" if value is None else f"{value:.2f}x"


def share(row: Record | None, limit: str) -> str:
    """Return the share of a limit that a contender reaches, as text."""
    found = row["of"].get(limit) if row else None
    return f"{100 * found['median']:.0f} % of {limit}" if found else "-"


def details(cases: list[Record]) -> Table:
    """Return a table with one row per case and a column for each contender and limit."""
    names = [name for name in (*TRANSFORMERS, *PYMOE, *QUANTISED, KT_KERNEL) if any(row_of(c, name) for c in cases)]
    limits = [name for name in LIMITS if any(name in case["limits"] for case in cases)]
    rows = [
        [
            case["dtype"],
            call_of(case),
            *(cell(row_of(case, name)) for name in names),
            *(time_with_spread(case["limits"].get(name)) for name in limits),
        ]
        for case in cases
    ]
    heading = ["dtype", "call", *(name.removeprefix("transformers ") for name in names)]
    return Table([*heading, *(LIMITS[name] for name in limits)], rows, frozenset({"dtype", "call"}))


def cell(row: Record | None) -> str:
    """Return a contender's time and error."""
    if row is None:
        return "-"
    once = " (once)" if row["seconds"]["rounds"] == 1 else ""
    wrong = "" if row["verdict"] == "close" else f" {row['verdict']}"
    return f"{time_with_spread(row['seconds'])}{once}; error {row['error']:.0e}{wrong}"


def left_out(cases: list[Record]) -> list[str]:
    """Return lines about the contenders that were left out, with reasons and cases."""
    places: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for one in case["absent"]:
            places.setdefault((one["name"], one["reason"]), []).append(f"{case['dtype']} {call_of(case)}")
    return [
        f"- {name}: left out{'' if len(where) == len(cases) else ' in ' + ', '.join(where)}; {reason}"
        for (name, reason), where in places.items()
    ]
