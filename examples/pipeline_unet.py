"""Trains a U-Net in pipelines of two and four stages, and compares it with a plain loop.

    python examples/pipeline_unet.py                   # less than a minute on two cores
    python examples/pipeline_unet.py --schedule zero-bubble --checkpoint always
    python -m pymoe.pipe.schedules                     # what each schedule plans

The network finds the strokes of handwritten digits (from scikit-learn), several in each picture: rotated, shifted,
faint and noisy. Skip connections lead from every level of the encoder to the same level of the decoder, past the stages
in between. balance_by_time chooses the cuts. All runs start from the same weights and see the same micro-batches, first
in float64, then in float32; their losses must be equal. At the end the program checks the results, and exits with
status 1 if a check fails. It writes a record, example predictions and pictures of the last step to runs/pipeline_unet.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "matplotlib"))
require(("sklearn",), install=("scikit-learn",))

import argparse
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from common import (
    INTERRUPTED,
    InPipeline,
    Training,
    are_equal,
    at_least,
    difference,
    machine_facts,
    parser_of,
    print_step_times,
    take_turns,
    tell,
    write_record,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pymoe
from pymoe.pipe import Pipe
from pymoe.pipe.balance import balance_by_time, profile_sizes
from pymoe.pipe.schedules import names, png
from pymoe.pipe.skip import Namespace, pop, skippable, stash

matplotlib.use("Agg")

HELD_BACK = 360
DIGITS = 3  # number of digits in a picture
SCALES = 2.2, 3.4  # width of a picture divided by the width of a digit: smallest and largest
NOISE = 0.25


class Pictures:
    """Draws composites of the 1797 images of 8 x 8 pixels, 360 of which are held back; ``seed`` determines them."""

    def __init__(self, size: int, seed: int) -> None:
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
        self.held_back, self.train = images[:HELD_BACK], images[HELD_BACK:]
        self.size, self.seed = size, seed

    def draw(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return noisy pictures (rows, 1, size, size), and targets of the same shape: 1 on a stroke, else 0."""
        return self._composites(self.train, torch.Generator().manual_seed(self.seed * 1_000_003 + step), rows)

    def draw_held_back(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return pictures and targets from held-back digits, which are the same in every call."""
        return self._composites(self.held_back, torch.Generator().manual_seed(0), rows)

    def _composites(self, images: Tensor, random: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        chosen = images[torch.randint(len(images), (rows * DIGITS,), generator=random)]
        u = torch.rand(4, rows * DIGITS, generator=random)
        scale = SCALES[0] + (SCALES[1] - SCALES[0]) * u[0]
        angle = (u[1] - 0.5) * math.pi / 3
        shift = (2 * u[2:] - 1) * (1 - 1 / scale)  # the whole digit stays in the picture
        cos, sin = scale * angle.cos(), scale * angle.sin()
        x, y = shift
        turns = torch.stack([cos, -sin, sin * y - cos * x, sin, cos, -sin * x - cos * y], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(turns, [len(chosen), 1, self.size, self.size], align_corners=False)
        placed = F.grid_sample(chosen, grid, align_corners=False).view(rows, DIGITS, 1, self.size, self.size)
        clean = placed.amax(1)
        shade = torch.linspace(-0.3, 0.3, self.size) * (2 * torch.rand(rows, 1, 1, 1, generator=random) - 1)
        noise = NOISE * torch.randn(clean.shape, generator=random)
        return 0.7 * clean + shade + noise, (clean > 0.5).float()


class Convolution(nn.Sequential):
    """(N, inputs, H, W) to (N, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )


@skippable(stash=["features"])
class Down(nn.Module):
    """Halves height and width, and stashes its input for the decoder."""

    def forward(self, x: Tensor) -> Any:
        yield stash("features", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["features"])
class Up(nn.Module):
    """Doubles height and width, and appends the channels that the encoder stashed."""

    def forward(self, x: Tensor) -> Any:
        features = yield pop("features")
        return torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), features], dim=1)


def unet(width: int, levels: int) -> nn.Sequential:
    """Return a network from pictures (N, 1, H, W) to logits of that shape; 2 ** levels must divide H and W."""
    return nn.Sequential(OrderedDict(_layers(width, levels)))


def _layers(width: int, levels: int) -> Iterator[tuple[str, nn.Module]]:
    namespaces = [Namespace() for _ in range(levels)]  # so that every level can stash under the name "features"
    channels = 1
    for level, namespace in enumerate(namespaces):
        wide = width << level
        yield f"in{level}a", Convolution(channels, wide)
        yield f"in{level}b", Convolution(wide, wide)
        yield f"down{level}", Down().isolate(namespace)
        channels = wide
    yield "middle_a", Convolution(channels, 2 * channels)
    yield "middle_b", Convolution(2 * channels, channels)
    for level, namespace in reversed(list(enumerate(namespaces))):
        wide = width << level
        yield f"up{level}", Up().isolate(namespace)
        yield f"out{level}a", Convolution(channels + wide, wide)
        channels = wide // 2 if level else wide
        yield f"out{level}b", Convolution(wide, channels)
    yield "logits", nn.Conv2d(channels, 1, 1)


class Run(Training):
    """Trains the network in a plain loop."""

    name = "plain loop"

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(options.seed)
        self.dtype = dtype
        model = unet(options.width, options.levels).to(dtype)
        super().__init__(options, model, torch.optim.Adam(model.parameters(), lr=options.learning_rate))

    def batch(self, data: Pictures, step: int) -> tuple[Tensor, Tensor]:
        pictures, strokes = data.draw(step, self.options.rows)
        return pictures.to(self.dtype), strokes.to(self.dtype)

    def loss(self, pictures: Tensor, strokes: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.model(pictures), strokes)

    @torch.no_grad()
    def predict(self, pictures: Tensor) -> Tensor:
        """Probabilities of strokes."""
        self.model.eval()
        predicted = self.model(pictures.to(self.dtype)).sigmoid()
        self.model.train()
        return predicted

    @property
    def batches_counted(self) -> set[int]:
        """Return the number of batches that the batch norms have counted."""
        return {int(layer.num_batches_tracked) for layer in self.model.modules() if isinstance(layer, nn.BatchNorm2d)}


class Pipelined(InPipeline, Run):
    """Trains the network in a pipeline of ``stages`` stages; batch norms track statistics of whole mini-batches."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype, stages: int) -> None:
        super().__init__(options, dtype)
        self.name = f"{stages} stages"
        rows = -(-options.rows // options.micro_batches)
        sample = torch.zeros(rows, 1, options.size, options.size, dtype=dtype)
        self.balance = balance_by_time(stages, self.model, sample, timeout=options.profile)
        self.pipe = Pipe(
            self.model, options.micro_batches, options.checkpoint, deferred_batch_norm=True, balance=self.balance
        )
        held = iter(profile_sizes(self.model, sample))
        self.stage_bytes = [sum(next(held).activations for _ in range(layers)) for layers in self.balance]

    def losses(self, pictures: Tensor, strokes: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits
        return self.pipe.step(pictures, target=strokes, loss_fn=loss, schedule=self.options.schedule)


Runs = tuple[Run, Sequence[Pipelined]]  # the plain loop, and pipelines

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}  # nats per pixel
JUDGED = 64  # pictures of digits that were held back
FALL = 0.9


def make_record(options: argparse.Namespace, data: Pictures, exact: Runs, runs: Runs, seconds: float) -> dict[str, Any]:
    """Return all measurements."""
    pictures, strokes = data.draw_held_back(JUDGED)
    return {
        "what": "pymoe examples/pipeline_unet.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "data": "scikit-learn's digits: 1437 images to draw pictures from, 360 held back",
        "machine": machine_facts(),
        "versions": {name: pymoe.build_info()[name] for name in ("pymoe", "torch", "python")},
        "seconds": seconds,
        "differences": {"float64": difference(*exact), "float32": difference(*runs)},
        "runs": {run.name: run_record(run, pictures, strokes) for run in (runs[0], *runs[1])},
    }


def run_record(run: Run, pictures: Tensor, strokes: Tensor) -> dict[str, Any]:
    """Return the measurements of one run in float32."""
    found = {
        "loss": run.history.loss,
        "step_seconds": [round(value, 5) for value in run.history.seconds],
        "median_step_seconds": run.history.median_seconds,
        "held_back_overlap": overlap(run.predict(pictures), strokes),
        "batches_counted": sorted(run.batches_counted),
    }
    if isinstance(run, Pipelined):
        plan, ran = run.as_planned, run.as_run
        found |= {
            "balance": run.balance,
            "last_step": {
                name: {"seconds": record.makespan, "bubble": list(record.bubble), "peak_live": list(record.peak_live)}
                for name, record in (("planned", plan), ("run", ran))
            },
            "activation_bytes": {
                "of_a_micro_batch": run.stage_bytes,
                # With checkpointing, all micro-batches except one keep only their inputs.
                "peak": [live * size for live, size in zip(ran.peak_live_of_stages, run.stage_bytes, strict=True)]
                if run.pipe.checkpoint == "never"
                else None,
            },
        }
    return found


def overlap(predicted: Tensor, strokes: Tensor) -> float:
    """Return the intersection over union of predicted and true strokes, from 0 to 1."""
    found, true = predicted > 0.5, strokes > 0.5
    return float((found & true).sum() / (found | true).sum())


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the runs: for each a sentence and its result."""
    options, runs = record["options"], record["runs"]
    steps = {"float64": options["exact_steps"], "float32": options["steps"]}
    found = are_equal(record["differences"], steps, TOLERANCES)
    for name, run in runs.items():
        first, last = run["loss"][0], run["loss"][-1]
        found[
            f"{name}: the loss fell from {first:.3f} to {last:.3f}; strokes of held-back digits are found with "
            f"{100 * run['held_back_overlap']:.0f} % overlap"
        ] = last < FALL * first
        if "balance" in run:
            found[
                f"{name}: batch norms counted {run['batches_counted'][0]} mini-batches in {options['steps']} steps"
            ] = run["batches_counted"] == [options["steps"]]
            planned, ran = (run["last_step"][one]["peak_live"] for one in ("planned", "run"))
            peak = run["activation_bytes"]["peak"]
            size = f"{sum(peak) / 2**20:.1f} MiB of activations in all stages" if peak else "inputs of checkpoints"
            found[f"{name}: at most {ran} micro-batches were held at once, {planned} by the plan ({size})"] = all(
                a <= b for a, b in zip(ran, planned, strict=True)
            )
    return found


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind eyes
SHOWN = 6


def plot(record: dict[str, Any], data: Pictures, run: Run, path: Path) -> Path:
    """Draw held-back pictures with predicted and true strokes, and below them the losses of all runs."""
    pictures, strokes = data.draw_held_back(SHOWN)
    rows = {"seen": pictures, "found": run.predict(pictures), "true": strokes}
    figure = plt.figure(figsize=(7.5, 6.8), layout="constrained")
    images, curves = figure.subfigures(2, 1, height_ratios=(3, 2))
    grid = images.subplots(len(rows), SHOWN)
    for line, (name, values) in zip(grid, rows.items(), strict=True):
        for axes, value in zip(line, values, strict=True):
            axes.imshow(value[0].float().numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    axes = curves.subplots()
    for number, (name, one) in enumerate(record["runs"].items()):
        label = f"{name}: {1e3 * one['median_step_seconds']:.0f} ms a step"
        style = ("-", "--", ":", "-.")[number % 4]  # the curves coincide
        axes.plot(one["loss"], style, lw=3 - 0.6 * min(number, 3), color=COLORS[number % 4], label=label)
    axes.set_xlabel(f"training step ({record['options']['rows']} pictures each)")
    axes.set_ylabel("loss (nats per pixel)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main(argv: list[str]) -> int:
    """Train; return 0 if all checks hold."""
    options = parse(argv)
    torch.set_num_threads(1)  # one thread for each stage and for the plain loop
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
    print_step_times(record)
    return tell(found)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
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
    """Train by the plain loop and by every pipeline on the same steps, in turn."""
    pipelines = [Pipelined(options, dtype, stages) for stages in options.stages]
    alone = Run(options, dtype)
    take_turns([alone, *pipelines], data, dtype, steps)
    return alone, pipelines


def show(run: Pipelined) -> None:
    """Draw the schedule as planned and as run."""
    named = list(run.model._modules)
    parts = [named[sum(run.balance[:i]) : sum(run.balance[: i + 1])] for i in range(len(run.balance))]
    print(f"\n{run.name}, cut by time: {' | '.join(f'{part[0]} .. {part[-1]}' for part in parts)}")
    run.show_schedule()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
