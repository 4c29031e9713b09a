"""Speed-up of every system over the number of micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.output import machine
from benchmarks.pipeline.systems import SEQUENTIAL
from pymoe.bench.plot import pyplot


def draw(result: dict[str, Any], file: Path) -> None:
    """A panel for every kind of work and number of workers: measured with quartiles, and a line where the ideal is."""
    plt = pyplot()
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in result["cells"]:
        groups.setdefault((record["case"]["work"], record["case"]["workers"]), []).append(record)
    if not groups:
        return
    figure, panels = plt.subplots(
        len(groups), 1, figsize=(11, 0.6 + 3.1 * len(groups)), layout="constrained", squeeze=False
    )
    names = [name for name in result["systems"] if name != SEQUENTIAL]
    for panel, ((work, workers), records) in zip(panels[:, 0], groups.items(), strict=True):
        width = 0.84 / len(names)
        for i, name in enumerate(names):
            for position, record in enumerate(records):
                one = record["systems"].get(name, {})
                if "speed_up" not in one:
                    continue
                x = position - 0.42 + (i + 0.5) * width
                seen = one["speed_up"]
                error = [[seen["median"] - seen["low"]], [seen["high"] - seen["median"]]]
                panel.bar(x, seen["median"], 0.9 * width, yerr=error, color=colour(i, name), error_kw={"lw": 0.8})
                if "ideal" in one:
                    panel.hlines(one["ideal"], x - 0.45 * width, x + 0.45 * width, color="black", lw=1.4)
        panel.axhline(1, color="0.6", lw=0.8, ls=":")
        panel.set_xticks(
            range(len(records)), [f"{record['case']['micro_batches']} micro-batches" for record in records]
        )
        panel.set_title(f"{work}, {workers} workers", fontsize=10)
        panel.set_ylabel("speed-up", fontsize=9)
        panel.tick_params(labelsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour(i, name)) for i, name in enumerate(names)]
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(
        "Speed-up over the plain micro-batched run, forward and backward (lines: the simulated ideal)\n"
        f"{machine(result)}",
        fontsize=9,
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)


def colour(i: int, name: str) -> Any:
    """Greens for pymoe, grey for torchgpipe, blues for torch."""
    from matplotlib import colormaps

    if name.startswith("pymoe"):
        return colormaps["Greens"](0.45 + 0.12 * (i % 5))
    return "0.55" if name == "torchgpipe" else colormaps["Blues"](0.35 + 0.09 * (i % 7))
