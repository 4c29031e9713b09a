"""As text: pools' numbers (a line of a log, a row of a table, a histogram in one word), and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pymoe.runtime.monitoring.statistics import Bucket, PoolStats

BARS = " ▁▂▃▄▅▆▇█"
SIZES = "batches of 1 2 4 …"
HEADING = (
    "pool",
    "queued",
    "running",
    "req/s",
    "rows/s",
    "rows/batch",
    SIZES,
    "wait p50 / p99",
    "batch p50",
    "latency p50 / p99",
    "lost",
)
"""The columns of :func:`row`."""
LEFT = frozenset({"pool", SIZES, "lost"})
"""Columns of text, not of numbers."""


def duration(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def number(value: float) -> str:
    """A number with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def lost(stats: PoolStats) -> dict[str, int]:
    """Requests that had no result, by reason; reasons without any are left out."""
    reasons = ("failed", "cancelled", "expired", "rejected")
    return {reason: getattr(stats, reason) for reason in reasons if getattr(stats, reason)}


def is_busy(stats: PoolStats) -> bool:
    """Whether recent numbers show that anything happened, or waits to."""
    return bool(stats.submitted or stats.batches or stats.queued or stats.running or lost(stats))


def line(stats: PoolStats) -> str:
    """One pool in one line."""
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


def row(stats: PoolStats) -> list[str]:
    """One pool, a cell a column of :data:`HEADING`."""
    return [
        stats.name,
        str(stats.queued),
        str(stats.running),
        number(stats.requests_per_second),
        number(stats.rows_per_second),
        number(stats.mean_batch_size),
        histogram(stats.batch_sizes),
        f"{duration(stats.wait.p50)} / {duration(stats.wait.p99)}",
        duration(stats.process.p50),
        f"{duration(stats.latency.p50)} / {duration(stats.latency.p99)}",
        ", ".join(f"{count} {reason}" for reason, count in lost(stats).items()),
    ]


def histogram(buckets: Sequence[Bucket]) -> str:
    """Batches of 1 row, of 2 to 3, of 4 to 7, … as bars; a bar that is not empty can be seen."""
    counts: list[int] = []
    for one in buckets:
        power = max(0, int(one.low).bit_length() - 1)
        counts += [0] * (power + 1 - len(counts))
        counts[power] += one.count
    most = max(counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] if count else BARS[0] for count in counts)


def table(pools: Iterable[PoolStats]) -> str:
    """Lines of equal width under a heading."""
    rows = [list(HEADING), *(row(one) for one in pools)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(HEADING))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(HEADING, cells, widths, strict=True)
        ).rstrip()
        for cells in rows
    )
