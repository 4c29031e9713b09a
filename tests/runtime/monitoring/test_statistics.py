"""PoolStats: computes quantiles, rates and recent numbers from a pool's counters."""

from __future__ import annotations

import dataclasses
import random
import statistics

import counted
import pytest

from pymoe.runtime.monitoring.statistics import Bucket, StatsReader, distribution, lowest


@pytest.fixture
def clock(monkeypatch):
    """Replace the reader's clock by one that tests advance."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    one = Clock()
    monkeypatch.setattr("pymoe.runtime.monitoring.statistics.time", one)
    return one


def test_buckets_are_those_of_the_native_histogram():
    for value in [*range(2000), *(random.Random(0).getrandbits(bits) for bits in range(1, 63) for _ in range(20))]:
        i = counted.bucket(value)
        assert lowest(i) <= value < lowest(i + 1)
        assert lowest(i + 1) - lowest(i) <= max(1, lowest(i) / 4)


@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_quantiles_are_off_by_a_quarter_at_most_and_mean_and_max_are_exact(unit):
    pool = counted.CountedPool("p")
    values = [round(random.Random(1).lognormvariate(12, 1.5)) + i for i in range(5000)]
    pool.values["wait_ns"] = values
    found = distribution(pool._statistics()["wait_ns"], unit)
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values) * unit)
    assert found.sum == pytest.approx(sum(values) * unit)
    assert found.max == pytest.approx(max(values) * unit)
    cuts = statistics.quantiles(values, n=100)
    for name, cut in (("p50", cuts[49]), ("p90", cuts[89]), ("p99", cuts[98])):
        assert getattr(found, name) == pytest.approx(cut * unit, rel=0.25)
    assert found.p50 <= found.p90 <= found.p99 <= found.max


def test_equal_values_have_quantiles_within_their_bucket():
    pool = counted.CountedPool("p")
    pool.values["wait_ns"] = [1_000_000] * 50
    found = distribution(pool._statistics()["wait_ns"], 1e-9)
    assert found.max == found.p99 == pytest.approx(1e-3)
    assert found.p50 == pytest.approx(1e-3, rel=0.125)
    (one,) = found.buckets
    assert one.low <= 1e-3 < one.high
    assert one.count == 50


def test_nothing_counted_is_zero_everywhere(clock):
    one = StatsReader([counted.CountedPool("p")]).read()["p"]
    numbers = dataclasses.asdict(one)
    assert numbers.pop("name") == "p"
    assert numbers.pop("batch_sizes") == ()
    for name in ("wait", "process", "latency"):
        assert set(numbers.pop(name).values()) == {0, ()}
    assert set(numbers.values()) == {0}


def test_rates_are_since_the_previous_call_and_counts_since_the_beginning(clock):
    pool = counted.CountedPool("p")
    reader = StatsReader([pool])
    for _ in range(4):
        pool.batch(8, 16, wait=0.001, process=0.002)
    pool.add(failed=8, submitted=8)
    clock.now += 2.0
    first = reader.read()["p"]
    assert (first.submitted, first.completed, first.failed, first.batches, first.rows) == (40, 32, 8, 4, 64)
    assert first.mean_batch_size == 16
    assert first.batch_sizes == (Bucket(16, 20, 4),)
    assert first.requests_per_second == pytest.approx(20)
    assert first.rows_per_second == pytest.approx(32)
    pool.batch(2, 2, wait=0.001, process=0.002)
    clock.now += 0.5
    second = reader.read()["p"]
    assert second.completed == 34
    assert second.requests_per_second == pytest.approx(4)
    clock.now += 1.0
    assert reader.read()["p"].requests_per_second == 0


def test_a_recent_reader_forgets_what_was_before(clock):
    pool = counted.CountedPool("p")
    pool.batch(64, 64, wait=1.0, process=1.0)
    reader = StatsReader([pool], recent=True)
    pool.batch(4, 8, wait=0.001, process=0.002)
    pool.add(queued=3, running=5, expired=1)
    clock.now += 1.0
    one = reader.read()["p"]
    assert (one.completed, one.batches, one.rows, one.expired) == (4, 1, 8, 1)
    assert (one.queued, one.running) == (3, 5)
    assert one.mean_batch_size == 8
    assert one.wait.count == 4
    assert one.wait.mean == pytest.approx(0.001)
    assert one.wait.max == pytest.approx(0.001, rel=0.25)
    assert reader.read()["p"].completed == 0


def test_readers_do_not_disturb_each_other(clock):
    pool = counted.CountedPool("p")
    mine, theirs = StatsReader([pool]), StatsReader([pool])
    pool.batch(10, 10, wait=0.1, process=0.1)
    clock.now += 1.0
    assert mine.read()["p"].requests_per_second == theirs.read()["p"].requests_per_second == pytest.approx(10)


def test_two_reads_at_one_moment_give_no_rate_and_no_error(clock):
    reader = StatsReader([counted.CountedPool("p")])
    assert reader.read()["p"].requests_per_second == 0


def test_pools_of_one_name_are_told_apart():
    reader = StatsReader([counted.CountedPool("p"), counted.CountedPool("q"), counted.CountedPool("p")])
    assert list(reader.read()) == ["p", "q", "p#2"]
    assert [one.name for one in reader.read().values()] == ["p", "q", "p#2"]


def test_stats_cannot_be_changed():
    one = StatsReader([counted.CountedPool("p")]).read()["p"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.completed = 3
