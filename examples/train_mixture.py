"""A classifier of handwritten digits trains through four served experts, twice: all well, and with one slow, one dying.

    python examples/train_mixture.py                   # both runs: about a minute on 2 cores
    python examples/train_mixture.py --steps 200 --slow 1000

A runtime serves the experts, each with its own optimizer; the model calls two of the four for every image. In the
second run one expert is 100 times slower from the start, and the runtime drops another one halfway. The model is not
notified: it continues with the answers that arrive, and its steps stay within their timeouts. The data come with
scikit-learn. At the end the program checks the results, and exits with status 1 if a check fails. It writes a record
and a picture to runs/train_mixture.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "rich", "matplotlib"))
require(("sklearn",), install=("scikit-learn",))

import argparse
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from common import INTERRUPTED, at_least, machine_facts, parser_of, tell, write_record
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pymoe
from pymoe.runtime import BackendStats, BatchTensorProto, ExpertBackend, MixtureOfExpertBackends, PoolStats, Runtime

matplotlib.use("Agg")

CLASSES, PIXELS = 10, 64
HELD_BACK = 360


class Digits:
    """The 1797 images of 8 x 8 pixels from scikit-learn, 360 of them held back; ``seed`` determines the batches."""

    def __init__(self, seed: int) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(images, dtype=torch.float32)[order] / 16 - 0.5
        y = torch.tensor(labels, dtype=torch.int64)[order]
        self.held_back = x[:HELD_BACK], y[:HELD_BACK]
        self.train = x[HELD_BACK:], y[HELD_BACK:]
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return a batch of images (rows, 64) and labels (rows,)."""
        x, y = self.train
        index = torch.randint(len(y), (rows,), generator=self.random)
        return x[index], y[index]


class Expert(nn.Sequential):
    """A feed-forward network that can be made slow."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.delay = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.delay)
        return super().forward(x)


def served_experts(count: int, width: int, learning_rate: float) -> list[ExpertBackend]:
    """Make experts, each with its own optimizer, which only the server uses."""
    backends = []
    for i in range(count):
        expert = Expert(width)
        optimizer = torch.optim.Adam(expert.parameters(), lr=learning_rate)
        backends.append(ExpertBackend(f"expert{i}", expert, optimizer, args_schema=[BatchTensorProto(width)]))
    return backends


class Classifier(nn.Module):
    """Maps pixels to logits of the ten digits, through the mixture. The experts' parameters are not among its own."""

    def __init__(self, mixture: MixtureOfExpertBackends, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(PIXELS, width)
        self.mixture = mixture
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x).relu()
        return self.head(x + self.mixture(x))


SLOW, DYING = 3, 2  # indices of experts


@dataclass
class History:
    """The measurements of a run."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds of each training step."""
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    """(step, share of held-back images that are classified correctly)."""
    backends: dict[str, BackendStats] = field(default_factory=dict)
    at_death: dict[str, BackendStats] = field(default_factory=dict)
    """The value of ``backends`` at the time when one died; empty in a healthy run."""
    pools: dict[str, PoolStats] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)


def run(options: Namespace, *, slow_by: float, one_dies: bool, step_done: Callable[[History], None]) -> History:
    """Train from the same initial state.

    Args:
        options: the options of the command line.
        slow_by: additional seconds that a pass of one expert takes.
        one_dies: whether the runtime drops one expert after half of the steps.
        step_done: called after every step.
    """
    torch.manual_seed(options.seed)
    digits = Digits(options.seed)
    backends = served_experts(options.experts, options.width, options.expert_learning_rate)
    mixture = MixtureOfExpertBackends(
        backends,
        top_k=2,
        forward_timeout=options.timeout,
        backward_timeout=options.timeout,
        timeout_after_k_min=options.patience,
        on_too_few="fallback",  # an image without an answer of its two experts skips the mixture
        detect_anomalies=True,
        aux_loss_coef=0.01,
    )
    model = Classifier(mixture, options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    history = History()
    with Runtime(backends, num_workers=len(backends)) as runtime:
        backends[SLOW].expert.delay = slow_by
        for step in range(options.steps):
            if one_dies and step == options.steps // 2:
                runtime.remove(backends[DYING], drain=False)
                history.at_death = mixture.stats()
            begin = time.perf_counter()
            images, labels = digits.draw(options.rows)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.seconds.append(time.perf_counter() - begin)
            history.loss.append(loss.item())
            if (step + 1) % max(1, options.steps // 20) == 0:
                history.accuracy.append((step + 1, accuracy(model, digits)))
            step_done(history)
        pools = runtime.pools
    # After the shutdown, all requests have ended and late answers are counted.
    history.pools = runtime.stats()
    assert len(history.pools) == len(pools)
    history.backends = mixture.stats()
    history.updates = {backend.name: backend.updates for backend in backends}
    return history


@torch.no_grad()
def accuracy(model: Classifier, digits: Digits) -> float:
    """Return the accuracy on the held-back images, with the answers that arrive in time."""
    images, labels = digits.held_back
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


FALL = 0.8  # a loss fell if its last tenth is below this share of its first


def make_record(options: Namespace, slow_by: float, healthy: History, faulty: History) -> dict[str, Any]:
    """Return all measurements."""
    build = pymoe.build_info()
    return {
        "what": "pymoe examples/train_mixture.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "data": "scikit-learn's digits: 1437 images to train on, 360 held back",
        "machine": machine_facts(),
        "versions": {name: build[name] for name in ("pymoe", "torch", "python")},
        "slow": {"expert": f"expert{SLOW}", "seconds_more_a_pass": slow_by},
        "dead": {"expert": f"expert{DYING}", "from_step": options.steps // 2},
        "healthy": run_record(healthy),
        "faulty": run_record(faulty),
    }


def run_record(history: History) -> dict[str, Any]:
    """Return the measurements of one run."""
    seconds = sorted(history.seconds)
    return {
        "loss": {"first": tenth(history.loss, first=True), "last": tenth(history.loss, first=False)},
        "held_back_accuracy": history.accuracy[-1][1] if history.accuracy else None,
        "step_ms": {
            "p50": 1e3 * statistics.median(seconds),
            "p99": 1e3 * seconds[int(0.99 * len(seconds))],
            "longest": 1e3 * seconds[-1],
        },
        "updates": history.updates,
        "experts": {name: backend_record(one) for name, one in history.backends.items()},
        "answered_at_death": {name: one.forward.answered for name, one in history.at_death.items()},
        "pools": {
            name: {
                key: getattr(one, key)
                for key in ("submitted", "completed", "failed", "cancelled", "expired", "queued", "running")
            }
            for name, one in history.pools.items()
        },
        "curves": {
            "loss": [round(loss, 4) for loss in history.loss],
            "step_ms": [round(1e3 * one, 2) for one in history.seconds],
            "accuracy": [[step, round(share, 4)] for step, share in history.accuracy],
        },
    }


def backend_record(one: BackendStats) -> dict[str, Any]:
    """Return the mixture's counts for an expert and each pass."""
    return {way: getattr(one, way)._asdict() for way in ("forward", "backward")}


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the runs: for each a sentence and its result."""
    found = {}
    limit = 2e3 * record["options"]["timeout"]
    for name in ("healthy", "faulty"):
        run = record[name]
        loss, longest = run["loss"], run["step_ms"]["longest"]
        ways = [way for expert in run["experts"].values() for way in expert.values()]
        told = sum(way[key] for way in ways for key in ("answered", "failed", "anomalous", "given_up"))
        asked = sum(way["requests"] for way in ways)
        ended = sum(
            one[key] for one in run["pools"].values() for key in ("completed", "failed", "cancelled", "expired")
        )
        taken = sum(one["submitted"] for one in run["pools"].values())
        left = sum(one["queued"] + one["running"] for one in run["pools"].values())
        found[f"{name}: the loss fell, {loss['first']:.3f} to {loss['last']:.3f}"] = loss["last"] < FALL * loss["first"]
        found[f"{name}: no step took longer than its timeouts allow, {longest:.0f} of {limit:.0f} ms"] = (
            longest <= limit
        )
        found[f"{name}: nothing was lost or left, {asked} requests asked, {taken} taken in by pools still there"] = (
            told == asked and ended == taken and left == 0
        )
    dead, slow = record["dead"]["expert"], record["slow"]["expert"]
    experts, at_death = record["faulty"]["experts"], record["faulty"]["answered_at_death"]
    after = experts[dead]["forward"]["answered"] - at_death[dead]
    found[f"the dead expert answered {at_death[dead]} times before its death, {after} times after it"] = (
        at_death[dead] > 0 and after == 0  # it is no longer served, so it is not asked
    )
    given_up = experts[slow]["forward"]["given_up"]
    found[f"the slow expert was given up {given_up} times"] = given_up > 0
    return found


def tenth(values: list[float], *, first: bool) -> float:
    """Return the mean of the first tenth, or of the last."""
    count = max(1, len(values) // 10)
    return statistics.fmean(values[:count] if first else values[-count:])


COLORS = {"healthy": "#0072b2", "faulty": "#d55e00"}  # told apart by colour-blind eyes


def plot(record: dict[str, Any], path: Path) -> Path:
    """Draw losses, accuracies and step times of both runs over the steps."""
    figure, (losses, accuracies, times) = plt.subplots(
        3, 1, figsize=(7.5, 8), sharex=True, layout="constrained", height_ratios=(3, 2, 2)
    )
    dead, slow = record["dead"], record["slow"]
    more = 1e3 * slow["seconds_more_a_pass"]
    labels = {
        "healthy": "four experts, all well",
        "faulty": f"{slow['expert']} {more:.0f} ms slower, {dead['expert']} dead from step {dead['from_step']} on",
    }
    for name, color in COLORS.items():
        run = record[name]
        curves = run["curves"]
        losses.plot(curves["loss"], color=color, alpha=0.2, lw=0.7)
        losses.plot(smooth(curves["loss"]), color=color, label=labels[name])
        if curves["accuracy"]:
            steps, shares = zip(*curves["accuracy"], strict=True)
            shown = f"{100 * shares[-1]:.1f} % at the end"
            accuracies.plot(steps, [100 * share for share in shares], "o-", ms=3, color=color, label=shown)
        spread = f"median {run['step_ms']['p50']:.1f} ms, longest {run['step_ms']['longest']:.0f} ms"
        times.plot(curves["step_ms"], color=color, lw=0.7, label=spread)
    losses.set_title("Digits through a mixture of served experts, two of four asked for each image", fontsize=10)
    losses.set_ylabel("training loss (nats)")
    losses.set_yscale("log")
    accuracies.set_ylabel("held-back images right (%)")
    times.set_ylabel("a step takes (ms)")
    times.set_yscale("log")
    times.set_xlabel(f"training step ({record['options']['rows']} images each)")
    for axes in (losses, accuracies, times):
        axes.axvline(dead["from_step"], color="grey", lw=0.8, ls=":")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def smooth(values: list[float], share: float = 0.9) -> list[float]:
    """Return the exponential moving average."""
    result: list[float] = []
    for value in values:
        result.append(value if not result else share * result[-1] + (1 - share) * value)
    return result


def main(argv: list[str]) -> int:
    """Run twice; return 0 if all checks hold."""
    options = parse(argv)
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


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
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
    """Show a progress bar with the last loss during a run; yield a function to call after every step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), disable=options.plain or not sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=options.steps, loss="-")
        yield lambda history: bar.update(task, advance=1, loss=f"{history.loss[-1]:.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
