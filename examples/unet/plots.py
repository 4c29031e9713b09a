"""The picture of the runs: what the network sees and finds, and how it learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .data import Pictures
from .run import Run

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind eyes
SHOWN = 6


def plot(record: dict[str, Any], data: Pictures, run: Run, path: Path) -> Path:
    """Held-back pictures, what ``run`` finds in them, where strokes are; below that the losses of all runs."""
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
        style = ("-", "--", ":", "-.")[number % 4]  # the curves lie on each other
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
