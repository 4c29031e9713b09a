"""Tests of the Prometheus collector: stable names and labels, exact buckets, and values that can be scraped."""

from __future__ import annotations

import sys
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "monitoring"))

import counted

from pymoe.integrations import prometheus
from pymoe.integrations.prometheus import RuntimeCollector, register


class Served:
    """The part of a runtime that the collector needs."""

    def __init__(self, *pools):
        self.pools = pools


@pytest.fixture
def pool():
    """Return a pool with three batches and with requests that ended in every way."""
    one = counted.CountedPool("expert.forward")
    one.batch(4, 8, wait=0.001, process=0.002)
    one.batch(1, 1, wait=0.01, process=0.002)
    one.batch(64, 64, wait=0.0001, process=0.02)
    one.add(submitted=6, failed=1, cancelled=2, expired=3, rejected=4, queued=5, running=6)
    return one


def scrape(*runtimes, **named):
    """Return all samples by name and labels, as a server would read them."""
    registry = prometheus_client.CollectorRegistry()
    register(named or runtimes[0], registry=registry)
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(name, pool="expert.forward", runtime="default", **labels):
    return (name, *sorted({"pool": pool, "runtime": runtime, **labels}.items()))


def test_counters_and_gauges(pool):
    found = scrape(Served(pool))
    assert found[of("pymoe_requests_submitted_total")] == 75
    outcomes = {"completed": 69, "failed": 1, "cancelled": 2, "expired": 3}
    for outcome, count in outcomes.items():
        assert found[of("pymoe_requests_finished_total", outcome=outcome)] == count
    assert found[of("pymoe_requests_rejected_total")] == 4
    assert found[of("pymoe_requests_queued")] == 5
    assert found[of("pymoe_requests_running")] == 6
    assert found[of("pymoe_batches_total")] == 3
    assert found[of("pymoe_rows_total")] == 73


def test_the_names_are_those_that_dashboards_know(pool):
    names = {name for name, *_ in scrape(Served(pool))}
    histograms = {
        f"{base}_{part}"
        for base in (
            "pymoe_batch_rows",
            "pymoe_batch_seconds",
            "pymoe_request_wait_seconds",
            "pymoe_request_latency_seconds",
        )
        for part in ("bucket", "count", "sum")
    }
    assert names == histograms | {
        "pymoe_requests_submitted_total",
        "pymoe_requests_finished_total",
        "pymoe_requests_rejected_total",
        "pymoe_requests_queued",
        "pymoe_requests_running",
        "pymoe_batches_total",
        "pymoe_rows_total",
    }


def test_batch_rows_are_counted_exactly_up_to_every_end(pool):
    found = scrape(Served(pool))
    for end in prometheus.ROW_ENDS:
        assert found[of("pymoe_batch_rows_bucket", le=str(float(end)))] == sum(rows <= end for rows in (8, 1, 64))
    assert found[of("pymoe_batch_rows_bucket", le="+Inf")] == found[of("pymoe_batch_rows_count")] == 3
    assert found[of("pymoe_batch_rows_sum")] == pytest.approx(73)


def test_times_are_counted_exactly_up_to_every_end(pool):
    found = scrape(Served(pool))
    waits = [0.001] * 4 + [0.01] + [0.0001] * 64
    for end in prometheus.SECOND_ENDS:
        assert found[of("pymoe_request_wait_seconds_bucket", le=str(end))] == sum(wait < end for wait in waits)
    assert found[of("pymoe_request_wait_seconds_count")] == 69
    assert found[of("pymoe_request_wait_seconds_sum")] == pytest.approx(sum(waits))
    assert found[of("pymoe_batch_seconds_sum")] == pytest.approx(0.024)
    assert found[of("pymoe_request_latency_seconds_count")] == 69


def test_a_pool_without_requests_has_all_its_series(pool):
    empty, full = scrape(Served(counted.CountedPool("expert.forward"))), scrape(Served(pool))
    assert empty.keys() == full.keys()
    assert set(empty.values()) == {0}


def test_counters_never_fall_and_follow_the_pool(pool):
    registry = prometheus_client.CollectorRegistry()
    register(Served(pool), registry=registry)
    labels = {"runtime": "default", "pool": "expert.forward"}
    before = registry.get_sample_value("pymoe_batches_total", labels)
    pool.batch(1, 1, wait=0.1, process=0.1)
    assert registry.get_sample_value("pymoe_batches_total", labels) == before + 1


def test_several_runtimes_share_a_registry(pool):
    found = scrape(a=Served(pool), b=Served(pool, pool))
    assert found[of("pymoe_batches_total", runtime="a")] == 3
    assert found[of("pymoe_batches_total", runtime="b", pool="expert.forward#2")] == 3


def test_a_collector_can_be_taken_out_again(pool):
    registry = prometheus_client.CollectorRegistry()
    collector = register(Served(pool), registry=registry)
    registry.unregister(collector)
    assert b"pymoe" not in prometheus_client.generate_latest(registry)


def test_the_default_registry_is_prometheus_clients_own(pool):
    collector = register(Served(pool))
    try:
        assert b"pymoe_batches_total" in prometheus_client.generate_latest(prometheus_client.REGISTRY)
    finally:
        prometheus_client.REGISTRY.unregister(collector)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="pip install prometheus-client"):
        RuntimeCollector(Served())
