"""Formats statistics of pools as text: as a line for a log, as a table, and histograms as characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pymoe.runtime.monitoring.statistics import Bucket, PoolStats

BARS = " ▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format a time with up to three significant digits and a unit; zero has no unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def number(value: float) -> str:
    """Format a number with up to three significant digits; from 100 on, as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def lost(stats: PoolStats) -> dict[str, int]:
    """Return the number of requests that have no result, by reason; reasons that do not occur are omitted."""
    reasons = ("failed", "cancelled", "expired", "rejected")
    return {reason: getattr(stats, reason) for reason in reasons if getattr(stats, reason)}


def is_busy(stats: PoolStats) -> bool:
    """Return whether the statistics count any request or batch, done or pending."""
    return bool(stats.submitted or stats.batches or stats.queued or stats.running or lost(stats))


def line(stats: PoolStats) -> str:
    """Return the statistics of a pool as one line."""
    parts = [
        f"{number(stats.requests_per_second)} requests/s",
        f"{number(stats.rows_per_second)} rows/s",
        f"{number(stats.mean_batch_size)} rows a batch",
        f"queued {stats.queued}",
        f"wait p50 {duration(stats.wait.p50)} p99 {duration(stats.wait.p99)}",
        f"batch p50 {duration(stats.process.p50)}",
        f"latency p50 {duration(stats.latency.p50)} p99 {duration(stats.latency.p99)}",
        *(f"{reason} {count}" for reason, count in lost(stats).items()),
    ]
    return f"{stats.name}: {', '.join(parts)}"


def histogram(buckets: Sequence[Bucket]) -> str:
    """Return a histogram of batch sizes, with one character for each range: 1 row, 2 to 3 rows, 4 to 7 rows, …

    A character is a bar whose height is proportional to the number of such batches. Every number above zero has a
    visible bar.
    """
    counts: list[int] = []
    for one in buckets:
        power = max(0, int(one.low).bit_length() - 1)
        counts += [0] * (power + 1 - len(counts))
        counts[power] += one.count
    most = max(counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] if count else BARS[0] for count in counts)


class Column(NamedTuple):
    """A column of the table of pools."""

    heading: str
    cell: Callable[[PoolStats], str]
    is_text: bool = False


SIZES = Column("batches of 1 2 4 …", lambda stats: histogram(stats.batch_sizes), is_text=True)
COLUMNS = (
    Column("pool", lambda stats: stats.name, is_text=True),
    Column("queued", lambda stats: str(stats.queued)),
    Column("running", lambda stats: str(stats.running)),
    Column("req/s", lambda stats: number(stats.requests_per_second)),
    Column("rows/s", lambda stats: number(stats.rows_per_second)),
    Column("rows/batch", lambda stats: number(stats.mean_batch_size)),
    SIZES,
    Column("wait p50 / p99", lambda stats: f"{duration(stats.wait.p50)} / {duration(stats.wait.p99)}"),
    Column("batch p50", lambda stats: duration(stats.process.p50)),
    Column("latency p50 / p99", lambda stats: f"{duration(stats.latency.p50)} / {duration(stats.latency.p99)}"),
    Column("lost", lambda stats: ", ".join(f"{count} {why}" for why, count in lost(stats).items()), is_text=True),
)


def table(pools: Iterable[PoolStats]) -> str:
    """Return the statistics as a text table: a line of headings, then one line for each pool."""
    rows = [[column.heading for column in COLUMNS], *([column.cell(pool) for column in COLUMNS] for pool in pools)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column.is_text else cell.rjust(width)
            for column, cell, width in zip(COLUMNS, cells, widths, strict=True)
        ).rstrip()
        for cells in rows
    )
