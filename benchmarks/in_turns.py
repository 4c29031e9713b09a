"""Run one benchmark in two checkouts, in turns, to show which figures are better or worse in this tree.

    python -m benchmarks.in_turns OTHER [--turns N] [--figures REGEX] [--output DIR] BENCHMARK [ARGUMENT ...]

``OTHER`` is the root of another checkout, built for this Python; ``BENCHMARK`` is a benchmark that both trees contain,
such as ``runtime_load``, with its own arguments. Each turn runs it in both trees, in separate processes and alternating
order, and divides this tree's figures by the other's; the table shows each ratio's median and quartiles over the turns.
A figure is any value that the benchmark's JSON gives as a median with its spread. Writes JSON and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.run import as_markdown, command, parser_of, save
from pymoe.bench.environment import environment
from pymoe.bench.report import Table, show
from pymoe.bench.timing import Quartiles

HERE = Path(__file__).parents[1]
TURNS = 5
SPREAD = {"low", "median", "high"}
"""The keys of a figure in a benchmark's JSON."""
Figures = dict[str, float]


def main() -> int:
    """Run the turns; return 1 if a run of the benchmark failed or the trees share no figure."""
    options = parse()
    start = time.perf_counter()
    load_before = environment()["load"]
    trees = {"other": options.other.resolve(), "this": HERE}
    turns: list[dict[str, Figures]] = []
    for number in range(options.turns):
        found = {}
        for name in list(trees)[:: -1 if number % 2 else 1]:
            try:
                found[name] = run(trees[name], options.benchmark, options.arguments)
            except (OSError, RuntimeError) as error:
                print(f"in_turns: {trees[name]}: {error}", file=sys.stderr)
                return 1
        turns.append(found)
        print(f"turn {number + 1} of {options.turns}", file=sys.stderr, flush=True)
    records = compared(turns, re.compile(options.figures))
    if not records:
        print(f"in_turns: no figure of both trees matches {options.figures!r}", file=sys.stderr)
        return 1
    result = {
        "command": command("in_turns"),
        "environment": environment() | {"load": load_before},
        "settings": {"turns": options.turns, "load_after": environment()["load"]},
        "records": records,
        "wall_seconds": round(time.perf_counter() - start, 1),
    }
    save(result, "\n".join(as_markdown(table(records))) + "\n", options.output / f"in_turns_{options.benchmark}")
    show(table(records))
    return 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("in_turns", __doc__)
    parser.add_argument("other", type=Path, metavar="OTHER", help="the root of the checkout to compare with")
    parser.add_argument(
        "--turns", type=int, default=TURNS, metavar="N", help="runs of each tree (default: %(default)s)"
    )
    parser.add_argument("--figures", default="", metavar="REGEX", help="the figures to compare (default: all)")
    parser.add_argument("benchmark", metavar="BENCHMARK", help="a module of benchmarks/ in both trees")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="what BENCHMARK gets")
    options = parser.parse_args()
    for tree in (options.other, HERE):
        if not (tree / "benchmarks" / f"{options.benchmark}.py").is_file():
            parser.error(f"expected a benchmark that both trees have, but {tree} has no {options.benchmark}.py")
    if options.turns < 1:
        parser.error(f"--turns: expected at least 1, got {options.turns}")
    return options


def run(tree: Path, benchmark: str, arguments: list[str]) -> Figures:
    """Run a benchmark of ``tree`` in a process of its own; raise RuntimeError with its last output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--output", folder],
            cwd=tree,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{benchmark} ended with exit status {done.returncode}:\n{done.stderr[-2000:]}")
        return dict(figures(json.loads((Path(folder) / f"{benchmark}.json").read_text())))


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Yield the name and the median of every figure in a benchmark's JSON.

    A name is made of the keys that lead to the figure; a record in a list is named by its strings and whole numbers.
    """
    if isinstance(value, dict):
        if value.keys() >= SPREAD:
            if isinstance(value["median"], float) and value["median"] > 0:
                yield " ".join(path), value["median"]
            return
        for key, part in value.items():
            yield from figures(part, (*path, key))
    elif isinstance(value, list):
        for part in value:
            yield from figures(part, (*path, *identity(part)))


def identity(record: Any) -> list[str]:
    """Return the strings that distinguish a record from the others in its list."""
    if not isinstance(record, dict):
        return []
    named = record.get("case", record.get("cell", record))
    if isinstance(named, str):
        return [named]
    return [
        f"{value} {key}" if isinstance(value, int) else value for key, value in named.items() if is_name(key, value)
    ]


def is_name(key: str, value: Any) -> bool:
    """Return whether an entry of a record says what was measured rather than what the result was."""
    counted = isinstance(value, int) and not isinstance(value, bool) and key != "rounds"
    return counted or (isinstance(value, str) and key not in ("verdict", "failure"))


def compared(turns: list[dict[str, Figures]], wanted: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return a record for each figure that every run contains and whose name matches ``wanted``."""
    common = set.intersection(*(set(one) for turn in turns for one in turn.values()))
    return [
        {
            "figure": name,
            "other": statistics.median(turn["other"][name] for turn in turns),
            "this": statistics.median(turn["this"][name] for turn in turns),
            "ratio": asdict(Quartiles.of([turn["this"][name] / turn["other"][name] for turn in turns])),
        }
        for name in turns[0]["other"]
        if name in common and wanted.search(name)
    ]


def table(records: list[dict[str, Any]]) -> Table:
    """Return a table with one row per figure."""
    rows = [
        [
            record["figure"],
            f"{record['other']:.3g}",
            f"{record['this']:.3g}",
            f"{record['ratio']['median']:.3f}",
            f"{record['ratio']['low']:.3f} to {record['ratio']['high']:.3f}",
        ]
        for record in records
    ]
    return Table(["figure", "other", "this", "this/other", "quartiles"], rows, frozenset(["figure"]))


if __name__ == "__main__":
    sys.exit(main())
