"""What the examples share: packages that may be missing, command lines, records, and runs side by side."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

EXTRAS = ("rich", "matplotlib", "safetensors")
INTERRUPTED = 130  # the shell's exit status after Ctrl-C
FILE_NAME = "record.json"


def require(names: Iterable[str] = EXTRAS, install: Iterable[str] | None = None) -> None:
    """Leave with one line that holds the command to run when a package is missing.

    Args:
        names: what is imported.
        install: what brings it, if that is called otherwise.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if "pymoe" in missing:
        sys.exit("error: this example needs pymoe: python -m pip install --no-build-isolation -e .   (in the checkout)")
    if missing:
        packages = " ".join(install or missing)
        sys.exit(f"error: this example needs {', '.join(missing)}: python -m pip install {packages}")


require(("pymoe",))

import torch
from torch import nn


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help has the first paragraph of ``description`` above the options, and the rest below."""
    head, _, tail = (description or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=head, epilog=tail, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def tell(found: Mapping[str, bool]) -> int:
    """Print what a run must show, in words, and whether it did; 0 if all holds, the exit status."""
    for words, holds in found.items():
        print(f"{'yes' if holds else 'NO '}  {words}")
    return 0 if all(found.values()) else 1


def at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        return value

    parse.__name__ = "int"  # argparse names it when the text is no number
    return parse


def write_record(record: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    text = json.dumps(record, indent=1)
    # A list of numbers on one line. Text cannot be hit: JSON writes a line break inside a string as two characters.
    text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: " ".join(match.group().split()), text)
    path.write_text(text + "\n")
    return path


def read_record(folder: Path) -> dict[str, Any]:
    """Of a run's folder, or of a record's file itself."""
    path = folder if folder.is_file() else folder / FILE_NAME
    return json.loads(path.read_text())


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "load_average_at_end": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass
class History:
    """What a run measured, one entry a step."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Of a step; the first is left out, which makes what later ones find."""
        return statistics.median(self.seconds[1:] or self.seconds)


Data = TypeVar("Data", contravariant=True)


class Run(Protocol[Data]):
    """A model in training."""

    name: str
    model: nn.Module
    history: History

    def step(self, data: Data) -> None:
        """One optimizer step."""


def take_turns(runs: Sequence[Run[Data]], data: Data, dtype: torch.dtype, steps: int) -> None:
    """So many steps of every run, with losses printed on the way."""
    width = max(len(run.name) for run in runs)
    print(f"\n{str(dtype).removeprefix('torch.')}    loss: {'  '.join(f'{run.name:>{width}}' for run in runs)}")
    for step in range(steps):
        for run in runs if step % 2 else reversed(runs):
            run.step(data)
        if step in (0, steps - 1) or (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}        {'  '.join(f'{run.history.loss[-1]:{width}.7f}' for run in runs)}")


def difference(alone: Run[Any], pipelines: Sequence[Run[Any]]) -> dict[str, float]:
    """The largest absolute differences of pipelines from the model: losses of all steps, parameters in the end."""
    return {
        "loss": max(abs(a - b) for run in pipelines for a, b in zip(alone.history.loss, run.history.loss, strict=True)),
        "parameter": max(
            float((a - b).detach().abs().max())
            for run in pipelines
            for a, b in zip(alone.model.parameters(), run.model.parameters(), strict=True)
        ),
    }


def are_equal(
    differences: Mapping[str, Mapping[str, float]], steps: Mapping[str, int], allowed: Mapping[str, float]
) -> dict[str, bool]:
    """What the runs must show of their differences, by dtype, in words, and whether they did."""
    found = {}
    for dtype, count in steps.items():
        loss, limit = differences[dtype]["loss"], allowed[dtype]
        found[f"{dtype}: losses differ by at most {loss:.1e} in {count} steps (allowed: {limit:g})"] = loss <= limit
    parameter = differences["float64"]["parameter"]
    found[f"float64: parameters differ by at most {parameter:.1e} afterwards (allowed: 1e-10)"] = parameter <= 1e-10
    return found
