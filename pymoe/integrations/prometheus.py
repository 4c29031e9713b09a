"""Runtimes for Prometheus, through the package prometheus-client (``pip install prometheus-client``).

::

    from prometheus_client import start_http_server
    from pymoe.integrations.prometheus import register

    register(runtime)
    start_http_server(9100, addr="127.0.0.1")

Every series has the labels ``runtime`` (its name in :func:`register`) and ``pool``; the documentation's page
"Prometheus metrics" lists them all. The ends of the time buckets are 2^n nanoseconds, from a microsecond to about 70
seconds: those of the runtime's own histograms, so that no count is a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pymoe.runtime.monitoring.statistics import Bucket, PoolStats, StatsReader, pools_followed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["RuntimeCollector", "register"]

MISSING = "pymoe.integrations.prometheus needs prometheus-client: pip install prometheus-client"
LABELS = ("runtime", "pool")
OUTCOMES = ("completed", "failed", "cancelled", "expired")
ROW_ENDS = tuple((1 << n) - 1 for n in range(1, 17))
SECOND_ENDS = tuple((1 << n) * 1e-9 for n in range(10, 37))


class RuntimeCollector:
    """A collector for prometheus-client: reads the pools whenever it is scraped.

    Args:
        runtimes: a :class:`pymoe.runtime.Runtime`, or several by name; the name is the label ``runtime``, and that of
            a single one is ``default``.

    Raises:
        ImportError: prometheus-client is not installed.
    """

    def __init__(self, runtimes: Any) -> None:
        try:
            import prometheus_client.core
        except ImportError as error:
            raise ImportError(MISSING) from error
        self._core = prometheus_client.core
        by_name = runtimes if isinstance(runtimes, Mapping) else {"default": runtimes}
        self._readers = {name: StatsReader(pools_followed(one)) for name, one in by_name.items()}

    def collect(self) -> Iterator[Metric]:
        """The families of series, as prometheus-client asks for them."""
        pools = {(name, pool): stats for name, reader in self._readers.items() for pool, stats in reader.read().items()}
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        finished = counter("pymoe_requests_finished", "Requests that ended", labels=(*LABELS, "outcome"))
        for labels, stats in pools.items():
            for outcome in OUTCOMES:
                finished.add_metric((*labels, outcome), getattr(stats, outcome))
        yield finished
        for kind, name, about, field in (
            (counter, "pymoe_requests_submitted", "Requests taken in", "submitted"),
            (counter, "pymoe_requests_rejected", "Requests that a full pool did not take in", "rejected"),
            (gauge, "pymoe_requests_queued", "Requests that wait", "queued"),
            (gauge, "pymoe_requests_running", "Requests whose batch runs", "running"),
            (counter, "pymoe_batches", "Batches that were run", "batches"),
            (counter, "pymoe_rows", "Rows of the batches that were run", "rows"),
        ):
            family = kind(name, about, labels=LABELS)
            for labels, stats in pools.items():
                family.add_metric(labels, getattr(stats, field))
            yield family
        yield self._sizes(pools)
        yield self._times("pymoe_batch_seconds", "What a batch took", pools, lambda stats: stats.process)
        yield self._times("pymoe_request_wait_seconds", "From submission to batch", pools, lambda stats: stats.wait)
        yield self._times("pymoe_request_latency_seconds", "From submission to result", pools, lambda one: one.latency)

    def _sizes(self, pools: dict[tuple[str, str], PoolStats]) -> Metric:
        family = self._core.HistogramMetricFamily("pymoe_batch_rows", "Rows of a batch", labels=LABELS)
        for labels, stats in pools.items():
            largest = [Bucket(one.low, one.high - 1, one.count) for one in stats.batch_sizes]  # rows are whole
            family.add_metric(labels, cumulative(largest, ROW_ENDS), sum_value=stats.mean_batch_size * stats.batches)
        return family

    def _times(
        self, name: str, about: str, pools: dict[tuple[str, str], PoolStats], of: Callable[[PoolStats], Any]
    ) -> Metric:
        family = self._core.HistogramMetricFamily(name, about, labels=LABELS)
        for labels, stats in pools.items():
            found = of(stats)
            family.add_metric(labels, cumulative(found.buckets, SECOND_ENDS), sum_value=found.sum)
        return family


def register(runtimes: Any, *, registry: CollectorRegistry | None = None) -> RuntimeCollector:
    """Make a :class:`RuntimeCollector` and register it (None: with the default registry); returns it.

    All runtimes of a registry belong into one collector; ``registry.unregister`` takes it out again.
    """
    collector = RuntimeCollector(runtimes)
    if registry is None:
        from prometheus_client import REGISTRY

        registry = REGISTRY
    registry.register(collector)
    return collector


def cumulative(buckets: Sequence[Bucket], ends: tuple[float, ...]) -> list[tuple[str, float]]:
    """Prometheus' buckets: for each end, how many values lie in buckets that end there or before."""
    everything = sum(one.count for one in buckets)
    counts = [sum(one.count for one in buckets if one.high <= end * (1 + 1e-9)) for end in ends]
    return [*((str(float(end)), count) for end, count in zip(ends, counts, strict=True)), ("+Inf", everything)]
