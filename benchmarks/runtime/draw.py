"""Requests per second and latency over the number of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.output import machine
from benchmarks.runtime.scenario import DIRECTIONS, EXPERTS, ROWS, Cell
from benchmarks.runtime.systems import BATCHER, DIRECT, HIVEMIND, POOL, PYMOE, READY
from pymoe.bench.plot import pyplot

STYLES = {
    PYMOE: ("C2", "o"),
    POOL: ("C4", "v"),
    HIVEMIND: ("C3", "s"),
    BATCHER: ("C0", "^"),
    DIRECT: ("0.55", "."),
    READY: ("0.2", "."),
}


def rates(result: dict[str, Any], file: Path) -> None:
    """A panel an expert, direction and size: rates above, latencies below; coroutines are dashed."""
    plt = pyplot()
    loads = [
        (expert, rows, direction)
        for expert in EXPERTS
        for direction in DIRECTIONS
        for rows in ROWS
        if any(of(record, expert, direction, rows) for record in result["cells"])
    ]
    figure, panels = plt.subplots(
        2, len(loads), figsize=(2.1 + 2.5 * len(loads), 6.4), layout="constrained", squeeze=False, sharex=True
    )
    for column, (expert, rows, direction) in enumerate(loads):
        records = [record for record in result["cells"] if of(record, expert, direction, rows)]
        above, below = panels[:, column]
        for name, (colour, marker) in STYLES.items():
            for kind, dash in (("threads", "-"), ("asyncio", "--")):
                own = [r for r in records if r["cell"]["kind"] == kind and "rate" in r["systems"].get(name, {})]
                if not own or (kind == "asyncio" and name in (DIRECT, READY)):
                    continue
                clients = [record["cell"]["clients"] for record in own]
                spreads = [record["systems"][name]["rate"] for record in own]
                middle = [one["median"] for one in spreads]
                label = name if kind == "threads" else f"{name}, coroutines"
                above.plot(clients, middle, dash, color=colour, marker=marker, ms=4, lw=1.2, label=label)
                low, high = [one["low"] for one in spreads], [one["high"] for one in spreads]
                above.fill_between(clients, low, high, color=colour, alpha=0.15, lw=0)
                if name in (DIRECT, READY):
                    continue
                p50 = [record["systems"][name]["p50"]["median"] * 1e3 for record in own]
                p99 = [record["systems"][name]["p99"]["median"] * 1e3 for record in own]
                below.plot(clients, p50, dash, color=colour, marker=marker, ms=4, lw=1.2)
                below.plot(clients, p99, dash, color=colour, marker=marker, ms=3, lw=0.7, alpha=0.5)
        above.set_title(f"{expert} {direction}\n{rows} row{'s' * (rows > 1)} a request", fontsize=9)
        for panel in (above, below):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.25)
            panel.tick_params(labelsize=7, which="both")
        below.set_xlabel("clients", fontsize=8)
    clients = sorted({record["cell"]["clients"] for record in result["cells"]})
    panels[1, 0].set_xticks(clients, [str(count) for count in clients])
    panels[1, 0].set_xlim(0.8 * clients[0], 1.25 * clients[-1])
    panels[0, 0].set_ylabel("requests per second", fontsize=8)
    panels[1, 0].set_ylabel("latency, ms: p50, and p99 faint", fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    sizes = ", ".join(f"{name}: {h} -> {f} -> {h}" for name, (h, f) in EXPERTS.items())
    figure.suptitle(
        f"Requests to one expert ({sizes}); backward includes an optimizer step\n{machine(result)}",
        fontsize=9,
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)


def of(record: dict[str, Any], expert: str, direction: str, rows: int) -> bool:
    """Whether a cell belongs to a panel."""
    cell = Cell(**record["cell"])
    return (cell.expert, cell.direction, cell.rows) == (expert, direction, rows)
