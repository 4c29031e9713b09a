"""The picture of the runs: how they learned, and what each stage of the pipelines has to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind eyes


def plot(record: dict[str, Any], path: Path) -> Path:
    """Losses of all runs, which lie on each other; below, the shares of the stages in parameters and in time."""
    runs = record["runs"]
    figure, (curves, bars) = plt.subplots(2, 1, figsize=(7.5, 6.2), layout="constrained", height_ratios=(3, 2))
    for number, (name, one) in enumerate(runs.items()):
        label = f"{name}: {1e3 * one['median_step_seconds']:.0f} ms a step"
        style = ("-", "--", ":", "-.")[number % 4]
        curves.plot(one["loss"], style, lw=4 - min(number, 3), color=COLORS[number % 4], label=label)
    curves.set_title(f"{record['model']} on the Python manual, {record['parameters']:,} parameters", fontsize=10)
    curves.set_xlabel(f"training step ({record['options']['rows']} x {record['options']['context']} bytes each)")
    curves.set_ylabel("loss (nats per byte)")
    curves.legend(frameon=False, fontsize=8)
    lines = [
        (f"{name}: {what}", one[key])
        for name, one in runs.items()
        if "parameters_of_stages" in one
        for what, key in (("parameters", "parameters_of_stages"), ("time", "busy_seconds_of_stages"))
    ]
    for height, (_, values) in enumerate(lines):
        left = 0.0
        for stage, value in enumerate(values):
            share = value / sum(values)
            bars.barh(height, share, left=left, color=COLORS[stage % 4], edgecolor="white")
            bars.text(left + share / 2, height, f"{share:.0%}", ha="center", va="center", color="white", fontsize=8)
            left += share
    bars.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=8)
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.set_xticks([])
    bars.set_title(f"shares of the stages, cut by {record['options']['cut']}", fontsize=10)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    curves.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
