"""Draws the curves of several runs of train_lm.py in one picture and prints them side by side.

    python examples/plot_runs.py runs/moe-native runs/dense --output runs/moe-dense.png

A run is given by its folder or its record.json. If two runs differ only in the backend, the distance between their loss
curves is printed, too.
"""

from __future__ import annotations

from common import require

require(["matplotlib"])

import argparse
import math
import sys
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from common import read_record
from matplotlib.axes import Axes

from pymoe.nn.load_picture import draw_expert_load

matplotlib.use("Agg")

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind eyes
STYLES = ("-", "--", "-.", ":")
SMOOTHING = 50
DPI = 130
SPANS = (10, 30, 100)  # numbers of first steps for which two curves are compared, in addition to all steps


def main(argv: list[str] | None = None) -> int:
    head, _, tail = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=tail, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its record.json")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/comparison.png"),
        metavar="FILE",
        help="picture to write (default: %(default)s)",
    )
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="names of the runs (default: what they trained)")
    parser.add_argument(
        "--over",
        choices=("steps", "seconds"),
        default="steps",
        help="what the curves are drawn over (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    try:
        records = [read_record(run) for run in arguments.runs]
    except (OSError, ValueError) as error:
        print(f"error: no record of a finished run: {error}", file=sys.stderr)
        return 2
    labels = arguments.labels or [describe(record) for record in records]
    if len(labels) != len(records):
        parser.error(f"--labels: {len(labels)} names for {len(records)} runs")
    print_table(records, labels)
    for (first, first_label), (second, second_label) in combinations(zip(records, labels, strict=True), 2):
        if differ_in_backend_alone(first["config"], second["config"]):
            print_distance(first, second, f"{first_label} and {second_label}")
    print(f"picture: {plot_comparison(records, arguments.output, labels=labels, over=arguments.over)}")
    return 0


def print_table(records: list[dict[str, Any]], labels: list[str]) -> None:
    width = max(len(label) for label in labels)
    print(f"{'run':<{width}}  {'parameters':>11}  {'train':>6}  {'held back':>9}  {'tokens/s':>9}  {'training':>9}")
    for record, label in zip(records, labels, strict=True):
        final = record["final"]
        print(
            f"{label:<{width}}  {record['parameters']['total']:>11,}  {final['train_bits_per_byte']:>6.3f}  "
            f"{final['validation_bits_per_byte']:>9.3f}  {final['tokens_per_second']:>9,.0f}  "
            f"{record['timings']['training_seconds']:>7.0f} s"
        )
    print("(train and held back in bits per byte)")


def differ_in_backend_alone(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return [name for name in first if first[name] != second[name]] == ["backend"]


def print_distance(first: dict[str, Any], second: dict[str, Any], names: str) -> None:
    distance = [abs(a - b) for a, b in zip(first["loss"], second["loss"], strict=False)]
    spans = [span for span in SPANS if span < len(distance)] + [len(distance)]
    parts = ", ".join(f"{max(distance[:span]):.1e} over the first {span}" for span in spans)
    print(f"{names}: largest difference of the losses (nats per byte), steps: {parts}")


def plot_loss(record: dict[str, Any], path: Path) -> Path:
    """Draw bits per byte in training and validation over the steps."""
    validation = record["validation"]
    return plot_curve(
        [loss / math.log(2) for loss in record["loss"]],
        dict(zip(validation["step"], validation["bits_per_byte"], strict=True)),
        path,
        title=f"{describe(record)}, trained on {record['text']['name']}",
        step=f"optimizer step ({record['bytes_per_step']:,} bytes each)",
    )


def plot_curve(
    training: list[float],
    held_back: dict[int, float],
    path: Path,
    *,
    title: str,
    step: str,
    unit: str = "bits per byte",
) -> Path:
    """Draw the losses of every step's batch, and those of the held-back text by the steps made before, in ``unit``."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    steps = range(1, len(training) + 1)
    axes.plot(steps, training, color=COLORS[0], alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(training), color=COLORS[0], label="training batches (smoothed)")
    axes.plot(
        list(held_back),
        list(held_back.values()),
        color=COLORS[1],
        marker="o",
        markersize=4,
        label=f"held-back text, {list(held_back.values())[-1]:.3f} at the end",
    )
    axes.set_title(title, fontsize=10)
    _loss_axes(axes, training, unit)
    axes.set_xlabel(step)
    axes.legend(frameon=False)
    return _save(figure, path)


def plot_expert_load(record: dict[str, Any], path: Path) -> Path:
    """Draw one heat map per layer: the share of the layer's work that each expert got over the run."""
    load = record["expert_load"]
    return draw_expert_load(load["relative_load"], load["steps"], path, f"Load of every expert: {describe(record)}")


def plot_comparison(records: list[dict[str, Any]], path: Path, *, labels: list[str], over: str = "steps") -> Path:
    """Draw the curves of several runs in one picture; ``over`` is "steps" or "seconds" (time spent in training
    steps).
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, (record, label) in enumerate(zip(records, labels, strict=True)):
        color, style = COLORS[index % len(COLORS)], STYLES[index % len(STYLES)]
        bits = [loss / math.log(2) for loss in record["loss"]]
        x = list(accumulate(record["step_seconds"])) if over == "seconds" else range(1, len(bits) + 1)
        axes.plot(x, smooth(bits), color=color, alpha=0.35, linewidth=1, linestyle=style)
        validation = record["validation"]
        axes.plot(
            [x[step - 1] for step in validation["step"]],
            validation["bits_per_byte"],
            color=color,
            linestyle=style,
            marker="o",
            markersize=4,
            label=f"{label}: {validation['bits_per_byte'][-1]:.3f} bits/byte at the end",
        )
    axes.set_title("Held-back text (dots) and training batches, smoothed (faint)", fontsize=10)
    _loss_axes(axes, [loss / math.log(2) for record in records for loss in record["loss"]])
    unit = f"optimizer step ({records[0]['bytes_per_step']:,} bytes each)"
    axes.set_xlabel("seconds of training" if over == "seconds" else unit)
    axes.legend(frameon=False)
    return _save(figure, path)


def describe(record: dict[str, Any]) -> str:
    config = record["config"]
    if config["ffn"] == "dense":
        return f"dense, FFN {(config['top_k'] + config['shared_experts']) * config['ffn_size']}"
    return f"MoE, {config['num_experts']} experts, top {config['top_k']} ({config['backend']})"


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average over a fiftieth of the curve, corrected for its start."""
    keep = 1 - 1 / max(1.0, len(values) / SMOOTHING)
    result, average, weight = [], 0.0, 0.0
    for value in values:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(average / weight)
    return result


def _loss_axes(axes: Axes, bits: list[float], unit: str = "bits per byte") -> None:
    axes.set_ylabel(unit)
    # The loss begins at 8 bits; without a limit, the rest of the curve would look flat.
    axes.set_ylim(min(bits) * 0.9, min(max(bits), 2.5 * min(bits)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
