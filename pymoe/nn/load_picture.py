"""Draws the experts' load during training as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MISSING = "pictures of loads need matplotlib: pip install matplotlib"
DPI = 130


def draw_expert_load(
    relative_load: Sequence[Sequence[Sequence[float]]], steps: int, file: str | Path, title: str
) -> Path:
    """Draw a heat map for each layer: every expert's share of the layer's slots over the training run.

    Args:
        relative_load: the load of every expert, as a multiple of an even share, indexed by time, layer and expert.
            Layers may have different numbers of experts.
        steps: the total number of optimizer steps, the right end of the time axis.
        file: the picture to write; its suffix selects one of matplotlib's formats. Missing folders are created.
        title: the text above the maps.

    Returns:
        ``file``.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    sizes = [len(layer) for layer in relative_load[0]]
    heights = [0.5 + 0.1 * experts for experts in sizes]
    figure = Figure(figsize=(7, 1.0 + sum(heights)), layout="constrained")
    rows = figure.subplots(len(sizes), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for layer, (axes, experts) in enumerate(zip(rows, sizes, strict=True)):
        image = axes.imshow(
            [[frame[layer][expert] for frame in relative_load] for expert in range(experts)],
            aspect="auto",
            cmap="PuOr_r",
            norm=TwoSlopeNorm(1.0, 0.0, 2.0),
            interpolation="nearest",
            extent=(0.5, steps + 0.5, experts + 0.5, 0.5),
        )
        axes.set_ylabel(f"layer {layer + 1}\nexpert")
        axes.set_yticks(range(1, experts + 1) if experts <= 8 else [1, experts])
        axes.tick_params(axis="y", labelsize=7)
    rows[-1].set_xlabel("optimizer step")
    figure.suptitle(title, fontsize=10)
    bar = figure.colorbar(image, ax=list(rows), extend="max", aspect=30)
    bar.set_label("share of the layer's slots, as a multiple of an even share")
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path
