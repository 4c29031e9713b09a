"""``python -m pymoe.pipe.schedules``: simulates schedules, and prints them as pictures and numbers."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from pymoe._common.command_line import CommandLine, file_to_write
from pymoe.pipe.schedules import Times, build, names, options, png, simulate, text
from pymoe.pipe.schedules.record import Record


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the requested schedules. Return the exit status: 0, or 2 after an error."""
    chosen = parser().parse_args(arguments)
    try:
        records = [plan(name, chosen) for name in chosen.name or names()]
        width = chosen.width or shutil.get_terminal_size((160, 24)).columns
        print("\n\n".join(f"{record.summary()}\n{text(record, width)}" for record in records))
        if chosen.png:
            print(f"\n{png(chosen.png, *records)}")
    except (ValueError, ImportError, OSError) as error:
        print(f"pymoe.pipe.schedules: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = CommandLine(
        prog="python -m pymoe.pipe.schedules",
        description="Simulate pipeline schedules: what every worker does when, bubbles, and live activations.",
        epilog="F: forward, B: backward, I and W: backward of inputs and of weights; blanks are bubbles. "
        "In F5b, 5 is the micro-batch, and b the second stage of its worker.",
    )
    top.add_argument("name", nargs="*", help=f"{', '.join(names())}; all, if none is named")
    top.add_argument("--stages", type=int, default=4, metavar="P", help="the model's stages (default: 4)")
    top.add_argument("--micro-batches", type=int, default=8, metavar="M", help="default: 8")
    top.add_argument("--virtual-stages", type=int, metavar="V", help="stages a worker, where a schedule has several")
    top.add_argument("--live-limit", type=int, metavar="N", help="activations a worker may hold at once")
    top.add_argument(
        "--times", type=times, default=Times(), metavar="F,I,W", help="of a stage (default: 1,1,1); B takes I + W"
    )
    top.add_argument("--communication", type=float, default=0.0, metavar="T", help="between workers (default: 0)")
    top.add_argument("--png", type=file_to_write, metavar="FILE", help="draw into FILE (needs matplotlib)")
    top.add_argument("--width", type=int, metavar="COLUMNS", help="of the text (default: the terminal's)")
    return top


def plan(name: str, chosen: argparse.Namespace) -> Record:
    """Return a simulation of schedule ``name``.

    If other schedules were requested, too, ignore the options that this one does not have.
    """
    asked = chosen.name or names()
    given = {"virtual_stages": chosen.virtual_stages, "live_limit": chosen.live_limit}
    if len(asked) > 1:
        given = {option: value for option, value in given.items() if option in options(name)}
    schedule = build(name, chosen.stages, chosen.micro_batches, **given)
    record = simulate(schedule, chosen.times, chosen.communication)
    shape = f"{schedule.stages} stages on {schedule.workers} workers, {schedule.micro_batches} micro-batches"
    return replace(record, title=f"{name}: {shape}")


def times(argument: str) -> Times:
    """Parse ``1,2,1`` as the times of forward, backward of inputs and backward of weights."""
    try:
        forward, backward_input, backward_weight = map(float, argument.split(","))
        return Times(forward, backward_input, backward_weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"three times with commas between them, got {argument!r}") from None


if __name__ == "__main__":
    sys.exit(main())
