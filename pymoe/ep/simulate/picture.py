"""A simulation as a picture: timelines, balance, memory, and bytes by tokens for each kind of parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pymoe.ep.simulate.alternatives import expert_parallel_bytes
from pymoe.ep.simulate.report import NAMES
from pymoe.ep.simulate.simulation import Simulation
from pymoe.ep.simulate.timeline import LANES, Timeline

MISSING = "pictures of simulations need matplotlib: pip install matplotlib"
COLOURS = {
    "gate": (0.60, 0.60, 0.60),
    "counts": (0.75, 0.55, 0.75),
    "gather": (0.70, 0.70, 0.70),
    "dispatch": (0.35, 0.60, 0.85),
    "clones": (0.85, 0.45, 0.45),
    "shared": (0.55, 0.75, 0.45),
    "experts": (0.95, 0.65, 0.30),
    "combine": (0.20, 0.40, 0.65),
    "sum": (0.80, 0.80, 0.80),
}
MEMORY_COLOURS = ((0.35, 0.60, 0.85), (0.95, 0.65, 0.30), (0.55, 0.75, 0.45), (0.75, 0.55, 0.75), (0.70, 0.70, 0.70))


def draw(file: str | Path, simulation: Simulation) -> Path:
    """Draw the simulation; return the file.

    The suffix of ``file`` names a format of matplotlib. Raise ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    shown = [one for one in simulation.passes if one.deduplicated == simulation.best.deduplicated]
    figure: Any = Figure(figsize=(14, 5 + 1.1 * len(shown)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(0.4 + len(shown), 3.4))
    block, ranks = simulation.layer.block, simulation.layer.ranks
    figure.suptitle(
        f"{block}; {ranks} ranks, {simulation.tokens} tokens a rank; {simulation.layer.network}", fontsize=10
    )
    grid = upper.subplots(len(shown), 2, squeeze=False, sharex="col")
    for line, one in zip(grid, shown, strict=True):
        _draw_timeline(line[0], one.forward.timeline, f"forward, {NAMES[one.deduplicated]}")
        _draw_timeline(line[1], one.backward.timeline, f"backward, {NAMES[one.deduplicated]}")
    for axes, way in zip(grid[-1], ("forward", "backward"), strict=True):
        axes.set_xlim(0, 1.02e3 * max(getattr(one, way).timeline.seconds for one in shown))
        axes.set_xlabel("ms")
    _legend(
        upper,
        {
            event.name.split()[0]
            for one in shown
            for event in (*one.forward.timeline.events, *one.backward.timeline.events)
        },
    )
    balance, memory, crossing = lower.subplots(1, 3)
    _draw_balance(balance, simulation)
    _draw_memory(memory, simulation)
    _draw_crossing(crossing, simulation)
    path = Path(file)
    figure.savefig(path, dpi=110)
    return path


def _draw_timeline(axes: Any, found: Timeline, title: str) -> None:
    for event in found.seen_by(found.fullest):
        height = LANES.index(event.lane)
        span = (1e3 * event.start, 1e3 * (event.end - event.start))
        colour = COLOURS[event.name.split()[0]]
        axes.broken_barh([span], (height - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.5)
    axes.axvline(1e3 * found.best, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    parts = f"{found.phases.chunks} chunk{'s' * (found.phases.chunks != 1)}"
    figures = f"{1e3 * found.seconds:.4g} ms, best possible {1e3 * found.best:.4g} ms (dotted)"
    axes.set_title(f"{title}, {parts}: {figures}", fontsize=9, loc="left")


def _legend(figure: Any, names: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=name) for name, colour in COLOURS.items() if name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)


def _draw_balance(axes: Any, simulation: Simulation) -> None:
    names = [one.name for one in simulation.balances]
    bars = axes.barh(names, [one.imbalance for one in simulation.balances], color=COLOURS["experts"])
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.margins(x=0.12)
    axes.tick_params(labelsize=8)
    axes.set_title("rows of the fullest rank over the mean", fontsize=9, loc="left")


def _draw_memory(axes: Any, simulation: Simulation) -> None:
    names = list(simulation.memory)
    bottom = [0.0] * len(names)
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    for part, colour in zip(parts, MEMORY_COLOURS, strict=True):
        sizes = [getattr(one, part) / 2**30 for one in simulation.memory.values()]
        axes.bar(names, sizes, bottom=bottom, color=colour, label=part)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("memory of a rank, all mixture layers, GiB", fontsize=9, loc="left")


def _draw_crossing(axes: Any, simulation: Simulation) -> None:
    middle = max(simulation.alternatives[0].fewer_bytes_below or simulation.tokens, 1.0)
    tokens = [middle * 2 ** (step / 2) for step in range(-12, 11)]
    for one in simulation.traffic:
        a_token = expert_parallel_bytes(simulation.layer.block, one.rows)
        axes.plot(tokens, [number * a_token for number in tokens], label=f"EP, {NAMES[one.deduplicated]}")
    for other, style in zip(simulation.alternatives, ("--", ":"), strict=True):
        axes.plot(tokens, [other.bytes] * len(tokens), linestyle=style, color="black", label=other.name)
    axes.axvline(simulation.tokens, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens a rank and step (grey: as simulated)", fontsize=8)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("bytes that a rank sends, a layer and step", fontsize=9, loc="left")
