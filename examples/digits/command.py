"""The command line of train_mixture.py, and the two runs that it asks for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lm.command import INTERRUPTED, at_least, parser_of, tell
from lm.record import write_record
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .plots import plot
from .record import checks, make_record
from .run import History, run


def main(argv: list[str], description: str) -> int:
    """Run twice; 0 if all checks hold."""
    options = parse(argv, description)
    torch.set_num_threads(1)
    try:
        with progress("all experts well", options) as step_done:
            healthy = run(options, slow_by=0.0, one_dies=False, step_done=step_done)
        usual = [one.process for name, one in healthy.pools.items() if name.endswith("_forward")]
        slow_by = (options.slow - 1) * sum(one.sum for one in usual) / sum(one.count for one in usual)
        with progress(f"one slower by {1e3 * slow_by:.0f} ms, one dying", options) as step_done:
            faulty = run(options, slow_by=slow_by, one_dies=True, step_done=step_done)
    except KeyboardInterrupt:
        print("\nstopped")
        return INTERRUPTED
    record = make_record(options, slow_by, healthy, faulty)
    found = checks(record)
    record["checks"] = {name: bool(holds) for name, holds in found.items()}
    print(f"\n{write_record(record, options.out)}\n{plot(record, options.out / 'train_mixture.png')}\n")
    for name in ("healthy", "faulty"):
        one = record[name]
        print(
            f"{name:8} held back {100 * (one['held_back_accuracy'] or 0):.1f} % right; a step takes "
            f"{one['step_ms']['p50']:.1f} ms, p99 {one['step_ms']['p99']:.1f}, longest {one['step_ms']['longest']:.0f}"
        )
    print()
    return tell(found)


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options."""
    parser = parser_of(description)
    parser.add_argument("--steps", type=at_least(2), default=400, metavar="N", help="of each run (default: 400)")
    parser.add_argument("--rows", type=at_least(1), default=64, metavar="N", help="images of a step (default: 64)")
    parser.add_argument("--experts", type=at_least(4), default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--width", type=at_least(2), default=32, metavar="H", help="of the experts (default: 32)")
    parser.add_argument("--slow", type=float, default=100.0, metavar="X", help="times as slow (default: 100)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.02,
        metavar="S",
        help="seconds for further answers once every image has one (default: 20 ms)",
    )
    parser.add_argument(
        "--timeout", type=float, default=1.0, metavar="S", help="seconds for a forward or backward pass (default: 1)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, metavar="LR", help="of the model (default: 3e-3)")
    parser.add_argument(
        "--expert-learning-rate", type=float, default=3e-3, metavar="LR", help="of the experts (default: 3e-3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/train_mixture"), metavar="DIR", help="for the results")
    parser.add_argument("--plain", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


@contextmanager
def progress(what: str, options: argparse.Namespace) -> Iterator[Callable[[History], None]]:
    """A bar while a run goes on, with its last loss; what it gives is to be called after every step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), disable=options.plain or not sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=options.steps, loss="-")
        yield lambda history: bar.update(task, advance=1, loss=f"{history.loss[-1]:.3f}")
