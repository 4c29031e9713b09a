"""The picture of a run, drawn from its record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind eyes


def plot(record: dict[str, Any], path: Path) -> Path:
    """Losses, requests per second and batch sizes over time."""
    figure, (losses, rates, sizes) = plt.subplots(3, 1, figsize=(7, 8), layout="constrained")
    curves = record["curves"]
    for name, label, color in (
        ("training", "training batches", COLORS[0]),
        ("unseen", "questions about unseen text", COLORS[1]),
    ):
        losses.plot(curves[name]["seconds"], curves[name]["loss"], color=color, lw=1.2, label=label)
    losses.set_ylabel("nats per byte")
    losses.set_title(f"Four served experts learn {record['text']['name']} while they are asked", fontsize=10)
    pools = [name for name in curves["pools"][0] if name != "seconds"] if curves["pools"] else []
    points = whole_intervals(curves["pools"])
    for axes, key, label in (
        (rates, "requests_per_second", "requests per second"),
        (sizes, "requests_per_batch", "requests per batch, mean"),
    ):
        for ending, style in (("_forward", "-"), ("_backward", "--")):
            for color, name in zip(COLORS, (one for one in pools if one.endswith(ending)), strict=False):
                values = [point[name][key] for point in points]
                axes.plot([point["seconds"] for point in points], values, style, color=color, lw=1, label=name)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    sizes.set_xlabel("seconds")
    for axes in (losses, rates, sizes):
        tidy(axes)
    if pools:
        handles, labels = rates.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=7, ncols=4)
    losses.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def whole_intervals(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the last point if little time had passed since the one before: its rates are those of a few requests."""
    if len(points) < 3:
        return points
    usual = points[1]["seconds"] - points[0]["seconds"]
    return points[:-1] if points[-1]["seconds"] - points[-2]["seconds"] < usual / 2 else points


def tidy(axes: Axes) -> None:
    """Less ink."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
