"""Metrics of runtimes and of servers of experts for Prometheus, through the package prometheus-client (``pip install
prometheus-client``).

::

    from prometheus_client import start_http_server
    from pymoe.integrations.prometheus import register

    register(runtime)
    start_http_server(9100, addr="127.0.0.1")

``register`` also takes a :class:`pymoe.remote.ExpertServer`: its metrics cover the server's runtime and its calls.

Every series of a pool has the labels ``runtime`` (its name in :func:`register`) and ``pool``; the documentation's page
"Prometheus metrics" lists them all. Time buckets end at 2^n nanoseconds, from a microsecond to about 70 seconds, like
those of the runtime's own histograms, so that counts are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pymoe.runtime.monitoring.statistics import Bucket, Distribution, StatsReader, pools_followed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["RuntimeCollector", "register", "serve"]

MISSING = "pymoe.integrations.prometheus needs prometheus-client: pip install prometheus-client"
LABELS = ("runtime", "pool")
OUTCOMES = ("completed", "failed", "cancelled", "expired")
ROW_ENDS = tuple((1 << n) - 1 for n in range(1, 17))
SECOND_ENDS = tuple((1 << n) * 1e-9 for n in range(10, 37))


class RuntimeCollector:
    """A collector for prometheus-client that reads the statistics of all pools at every scrape.

    Args:
        runtimes: a :class:`pymoe.runtime.Runtime` or :class:`pymoe.remote.ExpertServer`, or a dict of several by name.
            The name is the label ``runtime``; for a single one it is ``default``.

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
        self._servers = {name: one for name, one in by_name.items() if hasattr(one, "runtime")}
        found = {name: getattr(one, "runtime", one) for name, one in by_name.items()}
        self._readers = {name: StatsReader(pools_followed(one)) for name, one in found.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; prometheus-client calls this for every scrape."""
        pools = {(name, pool): stats for name, reader in self._readers.items() for pool, stats in reader.read().items()}
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        finished = counter("pymoe_requests_finished", "Requests that ended", labels=(*LABELS, "outcome"))
        for labels, stats in pools.items():
            for outcome in OUTCOMES:
                finished.add_metric((*labels, outcome), getattr(stats, outcome))
        yield finished
        for kind, name, about, field in (
            (counter, "pymoe_requests_submitted", "Requests accepted", "submitted"),
            (counter, "pymoe_requests_rejected", "Requests that a full pool rejected", "rejected"),
            (gauge, "pymoe_requests_queued", "Requests that wait", "queued"),
            (gauge, "pymoe_requests_running", "Requests whose batch runs", "running"),
            (counter, "pymoe_batches", "Batches that ran", "batches"),
            (counter, "pymoe_rows", "Rows of the batches that ran", "rows"),
        ):
            family = kind(name, about, labels=LABELS)
            for labels, stats in pools.items():
                family.add_metric(labels, getattr(stats, field))
            yield family
        histogram = self._core.HistogramMetricFamily
        sizes = histogram("pymoe_batch_rows", "Rows of a batch", labels=LABELS)
        for labels, stats in pools.items():
            # Numbers of rows are integers, so the largest one below ``high`` is ``high - 1``.
            largest = [Bucket(one.low, one.high - 1, one.count) for one in stats.batch_sizes]
            sizes.add_metric(labels, cumulative(largest, ROW_ENDS), sum_value=stats.mean_batch_size * stats.batches)
        yield sizes
        for name, about, field in (
            ("pymoe_batch_seconds", "Duration of a batch", "process"),
            ("pymoe_request_wait_seconds", "From submission to batch", "wait"),
            ("pymoe_request_latency_seconds", "From submission to result", "latency"),
        ):
            times = histogram(name, about, labels=LABELS)
            for labels, stats in pools.items():
                found: Distribution = getattr(stats, field)
                times.add_metric(labels, cumulative(found.buckets, SECOND_ENDS), sum_value=found.sum)
            yield times
        if self._servers:
            yield from self._collect_servers()

    def _collect_servers(self) -> Iterator[Metric]:
        calls = self._core.CounterMetricFamily(
            "pymoe_remote_calls", "Calls to a server of experts", labels=("runtime", "outcome")
        )
        updates = self._core.GaugeMetricFamily(
            "pymoe_remote_expert_updates", "Updates that an expert has seen", labels=("runtime", "expert")
        )
        held = self._core.GaugeMetricFamily("pymoe_remote_bytes", "Bytes of calls under way", labels=("runtime",))
        for name, server in self._servers.items():
            for outcome, count in sorted(server.counts.items()):
                calls.add_metric((name, outcome), count)
            for expert, backend in server.experts.items():
                updates.add_metric((name, expert), backend.updates)
            held.add_metric((name,), server.bytes_in_flight)
        yield from (calls, updates, held)


def register(runtimes: Any, *, registry: CollectorRegistry | None = None) -> RuntimeCollector:
    """Register a new :class:`RuntimeCollector` of ``runtimes`` with ``registry``, and return the collector.

    ``registry=None`` means the default registry. Put all runtimes into a single collector per registry, because two
    collectors would have series of the same names; ``registry.unregister`` removes a collector.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: ``registry``, if it checks names as the default registry does, has series of the same names.
    """
    collector = RuntimeCollector(runtimes)
    if registry is None:
        from prometheus_client import REGISTRY

        registry = REGISTRY
    registry.register(collector)
    return collector


def serve(runtimes: Any, port: int) -> None:
    """Start a thread that serves the metrics of ``runtimes`` at ``http://127.0.0.1:PORT/metrics``, and return.

    ``runtimes`` is as for :class:`RuntimeCollector`.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ImportError(MISSING) from error
    registry = CollectorRegistry()
    register(runtimes, registry=registry)
    start_http_server(port, addr="127.0.0.1", registry=registry)


def cumulative(buckets: Sequence[Bucket], ends: tuple[float, ...]) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: for each upper end, the number of values in buckets that end there or before."""
    everything = sum(one.count for one in buckets)
    counts = [sum(one.count for one in buckets if one.high <= end * (1 + 1e-9)) for end in ends]
    return [*((str(float(end)), count) for end, count in zip(ends, counts, strict=True)), ("+Inf", everything)]
