"""Handles the options, the record and the files of a run: NAME.json, NAME.md and, if the run draws, NAME.png.

The JSON files are not committed; ``benchmarks/results/`` holds the tables and pictures of selected runs, which state
how they were made.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pymoe.bench.environment import environment
from pymoe.bench.report import Table, plain, write_json

Record = dict[str, Any]
Sections = Iterable[tuple[str, Table]]
"""Tables, each with its heading."""


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


def names_of(known: Iterable[str], separator: str = ",") -> Callable[[str], list[str]]:
    """Return a function that parses a list of names out of ``known``, separated by ``separator``."""
    names = list(known)

    def parsed(text: str) -> list[str]:
        found = text.split(separator)
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(f"expected names out of {', '.join(names)}, got {', '.join(unknown)}")
        return found

    return parsed


class Run:
    """Holds the record of a run, ``result``, and saves it after each measurement.

    Args:
        module: the benchmark, ``benchmarks.module``.
        output: the folder for its files.
        settings: the number of rounds and other settings.
        parts: the lists and dictionaries that the benchmark fills.
    """

    def __init__(self, module: str, output: Path, settings: Record, **parts: Any) -> None:
        self._start = time.perf_counter()
        self.stem = output / module
        self.result: Record = {"command": command(module), "environment": environment(), "settings": settings, **parts}

    def keep(self, markdown: Callable[[Record], str]) -> None:
        """Write the files now, so that an interrupted run keeps its results so far."""
        self.result["settings"]["load_after"] = environment()["load"]
        self.result["wall_seconds"] = round(time.perf_counter() - self._start, 1)
        save(self.result, markdown(self.result), self.stem)


def command(module: str) -> str:
    """Return the command line that repeats this run of ``benchmarks.module``, without its ``--output``."""
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
    """Draw ``stem``.png if matplotlib is installed, and print the names of the files that exist."""
    print(f"\n{result['wall_seconds']} s; {stem}.json, {stem.name}.md", end="")
    try:
        draw(result, stem.with_suffix(".png"))
        print(f", {stem.name}.png")
    except ImportError as error:
        print(f"\n{error}")


def machine(result: Record, threads: str = "one torch thread") -> str:
    """Return the machine and the versions, for the caption of a picture."""
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


def as_report(first: Iterable[str], sections: Sections) -> str:
    """Return a report in Markdown: the lines of ``first``, and every table under its heading in bold type."""
    lines = list(first)
    for heading, table in sections:
        lines += ["", f"**{heading}**", "", *as_markdown(table)]
    return "\n".join(lines) + "\n"


def show_sections(sections: Sections) -> None:
    """Print every table under its heading."""
    for heading, table in sections:
        print(f"\n{heading}\n{plain(table)}")


def spread_of(found: Record, form: str, scale: float = 1.0) -> str:
    """Return median and quartiles, each formatted by ``form``."""
    low, median, high = (form.format(found[key] * scale) for key in ("low", "median", "high"))
    return f"{median} [{low} - {high}]"


def closeness(one: Record) -> str:
    """Return a verdict on results, with the largest error unless they are exact."""
    return f"close {one['error']:.0e}" if one["verdict"] == "close" else str(one["verdict"])
