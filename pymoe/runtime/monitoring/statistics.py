"""Statistics of a runtime's pools: :class:`PoolStats`, computed from the counters of the native pools.

A native pool counts with relaxed atomics. Its method ``_statistics()`` returns the counters as a :class:`Snapshot`.
Quantiles, means and rates are computed here, on the thread that reads them, not on the threads that serve requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Snapshot = Mapping[str, Any]
"""Result of ``_statistics()`` of a native pool. Integers: ``submitted``, ``completed``, ``failed``, ``cancelled``,
``expired``, ``rejected``, ``batches`` and ``rows`` since the pool was made; ``queued``, ``queued_rows`` and ``running``
now. Histograms, each a tuple (count of every bucket, sum of the values, largest value): ``batch_rows``, and in
nanoseconds ``wait_ns``, ``latency_ns``, ``process_ns``."""
TOTALS = ("submitted", "completed", "failed", "cancelled", "expired", "rejected", "batches", "rows")
HISTOGRAMS = ("batch_rows", "wait_ns", "latency_ns", "process_ns")


class Pool(Protocol):
    """The part of a pool that statistics need: its name and its counters."""

    @property
    def name(self) -> str: ...

    def _statistics(self) -> Snapshot: ...


@dataclass(frozen=True)
class Bucket:
    """A bucket with ``count`` values of at least ``low`` and less than ``high``."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, repr=False)
class Distribution:
    """A distribution of times in seconds or of sizes in rows.

    A quantile differs from the true one by at most a quarter (below 4 ns or 4 rows, by at most 1 ns or 1 row). The mean
    is exact. ``max`` is exact, too, except that a :class:`StatsReader` with ``recent`` returns an upper bound.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    buckets: tuple[Bucket, ...]
    """Buckets that are not empty, in ascending order."""

    @property
    def sum(self) -> float:
        """Return the sum of all values."""
        return self.mean * self.count

    def __repr__(self) -> str:
        return f"<Distribution of {self.count}: mean {self.mean:.3g}, p99 {self.p99:.3g}, max {self.max:.3g}>"


@dataclass(frozen=True, repr=False)
class PoolStats:
    """Statistics of one pool.

    Counts and distributions cover the whole life of the pool. From a :class:`StatsReader` with ``recent``, they cover
    the time since its previous read.
    """

    name: str
    queued: int
    """Number of requests that wait now."""
    running: int
    """Number of requests whose batch runs now."""
    submitted: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    """Number of requests that had not started within their timeout."""
    rejected: int
    """Number of requests that a full pool refused (they do not count as submitted)."""
    batches: int
    """Number of batches that were run, including failed ones; ``rows`` includes them too."""
    rows: int
    mean_batch_size: float
    """Mean number of rows per batch."""
    batch_sizes: tuple[Bucket, ...]
    """Histogram of the batches' rows."""
    wait: Distribution
    """Seconds from a request's submission to its batch."""
    process: Distribution
    """Seconds that a batch took."""
    latency: Distribution
    """Seconds from a request's submission to its result."""
    requests_per_second: float
    """Requests completed or failed, per second since the reader's previous read; in a pool's first statistics, since
    the reader was made, or since the pool was added if that was later."""
    rows_per_second: float

    def __repr__(self) -> str:
        return (
            f"<PoolStats of {self.name}: {self.queued} queued, {self.running} running, {self.completed} completed, "
            f"{self.failed} failed, {self.batches} batches of {self.mean_batch_size:.3g} rows>"
        )


class ServedPools:
    """The pools of a runtime, which may be added and removed. Thread-safe.

    ``now`` is a tuple of the current pools. It is replaced and never changed, so it can be read without a lock.
    """

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._lock = threading.Lock()
        self.now: tuple[Pool, ...] = tuple(pools)
        self._begun: dict[Pool, tuple[float, Snapshot]] = {}

    def add(self, pools: Iterable[Pool]) -> None:
        with self._lock:
            new = [pool for pool in pools if pool not in self.now]
            self._begun.update({pool: timed_snapshot(pool) for pool in new})
            self.now += tuple(new)

    def remove(self, pools: Iterable[Pool]) -> None:
        with self._lock:
            gone = set(pools)
            self.now = tuple(pool for pool in self.now if pool not in gone)
            for pool in gone:
                self._begun.pop(pool, None)

    def begun(self, pool: Pool) -> tuple[float, Snapshot]:
        """Return the time when the pool was added, with its counters at that time.

        For a pool of the constructor, return the present time and counters.
        """
        with self._lock:
            begun = self._begun.get(pool)
        return timed_snapshot(pool) if begun is None else begun


def timed_snapshot(pool: Pool) -> tuple[float, Snapshot]:
    """Return the time, in seconds of ``time.monotonic()``, and the counters of the pool."""
    return time.monotonic(), pool._statistics()


def pools_followed(runtime: Any) -> Iterable[Pool] | ServedPools:
    """Return the pools of ``runtime`` for a :class:`StatsReader`.

    For a Runtime, this is an object that follows later additions and removals; otherwise the attribute ``pools``.
    """
    found: Iterable[Pool] | ServedPools = getattr(runtime, "_served", runtime.pools)
    return found


class StatsReader:
    """Reads the statistics of pools repeatedly. Rates cover the time since this reader's previous :meth:`read`.

    The first rates of a pool cover the time since the reader was made, or since the pool was added if that was later.

    Args:
        pools: the pools to read. If several have the same name, ``#2``, ``#3``, … is appended to the later ones.
        recent: whether counts and distributions, too, cover only the time since the previous read. Their ``max`` is
            then an upper bound: the end of the last bucket that is not empty, or the largest value of the pool's whole
            life if that is smaller.
    """

    def __init__(self, pools: Iterable[Pool] | ServedPools, *, recent: bool = False) -> None:
        self._pools: ServedPools = pools if isinstance(pools, ServedPools) else ServedPools(pools)
        self._recent = recent
        self._lock = threading.Lock()
        self._names: dict[Pool, str] = {}
        self._before = {pool: timed_snapshot(pool) for pool in self._pools.now}
        self._follow()

    def read(self) -> dict[str, PoolStats]:
        """Return the statistics of every pool, by name."""
        with self._lock:
            self._follow()
            result = {}
            for pool, name in self._names.items():
                (began, before), (ended, after) = self._before[pool], timed_snapshot(pool)
                self._before[pool] = ended, after
                result[name] = pool_stats(name, before, after, ended - began, recent=self._recent)
            return result

    def _follow(self) -> None:
        """Give names to the pools that were added, and forget those that were removed; other pools keep their names."""
        pools = self._pools.now
        self._names = named(pools, {pool: name for pool, name in self._names.items() if pool in pools})
        self._before = {pool: self._before.get(pool) or self._pools.begun(pool) for pool in pools}


def named(pools: Iterable[Pool], known: Mapping[Pool, str]) -> dict[Pool, str]:
    """Return the name to show for each pool: its name in ``known``, or its own name, with ``#2``, … if it is taken."""
    result: dict[Pool, str] = {}
    taken = set(known.values())
    for pool in pools:
        name, number = known.get(pool, pool.name), 1
        while pool not in known and name in taken:
            number += 1
            name = f"{pool.name}#{number}"
        taken.add(name)
        result[pool] = name
    return result


def pool_stats(name: str, before: Snapshot, after: Snapshot, seconds: float, *, recent: bool = False) -> PoolStats:
    """Return the statistics of a pool from two snapshots that were taken ``seconds`` apart."""
    shown = since(before, after) if recent else after
    sizes = distribution(shown["batch_rows"], 1.0)
    done = sum(after[one] - before[one] for one in ("completed", "failed"))
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    return PoolStats(
        name=name,
        queued=after["queued"],
        running=after["running"],
        **{total: shown[total] for total in TOTALS},
        mean_batch_size=sizes.mean,
        batch_sizes=sizes.buckets,
        wait=distribution(shown["wait_ns"], 1e-9),
        process=distribution(shown["process_ns"], 1e-9),
        latency=distribution(shown["latency_ns"], 1e-9),
        requests_per_second=done * per_second,
        rows_per_second=(after["rows"] - before["rows"]) * per_second,
    )


def since(before: Snapshot, after: Snapshot) -> Snapshot:
    """Return the snapshot ``after`` with the counts of ``before`` subtracted; current numbers and maxima are kept."""
    result = dict(after) | {total: after[total] - before[total] for total in TOTALS}
    for name in HISTOGRAMS:
        (counts, total, largest), (earlier, its_total, _) = after[name], before[name]
        result[name] = [now - then for now, then in zip(counts, earlier, strict=True)], total - its_total, largest
    return result


# --- the native histogram: exact up to 3, then four buckets for every power of two (csrc/runtime/statistics.h) ---


def lowest(bucket: int) -> int:
    """Return the smallest value of a bucket, which is also the upper end of the previous bucket."""
    return bucket if bucket < 4 else (4 + bucket % 4) << (bucket // 4 - 1)


def distribution(histogram: tuple[Sequence[int], int, int], unit: float) -> Distribution:
    """Return the distribution of a native histogram. Its integer values are multiplied by ``unit``."""
    counts, total, largest = histogram
    buckets = [Bucket(lowest(i) * unit, lowest(i + 1) * unit, count) for i, count in enumerate(counts) if count > 0]
    if not buckets:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
    count = sum(one.count for one in buckets)
    most = min(buckets[-1].high, largest * unit)  # `largest` may be from the time before these counts
    p50, p90, p99 = (quantile(buckets, share, most) for share in (0.5, 0.9, 0.99))
    return Distribution(count, total * unit / count, p50, p90, p99, most, tuple(buckets))


def quantile(buckets: Sequence[Bucket], share: float, most: float) -> float:
    """Return the value below which the fraction ``share`` of the values lies, but at most ``most``.

    The values are assumed to be spread evenly within each bucket.
    """
    rank = share * sum(one.count for one in buckets)
    for one in buckets:
        if rank <= one.count:
            return min(one.low + (one.high - one.low) * rank / one.count, most)
        rank -= one.count
    return most
