"""Draws pictures of runs: panels of equal style, lines with quartiles, and a caption that names the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.run import machine
from pymoe.bench.plot import pyplot

Record = dict[str, Any]


@contextmanager
def picture(
    file: Path, rows: int, columns: int, size: tuple[float, float], title: str, result: Record, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its (rows, columns) panels; write ``file`` when the block ends.

    ``options`` are passed to :func:`matplotlib.pyplot.subplots`. Raises ImportError if matplotlib is missing.
    """
    plt = pyplot()
    figure, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    yield figure, panels
    for panel in panels.flat:
        panel.tick_params(labelsize=7, which="both")
    figure.suptitle(f"{title}\n{result.get('caption') or machine(result)}", fontsize=9)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def line(panel: Any, x: Sequence[float], spreads: Sequence[Record], scale: float = 1.0, **style: Any) -> None:
    """Draw medians as a line with markers, and quartiles as a band of the same colour."""
    middle, low, high = ([one[key] * scale for one in spreads] for key in ("median", "low", "high"))
    (drawn,) = panel.plot(x, middle, **{"ms": 4, "lw": 1.2, **style})
    panel.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, lw=0)


def doubling(panel: Any, counts: Sequence[int]) -> None:
    """Give a panel logarithmic axes and label its x axis with ``counts``."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(alpha=0.25)
    panel.set_xticks(counts, [str(count) for count in counts])
