"""What a benchmark leaves in its folder: NAME.json with every figure, NAME.md with tables, NAME.png where it draws one.

The JSON is raw material and stays out of the repository; ``benchmarks/results/`` keeps tables and pictures of chosen
runs, which say how they were made.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymoe.bench.report import Table, write_json

Record = dict[str, Any]
WORDS = {True: "met", False: "missed", None: "not measured"}
"""Whether a target was met."""


def parser_of(module: str, about: str) -> argparse.ArgumentParser:
    """Return a parser for ``python -m benchmarks.module`` with ``--output``, ``build/module`` by default."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=about.split("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build") / module,
        metavar="DIR",
        help="for JSON, tables and pictures (default: %(default)s)",
    )
    return parser


def command(module: str) -> str:
    """Return the command line that runs ``benchmarks.module`` as this process does, without its ``--output``."""
    arguments = sys.argv[1:]
    if "--output" in arguments:
        at = arguments.index("--output")
        del arguments[at : at + 2]
    return shlex.join(["python", "-m", f"benchmarks.{module}", *arguments])


def save(result: Record, markdown: str, stem: Path) -> None:
    """Write ``stem``.json and ``stem``.md."""
    write_json(result, stem.with_suffix(".json"))
    stem.with_suffix(".md").write_text(markdown)


def illustrate(result: Record, draw: Callable[[Record, Path], None], stem: Path) -> None:
    """Draw ``stem``.png if matplotlib is installed, and print which files there are."""
    print(f"\n{result['wall_seconds']} s; {stem}.json, {stem.name}.md", end="")
    try:
        draw(result, stem.with_suffix(".png"))
        print(f", {stem.name}.png")
    except ImportError as error:
        print(f"\n{error}")


def machine(result: Record, threads: str = "one torch thread") -> str:
    """Return what computed, for the caption of a picture."""
    facts = result["environment"]
    return f"{facts['cpu']}, {facts['cores']} cores, {threads}, torch {facts['torch']}, {facts['date'][:10]}"


def measured(result: Record, about: str, threads: str = "one torch thread") -> str:
    """Return the first paragraph of a report: the command, the date, the machine, versions, its load, and ``about``."""
    facts, settings = result["environment"], result["settings"]
    return (
        f"Made by `{result['command']}` on {facts['date'][:10]}: {facts['cpu']}, {facts['cores']} cores, {threads}, "
        f"torch {facts['torch']}, Python {facts['python']}; load average before and after {facts['load'][0]}, "
        f"{settings['load_after'][0]}. {about}"
    )


def as_markdown(table: Table) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(table.heading) + " |"]
    lines.append("|" + "|".join("---" if name in table.left else "--:" for name in table.heading) + "|")
    return lines + ["| " + " | ".join(cells) + " |" for cells in table.rows]
