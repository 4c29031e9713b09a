"""The command line of ``python -m pymoe.bench``."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pymoe._common.command_line import CommandLine
from pymoe._common.seconds import parse_seconds
from pymoe._common.types import FLOATING
from pymoe.bench.compare import change_table, compare
from pymoe.bench.environment import environment, hint
from pymoe.bench.floor import Rates, measure_rates
from pymoe.bench.layer import layer_lines
from pymoe.bench.lines import FULL, QUICK, Effort, Line, lines_of, run_line
from pymoe.bench.operators import OPERATORS
from pymoe.bench.plot import plot
from pymoe.bench.report import (
    CUDA_EXPLANATION,
    EXPLANATION,
    Table,
    correctness,
    run_table,
    show,
    time_with_spread,
    times,
    write_json,
)
from pymoe.bench.timing import WallTimer, timer_for

SCHEMA = 1
"""Version of the JSON that ``run`` writes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status: 0, or 1 if a result was wrong or a call failed.

    The status is 2 if a file or value cannot be used or a package is missing. A command line that cannot be parsed ends
    the process with status 2.
    """
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (OSError, ValueError, ImportError, re.error) as error:
        print(f"pymoe.bench: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommands and their options."""
    top = CommandLine(prog="python -m pymoe.bench", description="Measure pymoe on this machine.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    env = commands.add_parser("env", help="print what was built and what it runs on")
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(run=run_env)

    select = CommandLine(add_help=False)
    select.add_argument("--filter", default="", metavar="REGEX", help="only lines whose name contains a match")
    names = [str(dtype).removeprefix("torch.") for dtype in (*FLOATING, torch.int32, torch.int64)]
    select.add_argument("--dtype", action="append", choices=names, help="only this dtype (may be repeated)")
    select.add_argument("--quick", action="store_true", help="less time a line, large lines left out")

    select.add_argument("--device", default="cpu", choices=["cpu", "cuda"])

    lines = commands.add_parser("list", parents=[select], help="list the lines")
    lines.set_defaults(run=run_list)

    run = commands.add_parser("run", parents=[select], help="measure")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    run.add_argument("--threads", type=positive_int, metavar="N", help="torch's threads (default: torch's own choice)")
    run.add_argument("--budget", type=parse_seconds, metavar="SECONDS", help="time a line, after warm-up")
    run.add_argument(
        "--limit", type=parse_seconds, metavar="SECONDS", help="start no further line after this time in all"
    )
    run.add_argument(
        "--cpu-time",
        action="store_true",
        help="on one thread, count processor time: for a machine where much else is running",
    )
    run.set_defaults(run=run_run)

    diff = commands.add_parser("compare", help="compare two results of run --json")
    diff.add_argument("old", type=Path, metavar="OLD.json")
    diff.add_argument("new", type=Path, metavar="NEW.json")
    diff.set_defaults(run=run_compare)

    picture = commands.add_parser("plot", help="draw a result of run --json")
    picture.add_argument("file", type=Path, metavar="FILE.json")
    picture.add_argument("--output", type=Path, default=Path("."), metavar="DIR")
    picture.set_defaults(run=run_plot)
    return top


def positive_int(text: str) -> int:
    """Parse an integer of at least 1, as an argparse type."""
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def run_env(options: argparse.Namespace) -> int:
    """Run the command ``env``, which prints facts about the build and the machine."""
    facts = environment()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
    if text := hint(facts):
        print(text, file=sys.stderr)
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Run the command ``list``, which prints the selected lines without measuring them."""
    chosen, left_out = selected(options)
    rows = [[line.name, f"{line.bytes / 1e6:.1f}", f"{line.flops / 1e9:.1f}", line.source] for line in chosen]
    show(Table(["line", "MB", "GFLOP", "source of the shape"], rows, frozenset({"line", "source of the shape"})))
    print_left_out(left_out)
    return 0


def run_run(options: argparse.Namespace) -> int:
    """Run the command ``run``, which measures the selected lines; return 1 if a result is wrong or a call failed, else
    0.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    if options.cpu_time and (options.device != "cpu" or options.threads not in (None, 1)):
        raise ValueError("--cpu-time measures one thread on the CPU")
    threads = 1 if options.cpu_time else options.threads
    if threads:
        torch.set_num_threads(threads)
    effort = effort_of(options)
    chosen, left_out = selected(options)
    if not chosen:
        raise ValueError("no line matches: see `python -m pymoe.bench list`")
    device = torch.device(options.device)
    facts = environment()
    start = time.perf_counter()
    timer = WallTimer(time.process_time) if options.cpu_time else timer_for(device)
    dtypes = (line.dtype for line in chosen if line.dtype.is_floating_point)
    rates = measure_rates(device, dtypes, options.quick, timer)
    print(rates_text(facts, rates))
    records: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        "device": options.device,
        "quick": options.quick,
        "clock": "cpu time" if options.cpu_time else "events" if options.device == "cuda" else "wall",
        "seconds_per_line": effort.budget,
        "rounds": effort.rounds,
        "not_measured": [],
    }
    result = {
        "schema": SCHEMA,
        "environment": facts,
        "settings": settings,
        "rates": {
            "copy_bytes_per_second": rates.copy,
            "mm_flops_per_second": {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.mm.items()},
        },
        "lines": records,
    }

    def keep() -> None:
        """Write the results so far to the file of ``--json``, in case the next line ends the process."""
        settings["load_after"] = environment()["load"]
        settings["wall_seconds"] = round(time.perf_counter() - start, 1)
        if options.json:
            write_json(result, options.json)

    keep()
    for number, line in enumerate(chosen, 1):
        if options.limit and time.perf_counter() - start > options.limit:
            settings["not_measured"] = [one.name for one in chosen[number - 1 :]]
            break
        record = run_line(line, device, rates, effort, timer)
        records.append(record)
        keep()
        print(
            f"[{number}/{len(chosen)}] {line.name}: {time_with_spread(record['native'])}, "
            f"{times(record['over_reference'])} the reference, {correctness(record)} {record['correctness']['detail']}",
            file=sys.stderr,
            flush=True,
        )
    keep()
    show(run_table(records))
    print(EXPLANATION + (CUDA_EXPLANATION if options.device == "cuda" else ""))
    print_left_out(left_out)
    if settings["not_measured"]:
        print(f"--limit left out {len(settings['not_measured'])} lines: {'; '.join(settings['not_measured'])}")
    return summary(records)


def run_compare(options: argparse.Namespace) -> int:
    """Run the command ``compare``; return 0 even if lines became slower, because a person must judge the changes."""
    old, new = (load(file) for file in (options.old, options.new))
    for name in ("cpu", "threads", "torch", "cpu_isa", "gpu"):
        if old["environment"].get(name) != new["environment"].get(name):
            print(f"not the same {name}: {old['environment'].get(name)} and {new['environment'].get(name)}")
    changes, only = compare(old, new)
    show(change_table(changes))
    marked = sum(bool(one.marker) for one in changes)
    print(f"{len(changes)} lines compared, {marked} outside the spread; machine: the change of the floors")
    if only:
        print(f"measured in only one of the two: {', '.join(only)}")
    return 0


def run_plot(options: argparse.Namespace) -> int:
    """Run the command ``plot``, which draws a result into files and prints their names."""
    for file in plot(load(options.file), options.output):
        print(file)
    return 0


def load(file: Path) -> dict[str, Any]:
    """Return the result that ``run --json`` wrote to ``file``; raise ValueError if the file contains anything else."""
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{file} is not a result of `python -m pymoe.bench run --json` (schema {SCHEMA})")
    return result


def all_lines() -> list[Line]:
    """Return all lines, in the order in which they are measured."""
    return [*(line for operator in OPERATORS.values() for line in lines_of(operator)), *layer_lines()]


def selected(options: argparse.Namespace) -> tuple[list[Line], list[Line]]:
    """Return the selected lines to measure, and the selected lines that are too large for ``--quick``."""
    pattern = re.compile(options.filter)
    wanted = [
        line
        for line in all_lines()
        if options.device in line.devices
        and pattern.search(line.name)
        and (not options.dtype or str(line.dtype).removeprefix("torch.") in options.dtype)
    ]
    effort = effort_of(options)
    fitting = [line for line in wanted if line.bytes <= effort.most_bytes and line.flops <= effort.most_flops]
    return fitting, [line for line in wanted if line not in fitting]


def effort_of(options: argparse.Namespace) -> Effort:
    """Return the limits for measuring a line: those of ``--quick`` or the usual ones, with the time of ``--budget``."""
    effort = QUICK if options.quick else FULL
    budget = getattr(options, "budget", None)
    return replace(effort, budget=budget) if budget else effort


def print_left_out(lines: Sequence[Line]) -> None:
    """Print the lines that ``--quick`` does not measure."""
    if lines:
        print(f"--quick left out {len(lines)} large lines: {'; '.join(line.name for line in lines)}")


def rates_text(facts: dict[str, Any], rates: Rates) -> str:
    """Return a paragraph of text that describes the machine and its rates."""
    products = ", ".join(f"{str(dtype).removeprefix('torch.')} {rate / 1e9:.3g}" for dtype, rate in rates.mm.items())
    return (
        f"{facts['cpu']}, {facts['threads']} threads, load {facts['load']}, torch {facts['torch']}, "
        f"pymoe's instruction set {facts['cpu_isa']}{', ' + facts['gpu'] if facts['gpu'] else ''}\n"
        f"copy_ {rates.copy / 1e9:.1f} GB/s (read + written); torch.mm GFLOP/s: {products}"
    )


def summary(records: Sequence[dict[str, Any]]) -> int:
    """Print how many lines are correct and how many targets are reached; return 1 if a line is not correct, else 0."""
    bad = [record for record in records if record["correctness"]["verdict"] in ("WRONG", "ERROR")]
    aims = [record["target"]["reached"] for record in records if record["target"]]
    print(f"{len(records)} lines, {len(records) - len(bad)} right; {aims.count(True)} of {len(aims)} targets reached")
    for record in bad:
        print(f"{record['operator']} {record['case']} {record['dtype']}: {record['correctness']['detail']}")
    return 1 if bad else 0
