"""Compare pipeline schedules of pymoe, torchgpipe and torch with the simulated ideal.

    python -m benchmarks.pipeline_schedules [--quick] [--works NAME,...] [--systems REGEX] [--profile] [--output DIR]

Stages sleep or multiply matrices, on 2 and 4 workers, with 4 to 16 micro-batches; the benchmark measures the speed-up
of a step over the plain micro-batched run. With stages that do next to nothing, the overhead per stage and micro-batch
is measured. Gradients are checked before anything is timed; systems take turns. Writes JSON, Markdown tables and a
picture. `make bench-pipeline` sets everything up.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import torch

from benchmarks.common.run import Run, illustrate, names_of, parser_of
from benchmarks.pipeline import measure, report
from benchmarks.pipeline.ours import pymoe_systems
from benchmarks.pipeline.profile import profile
from benchmarks.pipeline.systems import SEQUENTIAL, System, in_process
from benchmarks.pipeline.torch_peer import Ranks, on_one_rank, torch_systems
from benchmarks.pipeline.work import Case

WORKS, CHEAP = ("sleep", "compute"), ("tiny", "scale")
WORKERS, MICRO_BATCHES = (2, 4), (4, 8, 16)
CHEAP_MICRO_BATCHES = (8, 16)
ROUNDS, QUICK_ROUNDS = 7, 3
CHEAP_ROUNDS = 2
"""Factor for the number of rounds if stages do next to nothing, since short times are disturbed most."""
Record = dict[str, Any]


def main() -> int:
    """Measure; return 1 if any system's gradients are wrong, or if pymoe was to be measured and failed."""
    options = parse()
    torch.set_num_threads(1)
    ranks: dict[int, Ranks] = {}
    systems = [one for one in everyone(ranks) if chosen(one, options.systems)]
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    run = Run(
        "pipeline_schedules",
        options.output,
        {"rounds": rounds, "cheap_rounds": CHEAP_ROUNDS * rounds, "quick": options.quick},
        systems={one.name: {"about": one.about, "version": version_of(one)} for one in systems},
        **{part: [] for part in ("bookkeeping", "cells", "targets", "profile")},
    )
    result = run.result

    def keep(part: str, record: Record) -> None:
        result[part].append(record)
        result["targets"] = report.judged(result)
        run.keep(report.markdown)
        print(f"{part}: {Case(**record['case'])}: measured", file=sys.stderr, flush=True)

    try:
        for case in cheap_cases(options):
            keep("bookkeeping", measure.bookkeeping(case, by_stages(systems, case, ranks), CHEAP_ROUNDS * rounds))
        for case in cases(options):
            keep("cells", measure.cell(case, systems, rounds))
    finally:
        for one in ranks.values():
            one.close()
    if options.profile:
        sleeping = [case for case in cases(options) if case.work == "sleep"]
        cheap = [case for case in cheap_cases(options) if case.workers == WORKERS[0]]
        result["profile"] = profile(sleeping, cheap)
        run.keep(report.markdown)
    report.show(result)
    illustrate(result, report.draw, run.stem)
    return int(failed(result))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("pipeline_schedules", __doc__)
    parser.add_argument("--quick", action="store_true", help="2 workers, 8 micro-batches, few rounds: some seconds")
    names = (*WORKS, *CHEAP)
    parser.add_argument(
        "--works",
        type=names_of(names),
        default=names,
        metavar="NAME,...",
        help=f"what layers do (default: {','.join(names)})",
    )
    parser.add_argument("--systems", default="", metavar="REGEX", help="who is measured, beside the sequential run")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"values behind a median (default: {ROUNDS})")
    parser.add_argument("--profile", action="store_true", help="say where the time of pymoe's steps goes")
    return parser.parse_args()


def everyone(ranks: dict[int, Ranks]) -> list[System]:
    """Return all systems in the order of the tables, the sequential run first."""
    sequential, *others = in_process()
    return [sequential, *pymoe_systems(), *others, *torch_systems(ranks)]


def chosen(system: System, pattern: str) -> bool:
    """Return whether a system is measured; the sequential run always is."""
    return system.name == SEQUENTIAL or re.search(pattern, system.name) is not None


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases whose speed-up is measured."""
    sizes = [(2, 8)] if options.quick else [(workers, count) for workers in WORKERS for count in MICRO_BATCHES]
    return [Case(work, *size) for work in WORKS if work in options.works for size in sizes]


def cheap_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases whose bookkeeping is measured."""
    sizes = [(2, 8)] if options.quick else [(workers, count) for workers in WORKERS for count in CHEAP_MICRO_BATCHES]
    return [Case(work, *size) for work in CHEAP if work in options.works for size in sizes]


def by_stages(systems: list[System], case: Case, ranks: dict[int, Ranks]) -> dict[str, tuple[System, int]]:
    """Return the systems whose bookkeeping is measured, with their numbers of stages; torch's schedules then have one
    rank, so that nothing is sent.
    """
    found = {one.name: (one, case.workers) for one in systems if not one.name.startswith("torch ")}
    names = {one.name for one in systems}
    everyone = on_one_rank(ranks, case.workers)
    return found | {one.name: (one, stages) for one, stages in everyone if one.name in names}


def version_of(system: System) -> str:
    """Return the system's version, or the reason why it has none."""
    try:
        return system.version()
    except Exception as error:
        return f"(not there: {type(error).__name__})"


def failed(result: Record) -> bool:
    """Return whether gradients were wrong or pymoe could not be measured."""
    ours = [
        one["failure"]
        for part in ("cells", "bookkeeping")
        for record in result[part]
        for name, one in record["systems"].items()
        if name.startswith("pymoe ")
    ]
    return bool(measure.wrong(result)) or any(ours)


if __name__ == "__main__":
    sys.exit(main())
