"""Time of each pass over the number of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.output import machine
from benchmarks.parallel.calls import AUTOGRAD, LOOP, PYMOE
from benchmarks.parallel.report import on_workers
from pymoe.bench.plot import pyplot

STYLES = {LOOP: ("0.4", "o", "-"), AUTOGRAD: ("C0", "s", "--"), PYMOE: ("C2", "o", "-")}


def draw(result: dict[str, Any], file: Path) -> None:
    """A column a kind of calls, forward above backward; quartiles as bands, dotted: as long as one call."""
    plt = pyplot()
    kinds = result["kinds"]
    figure, panels = plt.subplots(
        2, len(kinds), figsize=(1.2 + 3.4 * len(kinds), 5.6), layout="constrained", squeeze=False, sharex=True
    )
    counts = sorted({record["calls"] for record in result["records"]})
    for column, kind in enumerate(kinds):
        for panel, one in zip(panels[:, column], ("forward", "backward"), strict=True):
            for name, (colour, marker, dash) in STYLES.items():
                own = [r for r in result["records"] if (r["kind"], r["system"]) == (kind, name)]
                calls = [record["calls"] for record in own]
                middle, low, high = ([record[one][key] * 1e3 for record in own] for key in ("median", "low", "high"))
                panel.plot(calls, middle, dash, color=colour, marker=marker, ms=4, lw=1.3, label=name)
                panel.fill_between(calls, low, high, color=colour, alpha=0.15, lw=0)
                if name == LOOP and 1 in calls:
                    panel.axhline(middle[calls.index(1)], color="0.6", ls=":", lw=1)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.25)
            panel.tick_params(labelsize=7, which="both")
            panel.set_xticks(counts, [str(count) for count in counts])
        panels[0, column].set_title(f"{kind} calls, {on_workers(kinds[kind]['workers'])}", fontsize=10)
        panels[1, column].set_xlabel("calls", fontsize=9)
    for panel, one in zip(panels[:, 0], ("forward", "backward"), strict=True):
        panel.set_ylabel(f"{one}, ms", fontsize=9)
    panels[0, 0].legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"Time of each pass over the number of calls (dotted: one call)\n{machine(result)}",
        fontsize=9,
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)
