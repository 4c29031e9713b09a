"""The command line of pipeline_unet.py, and the runs that it asks for."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from lm.command import INTERRUPTED, at_least, parser_of, tell
from lm.record import write_record
from pipelined.compare import take_turns

from pymoe.pipe.schedules import names, png, text

from .data import Pictures
from .plots import plot
from .record import checks, make_record
from .run import Pipelined, Run


def main(argv: list[str], description: str) -> int:
    """Train; 0 if all checks hold."""
    options = parse(argv, description)
    torch.set_num_threads(1)  # for each stage, and for the plain loop
    start = time.perf_counter()
    data = Pictures(options.size, options.seed)
    try:
        exact = train(options, data, torch.float64, options.exact_steps)
        plain, pipelines = train(options, data, torch.float32, options.steps)
    except KeyboardInterrupt:
        print("\nstopped")
        return INTERRUPTED
    for run in pipelines:
        show(run)
    record = make_record(options, data, exact, (plain, pipelines), time.perf_counter() - start)
    found = checks(record)
    record["checks"] = {words: bool(holds) for words, holds in found.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    files = [write_record(record, options.out), plot(record, data, pipelines[-1], options.out / "strokes.png")]
    files += [png(options.out / f"{len(run.pipe)}_stages.png", run.as_planned, run.as_run) for run in pipelines]
    print("\n" + "\n".join(map(str, files)) + "\n")
    for name, run in record["runs"].items():
        print(f"{name:10}  a step takes {1e3 * run['median_step_seconds']:.0f} ms")
    print(f"{'in all':10}  {record['seconds']:.0f} s\n")
    return tell(found)


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options."""
    parser = parser_of(description)
    number = at_least(1)
    parser.add_argument("--stages", type=number, nargs="+", default=[2, 4], metavar="P", help="(default: 2 4)")
    parser.add_argument("--schedule", choices=names(), default="1f1b", help="(default: 1f1b)")
    parser.add_argument(
        "--checkpoint", choices=("always", "except_last", "never"), default="never", help="(default: never)"
    )
    parser.add_argument("--micro-batches", type=number, default=8, metavar="M", help="of a step (default: 8)")
    parser.add_argument("--rows", type=number, default=28, metavar="N", help="pictures of a step (default: 28)")
    parser.add_argument("--steps", type=number, default=40, metavar="N", help="in float32 (default: 40)")
    parser.add_argument("--exact-steps", type=number, default=3, metavar="N", help="in float64 (default: 3)")
    parser.add_argument("--size", type=at_least(16), default=32, metavar="S", help="of the pictures (default: 32)")
    parser.add_argument("--width", type=at_least(2), default=8, metavar="C", help="channels at first (default: 8)")
    parser.add_argument("--levels", type=number, default=3, metavar="L", help="of skips (default: 3)")
    parser.add_argument("--profile", type=float, default=0.5, metavar="S", help="seconds to time layers (default: 0.5)")
    parser.add_argument("--learning-rate", type=float, default=2e-2, metavar="LR", help="(default: 2e-2)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline_unet"), metavar="DIR", help="for the results")
    options = parser.parse_args(argv)
    if options.size % (1 << options.levels):
        parser.error(f"--size must be a multiple of {1 << options.levels} for {options.levels} levels")
    if options.rows < options.micro_batches:
        parser.error(f"--rows must be at least --micro-batches, {options.micro_batches}, got {options.rows}")
    if max(options.stages) > 6 * options.levels + 3:
        parser.error(f"--stages must be at most {6 * options.levels + 3}, the number of layers")
    return options


def train(options: argparse.Namespace, data: Pictures, dtype: torch.dtype, steps: int) -> tuple[Run, list[Pipelined]]:
    """The same steps by the plain loop and by every pipeline, in turns."""
    pipelines = [Pipelined(options, dtype, stages) for stages in options.stages]
    alone = Run(options, dtype)
    take_turns([alone, *pipelines], data, dtype, steps)
    return alone, pipelines


def show(run: Pipelined) -> None:
    """The schedule as planned and as run."""
    named = list(run.model._modules)
    parts = [named[sum(run.balance[:i]) : sum(run.balance[: i + 1])] for i in range(len(run.balance))]
    print(f"\n{run.name}, cut by time: {' | '.join(f'{part[0]} .. {part[-1]}' for part in parts)}")
    for record in (run.as_planned, run.as_run):
        print(f"{record.summary()}\n{text(record, 150)}")
