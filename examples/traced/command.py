"""The command line of pipeline_traced.py, and the runs that it asks for."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from lm.command import INTERRUPTED, at_least, parser_of, tell
from lm.data import Batches, TextError, load_text
from lm.record import write_record
from pipelined.compare import take_turns

from pymoe.pipe.schedules import names, png, text

from .model import ARCHITECTURES
from .plots import plot
from .record import checks, make_record
from .run import CUTS, Pipelined, Run


def main(argv: list[str], description: str) -> int:
    """Train; 0 if all checks hold."""
    options = parse(argv, description)
    torch.set_num_threads(1)  # for each stage, and for the model alone
    start = time.perf_counter()
    try:
        data = load_text(options.text, options.context).train
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    batches = Batches(data, options.context, options.rows, options.seed)
    try:
        exact = train(options, batches, torch.float64, options.exact_steps)
        plain, pipelines = train(options, batches, torch.float32, options.steps)
    except KeyboardInterrupt:
        print("\nstopped")
        return INTERRUPTED
    for run in pipelines:
        show(run)
    record = make_record(options, exact, (plain, pipelines), time.perf_counter() - start)
    found = checks(record)
    record["checks"] = found
    options.out.mkdir(parents=True, exist_ok=True)
    files = [write_record(record, options.out), plot(record, options.out / "losses.png")]
    files += [png(options.out / f"{run.pipe.num_stages}_stages.png", run.as_planned, run.as_run) for run in pipelines]
    print("\n" + "\n".join(map(str, files)) + "\n")
    for name, one in record["runs"].items():
        print(f"{name:11}  a step takes {1e3 * one['median_step_seconds']:.0f} ms")
    print(f"{'in all':11}  {record['seconds']:.0f} s\n")
    return tell(found)


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options."""
    parser = parser_of(description)
    number = at_least(1)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama", help="(default: llama)")
    parser.add_argument("--cut", choices=CUTS, default="parameters", help="what stages share (default: parameters)")
    parser.add_argument("--stages", type=at_least(2), nargs="+", default=[2, 4], metavar="P", help="(default: 2 4)")
    parser.add_argument("--schedule", choices=names(), default="1f1b", help="(default: 1f1b)")
    parser.add_argument(
        "--checkpoint", choices=("always", "except_last", "never"), default="never", help="(default: never)"
    )
    parser.add_argument("--micro-batches", type=number, default=8, metavar="M", help="of a step (default: 8)")
    parser.add_argument("--rows", type=number, default=20, metavar="N", help="windows of a step (default: 20)")
    parser.add_argument("--steps", type=number, default=40, metavar="N", help="in float32 (default: 40)")
    parser.add_argument("--exact-steps", type=number, default=3, metavar="N", help="in float64 (default: 3)")
    parser.add_argument("--width", type=at_least(32), default=96, metavar="H", help="of the model (default: 96)")
    parser.add_argument("--layers", type=number, default=6, metavar="L", help="of the model (default: 6)")
    parser.add_argument("--context", type=at_least(4), default=96, metavar="C", help="bytes of a window (default: 96)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, metavar="LR", help="(default: 3e-3)")
    parser.add_argument("--text", default="", metavar="FILE", help="to train on (default: the Python manual)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline_traced"), metavar="DIR", help="for the results")
    options = parser.parse_args(argv)
    if options.width % 32:
        parser.error(f"--width must be a multiple of 32, got {options.width}")
    if options.rows < 2 * options.micro_batches:  # the library's code asks whether a batch is a single row
        parser.error(f"--rows must be at least 2 for each of {options.micro_batches} micro-batches, got {options.rows}")
    return options


def train(options: argparse.Namespace, batches: Batches, dtype: torch.dtype, steps: int) -> tuple[Run, list[Pipelined]]:
    """The same steps by the model alone and by every pipeline, in turns."""
    pipelines = [Pipelined(options, dtype, stages) for stages in options.stages]
    alone = Run(options, dtype)
    take_turns([alone, *pipelines], batches, dtype, steps)
    return alone, pipelines


def show(run: Pipelined) -> None:
    """Where it was cut, and the schedule as planned and as run."""
    print(f"\n{run.name}, cut by {run.options.cut}; captured in {run.capture_seconds:.1f} s")
    print(run.pipe.info())
    for record in (run.as_planned, run.as_run):
        print(f"{record.summary()}\n{text(record, 150)}")
