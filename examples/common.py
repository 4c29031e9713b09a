"""Code that the examples share: checks for missing packages, command lines, records, text, and comparison of runs."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

EXTRAS = ("rich", "matplotlib", "safetensors")
INTERRUPTED = 130  # the shell's exit status after Ctrl-C
FILE_NAME = "record.json"


def require(names: Iterable[str] = EXTRAS, install: Iterable[str] | None = None) -> None:
    """If a package is missing, exit with one line that holds the command to install it.

    Args:
        names: the packages to import.
        install: the name to install, if it differs.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if "pymoe" in missing:
        sys.exit("error: this example needs pymoe: python -m pip install --no-build-isolation -e .   (in the checkout)")
    if missing:
        packages = " ".join(install or missing)
        sys.exit(f"error: this example needs {', '.join(missing)}: python -m pip install {packages}")


require(("pymoe",))

import torch
from torch import Tensor, nn

from pymoe.pipe import Pipe
from pymoe.pipe.schedules import Record, build, mean_times, simulate, text


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has the first paragraph of ``description`` above the options, and the rest below."""
    head, _, tail = (description or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=head, epilog=tail, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def tell(found: Mapping[str, bool]) -> int:
    """Print each check in words, with its result; return the exit status, 0 if all hold."""
    for words, holds in found.items():
        print(f"{'yes' if holds else 'NO '}  {words}")
    return 0 if all(found.values()) else 1


def tell_losses(alone: list[float], losses: list[float], column: str, tolerance: float, first: int = 1) -> int:
    """Print the losses of one process and of several, step by step from ``first`` on; return the exit status.

    They must not differ by more than ``tolerance`` nats, and must fall.
    """
    print(f"        loss: one process{column:>10}   difference")
    for step, (one, other) in enumerate(zip(alone, losses, strict=True), start=first):
        print(f"step {step:3d}       {one:10.6f} {other:10.6f}   {abs(one - other):8.1e}")
    apart = max(abs(one - other) for one, other in zip(alone, losses, strict=True))
    print()
    return tell(
        {
            f"losses differ by at most {apart:.1e} nats (allowed: {tolerance:g})": apart <= tolerance,
            f"the model learns: {losses[0]:.2f} nats at first, {losses[-1]:.2f} in the end": losses[-1] < losses[0],
        }
    )


def at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        return value

    parse.__name__ = "int"  # argparse shows this name if the text is not a number
    return parse


def free_folder(name: str) -> Path:
    """Return the first folder of runs/name, runs/name-2, ... that does not exist."""
    number, folder = 1, Path("runs", name)
    while folder.exists():
        number += 1
        folder = Path("runs", f"{name}-{number}")
    return folder


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Yield a list of received signals: Ctrl-C or SIGTERM requests a stop after the current step; a second one stops at
    once.
    """
    made: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if made:
            raise KeyboardInterrupt
        made.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield made
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_record(record: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    text = json.dumps(record, indent=1)
    # A list of numbers on one line. Text cannot be hit: JSON writes a line break inside a string as two characters.
    text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: " ".join(match.group().split()), text)
    path.write_text(text + "\n")
    return path


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a run's folder, or of a record's file."""
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


HELD_BACK = 0.1
REPEATED_PARAGRAPH_MIN = 80


class TextError(Exception):
    """Raised if the text cannot be used for training; the message says why in one line."""


@dataclass(frozen=True)
class Text:
    name: str  # a file's name without its folder
    sha256: str
    train: Tensor  # uint8, the first nine tenths
    validation: Tensor  # uint8, the last tenth


def load_text(path: str, context: int) -> Text:
    """Read the file ``path``, or Python's own manual if ``path`` is empty."""
    if path:
        try:
            data, name = Path(path).read_bytes(), Path(path).name
        except OSError as error:
            raise TextError(f"--text {path}: {error.strerror}") from error
    else:
        data, name = python_manual(), "pydoc_data.topics"
    cut = len(data) - int(len(data) * HELD_BACK)
    if len(data) - cut <= context:
        needed = int((context + 1) / HELD_BACK) + 1
        raise TextError(
            f"{name} has {len(data):,} bytes, too few: with --context {context} the held-back last tenth must hold "
            f"one window, which takes {needed:,} bytes"
        )
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(name, hashlib.sha256(data).hexdigest(), tensor[:cut], tensor[cut:])


def python_manual() -> bytes:
    """Return the topics of the Python manual that ``help()`` shows, concatenated.

    Topics include one another, so about a fifth of the text occurs twice. Only the first copy of a paragraph is kept,
    since otherwise the held-back part would contain sentences seen in training.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for paragraph in "\n".join(topics.values()).split("\n\n"):
        if len(paragraph) >= REPEATED_PARAGRAPH_MIN:
            if paragraph in seen:
                continue
            seen.add(paragraph)
        kept.append(paragraph)
    return "\n\n".join(kept).encode()


class Batches:
    """Draws shuffled windows of the training text; offset and order differ in every epoch."""

    def __init__(self, data: Tensor, context: int, batch_size: int, seed: int) -> None:
        self._data, self._context, self._batch_size, self._seed = data, context, batch_size, seed
        # One window fewer than the text holds, so that all windows and the last byte's target fit at any offset.
        self.windows_per_epoch = data.numel() // context - 1
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of step ``step`` (0-based), both (batch, context) int64."""
        first = step * self._batch_size
        starts = torch.stack([self._start(index) for index in range(first, first + self._batch_size)])
        windows = self._data[starts[:, None] + torch.arange(self._context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _start(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.windows_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = torch.randint(self._context, (1,), generator=generator)
            order = torch.randperm(self.windows_per_epoch, generator=generator)
            self._epoch, self._starts = epoch, offset + order * self._context
        return self._starts[position]


def validation_windows(data: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return consecutive windows of the held-back text, (windows, context), so that each byte is predicted once.

    A byte is predicted from the earlier bytes of its window. A remainder that fills no window is left out.
    """
    count = (data.numel() - 1) // context
    flat = data[: count * context + 1].long()
    return flat[:-1].view(count, context), flat[1:].view(count, context)


@dataclass
class History:
    """The measurements of a run, one entry per step."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Return the median seconds of a step, without the first one, which fills caches for the others."""
        return statistics.median(self.seconds[1:] or self.seconds)


class Training(ABC):
    """Trains a model; subclasses define the inputs and the loss of a step."""

    name = "model alone"

    def __init__(self, options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.options, self.model, self.optimizer = options, model, optimizer
        self.history = History()

    @abstractmethod
    def batch(self, data: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step."""

    @abstractmethod
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one micro-batch: the mean over its rows."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        """Add gradients to the parameters, and return the mean loss."""
        total = 0.0
        chunks = self.options.micro_batches
        for x, y in zip(inputs.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
            share = len(x) / len(inputs)
            loss = self.loss(x, y)
            (loss * share).backward()
            total += loss.item() * share
        return total

    def step(self, data: Any) -> None:
        """Make one optimizer step."""
        inputs, targets = self.batch(data, len(self.history.loss))
        start = time.perf_counter()
        loss = self.gradients(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.seconds.append(time.perf_counter() - start)
        self.history.loss.append(loss)


class InPipeline(Training):
    """Trains a model in a pipe; subclasses define how the pipe is called."""

    pipe: Pipe
    _last: Record | None = None

    @abstractmethod
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run one step of the pipe; return the mean losses of its micro-batches."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        losses = self.losses(inputs, targets)
        self._last = self.pipe.last_run
        shares = [len(part) / len(inputs) for part in inputs.tensor_split(len(losses))]
        return sum(loss * share for loss, share in zip(losses.tolist(), shares, strict=True))

    @property
    def as_run(self) -> Record:
        """Return the record of the last step."""
        assert self._last is not None, "no step has been made"
        return self._last

    @property
    def as_planned(self) -> Record:
        """Return the plan of the schedule with the measured times of the last step's actions, without any overhead."""
        chunks = min(self.options.micro_batches, self.options.rows)
        plan = simulate(build(self.options.schedule, self.pipe.num_stages, chunks), mean_times(self.as_run))
        return Record(f"{plan.title}, planned", plan.placement, plan.spans)

    def show_schedule(self) -> None:
        """Print the schedule of the last step, as planned and as run."""
        for record in (self.as_planned, self.as_run):
            print(f"{record.summary()}\n{text(record, 150)}")


def take_turns(runs: Sequence[Training], data: Any, dtype: torch.dtype, steps: int) -> None:
    """Train all runs for a number of steps, taking turns, and print their losses."""
    width = max(len(run.name) for run in runs)
    print(f"\n{str(dtype).removeprefix('torch.')}    loss: {'  '.join(f'{run.name:>{width}}' for run in runs)}")
    for step in range(steps):
        for run in runs if step % 2 else reversed(runs):
            run.step(data)
        if step in (0, steps - 1) or (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}        {'  '.join(f'{run.history.loss[-1]:{width}.7f}' for run in runs)}")


def difference(alone: Training, pipelines: Sequence[Training]) -> dict[str, float]:
    """Return the largest absolute differences between pipelines and model: of losses of all steps, and of parameters at
    the end.
    """
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
    """Return checks of the differences for each dtype: a sentence and its result."""
    found = {}
    for dtype, count in steps.items():
        loss, limit = differences[dtype]["loss"], allowed[dtype]
        found[f"{dtype}: losses differ by at most {loss:.1e} in {count} steps (allowed: {limit:g})"] = loss <= limit
    parameter = differences["float64"]["parameter"]
    found[f"float64: parameters differ by at most {parameter:.1e} afterwards (allowed: 1e-10)"] = parameter <= 1e-10
    return found


def print_step_times(record: Mapping[str, Any]) -> None:
    """Print the seconds of a step in every run, and the total seconds."""
    width = max(map(len, record["runs"]))
    for name, run in record["runs"].items():
        print(f"{name:{width}}  a step takes {1e3 * run['median_step_seconds']:.0f} ms")
    print(f"{'in all':{width}}  {record['seconds']:.0f} s\n")
