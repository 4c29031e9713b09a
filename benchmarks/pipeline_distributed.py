"""Time captured models in one process and in several: pymoe's stages and torch's own, under the same schedules.

    python -m benchmarks.pipeline_distributed [--quick] [--works NAME,...] [--schedules NAME,...] [--output DIR]

The same model is captured and cut at the same layers by ``pymoe.pipeline`` and by torch's ``pipeline``; torch's
schedules run both kinds of stages on 2 and 4 processes over gloo. They are compared with the model alone in one
process, and with pymoe's pipe in one process, one thread per stage. Gradients are checked before anything is timed;
systems take turns. Writes JSON, Markdown tables and a picture. ``make bench-distributed`` sets everything up.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks.common.run import Run, illustrate, names_of, parser_of
from benchmarks.pipeline import measure, report
from benchmarks.pipeline.torch_peer import Ranks
from benchmarks.pipeline.traced_systems import OURS, systems
from benchmarks.pipeline.traced_work import MODELS, TracedCase

WORKERS, MICRO_BATCHES = (2, 4), (4, 8)
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")
ROUNDS, QUICK_ROUNDS = 7, 2
Record = dict[str, Any]


def main() -> int:
    """Measure all cases; return 1 if pymoe's gradients are wrong or pymoe could not be measured."""
    options = parse()
    torch.set_num_threads(1)
    ranks: dict[int, Ranks] = {}
    everyone = systems(ranks, options.schedules)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    run = Run(
        "pipeline_distributed",
        options.output,
        {"rounds": rounds, "quick": options.quick},
        systems={one.name: {"about": one.about, "version": one.version()} for one in everyone},
        cells=[],
    )
    result = run.result
    try:
        for case in cases(options):
            result["cells"].append(measure.cell(case, everyone, rounds))
            run.keep(report.markdown)
            print(f"{case}: measured", file=sys.stderr, flush=True)
    finally:
        for one in ranks.values():
            one.close()
    report.show(result)
    illustrate(result, report.draw, run.stem)
    return int(failed(result))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("pipeline_distributed", __doc__)
    parser.add_argument("--quick", action="store_true", help="2 processes, 4 micro-batches, few rounds: some seconds")
    parser.add_argument(
        "--works", type=names_of(MODELS), default=tuple(MODELS), metavar="NAME,...", help="which models"
    )
    parser.add_argument(
        "--schedules", type=names_of(OURS), default=SCHEDULES, metavar="NAME,...", help=f"of torch: {', '.join(OURS)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"values behind a median (default: {ROUNDS})")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[TracedCase]:
    """Return the cases to measure."""
    sizes = [(2, 4)] if options.quick else [(workers, count) for workers in WORKERS for count in MICRO_BATCHES]
    return [TracedCase(work, *size) for work in options.works for size in sizes]


def failed(result: Record) -> bool:
    """Return whether pymoe's gradients were wrong or pymoe failed; failures of its peers show in the tables only."""
    return any(
        one["failure"] or one.get("verdict") == "WRONG"
        for record in result["cells"]
        for name, one in record["systems"].items()
        if not name.startswith("torch ")
    )


if __name__ == "__main__":
    sys.exit(main())
