"""The picture of both runs, drawn from their record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"healthy": "#0072b2", "faulty": "#d55e00"}  # told apart by colour-blind eyes


def plot(record: dict[str, Any], path: Path) -> Path:
    """Losses, accuracies and step times of both runs over the steps."""
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
    """An exponential mean."""
    result: list[float] = []
    for value in values:
        result.append(value if not result else share * result[-1] + (1 - share) * value)
    return result
