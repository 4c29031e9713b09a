"""Measure many clients that call one expert with a few rows each: pymoe's runtime, its peers and the bounds.

    python -m benchmarks.runtime_load [--quick] [--systems NAME,...] [--cells REGEX] [--profile] [--output DIR]

Clients are closed-loop (threads, or coroutines of one event loop); every system gets the same requests for the same
expert, on one torch thread. Measurement windows of all systems take turns, answers are checked, and ratios are taken
between windows of the same round. Writes JSON, Markdown tables and pictures. `make bench-runtime` sets everything up,
including hivemind's environment.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.comparison import from_turn
from benchmarks.common.run import Run, illustrate, names_of, parser_of
from benchmarks.runtime import profile, report
from benchmarks.runtime.clients import Effort, Sample
from benchmarks.runtime.hivemind_peer import PYTHON
from benchmarks.runtime.scenario import Cell, all_cells
from benchmarks.runtime.serving import Contender
from benchmarks.runtime.systems import POOL, PYMOE, System, all_systems
from pymoe.bench.report import in_a_line
from pymoe.bench.timing import Quartiles

FULL, QUICK = Effort(0.05, 0.22), Effort(0.03, 0.15)
ROUNDS, QUICK_ROUNDS, FEWEST_ROUNDS = 5, 3, 2
ENOUGH = 12.0
"""Seconds of measurement after which slow cells get no round beyond FEWEST_ROUNDS."""
QUICK_CELLS = r"small .*ward 1 row (1|64) thread|small forward 1 row 64 coroutines|big forward 1 row 8 threads"
Record = dict[str, Any]


def main() -> int:
    """Run the chosen cells; return 1 if any answer is wrong, or if pymoe was to be measured and could not be."""
    options = parse()
    torch.set_num_threads(1)
    systems = all_systems(options.hivemind)
    chosen = {name: systems[name] for name in options.systems}
    pattern = re.compile(options.cells or (QUICK_CELLS if options.quick else ""))
    cells = [cell for cell in all_cells() if pattern.search(str(cell))]
    effort = QUICK if options.quick else FULL
    effort = replace(effort, seconds=options.seconds or effort.seconds)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    run = Run("runtime_load", options.output, asdict(effort) | {"rounds": rounds, "quick": options.quick})
    result, present = run.result, introduce(chosen)
    result |= {"systems": present, "cells": [], "targets": []}
    for expert, own in groupby(cells, lambda cell: cell.expert):
        contenders = open_all(expert, chosen, present)
        for _, group in groupby(own, lambda cell: replace(cell, kind="")):
            result["cells"] += measure_group(list(group), chosen, contenders, effort, rounds)
            result["targets"] = report.judged(result["cells"])
            run.keep(report.markdown)
        for one in contenders.values():
            one.close()
    if options.profile:
        profile.add(result, cells, chosen=bool(options.cells))
        run.keep(report.markdown)
    report.show(result)
    illustrate(result, report.draw, run.stem)
    return int(failed(result))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("runtime_load", __doc__)
    parser.add_argument("--quick", action="store_true", help="few cells and short windows, less than a minute")
    names = [name for name in all_systems(PYTHON) if name != POOL]
    parser.add_argument(
        "--systems",
        type=names_of(all_systems(PYTHON)),
        default=names,
        metavar="NAME,...",
        help=f"who is measured (default: {','.join(names)}; also: {POOL})",
    )
    parser.add_argument("--cells", metavar="REGEX", help="cells, as 'small forward 16 rows 64 threads'")
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"windows of each system in a cell, fewer in slow ones (default: {ROUNDS})",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help=f"of a window (default: {FULL.seconds})")
    parser.add_argument("--profile", action="store_true", help="say where pymoe's time goes, for cells below a target")
    parser.add_argument("--hivemind", type=Path, default=PYTHON, metavar="PYTHON", help="the interpreter that has it")
    return parser.parse_args()


def introduce(systems: dict[str, System]) -> dict[str, Record]:
    """Return each system's version and any fault in its answers, or the reason why it is left out."""
    present: dict[str, Record] = {}
    for system in systems.values():
        record = {"about": system.about, "version": "", "fault": "", "absent": ""}
        try:
            record["version"] = system.version()
            record["fault"] = system.check()
        except Exception as error:  # a peer that fails here must not keep the others from being measured
            record["absent"] = in_a_line(error)
        present[system.name] = record
        print(f"{system.name} {record['version']}: {verdict_of(record)}", file=sys.stderr, flush=True)
    return present


def verdict_of(record: Record) -> str:
    """Return a system's record in a few words."""
    if record["absent"]:
        return f"left out, {record['absent']}"
    return f"WRONG, {record['fault']}" if record["fault"] else "answers checked"


def open_all(expert: str, systems: dict[str, System], present: dict[str, Record]) -> dict[str, Contender]:
    """Open all systems for one expert; return those that can be measured."""
    contenders = {}
    for system in systems.values():
        if present[system.name]["absent"]:
            continue
        try:
            contenders[system.name] = system.open(expert)
        except Exception as error:
            present[system.name]["absent"] = in_a_line(error)
    return contenders


def measure_group(
    cells: list[Cell], systems: dict[str, System], contenders: dict[str, Contender], effort: Effort, rounds: int
) -> list[Record]:
    """Measure windows of all systems in turns, on cells that differ only in the kind of clients."""
    turns = [(cell, name) for cell in cells for name in contenders if cell.kind in kinds_of(systems[name], cells)]
    samples = windows(turns, contenders, effort, rounds)
    records = []
    for cell in cells:
        bounds = {turn[1]: own for turn, own in samples.items() if turn[0] == cells[0]}
        found = bounds | {turn[1]: own for turn, own in samples.items() if turn[0] == cell}
        records.append(record_of(cell, found))
        print(report.in_short(records[-1]), file=sys.stderr, flush=True)
    return records


def windows(
    turns: list[tuple[Cell, str]], contenders: dict[str, Contender], effort: Effort, rounds: int
) -> dict[tuple[Cell, str], list[Sample]]:
    """Return the samples of each cell and contender; these take turns, and slow cells get fewer rounds.

    A contender that fails is removed from ``contenders`` and not measured again. It is not closed: its threads or its
    process may hang.
    """
    samples: dict[tuple[Cell, str], list[Sample]] = {turn: [] for turn in turns}
    start = time.perf_counter()
    for i in range(rounds):
        if i >= FEWEST_ROUNDS and time.perf_counter() - start > ENOUGH:
            break
        for turn in from_turn(turns, i):
            cell, name = turn
            if name in contenders:
                try:
                    samples[turn].append(contenders[name].measure(cell, effort))
                except Exception as error:
                    samples[turn].append(Sample(0, 0, 0, 0, 0, error=in_a_line(error)))
                    del contenders[name]
    return samples


def kinds_of(system: System, cells: list[Cell]) -> tuple[str, ...]:
    """Return the kinds of clients to measure a system with: only the first if the kind makes no difference to it."""
    return system.kinds if len(system.kinds) > 1 else (cells[0].kind,)


def record_of(cell: Cell, found: dict[str, list[Sample]]) -> Record:
    """Return a cell's figures: medians and quartiles over the rounds, ratios taken round by round."""
    systems: Record = {}
    for name, samples in found.items():
        good = [sample for sample in samples if sample.rate > 0]
        if not good:
            systems[name] = {"verdict": next((s.error for s in samples if s.error), "no answers")}
            continue
        systems[name] = {
            "verdict": verdict(samples),
            "rate": asdict(Quartiles.of([sample.rate for sample in good])),
            "p50": asdict(Quartiles.of([sample.p50 for sample in good])),
            "p99": asdict(Quartiles.of([sample.p99 for sample in good])),
            "cpu": asdict(Quartiles.of([sample.cpu for sample in good])),
            "rounds": len(good),
            "requests": sum(sample.requests for sample in good),
            "starved": max(sample.starved for sample in good),
            "over": {
                other: asdict(Quartiles.of([mine.rate / its.rate for mine, its in both]))
                for other, theirs in found.items()
                if other != name
                and (
                    both := [
                        (mine, its)
                        for mine, its in zip(samples, theirs, strict=False)
                        if mine.rate > 0 and its.rate > 0
                    ]
                )
            },
        }
    return {"cell": asdict(cell), "systems": systems}


def verdict(samples: list[Sample]) -> str:
    """Return ``right``, ``WRONG``, or the first error."""
    if any(sample.wrong for sample in samples):
        return "WRONG"
    return next((sample.error for sample in samples if sample.error), "right")


def failed(result: Record) -> bool:
    """Return whether an answer was wrong, or pymoe's figures are incomplete."""
    wrong = any(one["fault"] for one in result["systems"].values())
    for record in result["cells"]:
        for name, one in record["systems"].items():
            wrong |= one["verdict"] == "WRONG" or (name in (PYMOE, POOL) and one["verdict"] != "right")
    measured = {name for record in result["cells"] for name in record["systems"]}
    return wrong or not {PYMOE, POOL}.isdisjoint(result["systems"].keys() - measured)


if __name__ == "__main__":
    sys.exit(main())
