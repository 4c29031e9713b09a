"""Log lines at an interval: one for each busy pool, from a thread that ends with the runtime."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import counted
import pytest

from pymoe.runtime.monitoring.formatting import duration, histogram, line, number, table
from pymoe.runtime.monitoring.observers import Observers
from pymoe.runtime.monitoring.statistics import Bucket

NEVER = 3600.0
PATIENCE = 30.0


class Lines(logging.Handler):
    """Keeps the log's lines, and signals each one."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.came = threading.Semaphore(0)

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.came.release()


@pytest.fixture
def lines():
    """Provide the lines that the logger pymoe.runtime writes."""
    logger, handler = logging.getLogger("pymoe.runtime"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def threads(name):
    return [one for one in threading.enumerate() if one.name == name]


def test_busy_pools_get_a_line_at_every_interval_and_idle_ones_none(lines):
    busy, idle = counted.CountedPool("busy"), counted.CountedPool("idle")
    observers = Observers([busy, idle], stats_interval=0.02, monitor=False)
    observers.start()
    for _ in range(3):
        busy.batch(4, 8, wait=0.001, process=0.002)
        assert lines.came.acquire(timeout=PATIENCE)
    observers.stop()
    assert len(lines.lines) >= 3
    assert all(one.startswith("busy: ") for one in lines.lines)
    assert any("8 rows a batch" in one for one in lines.lines)


def test_the_last_lines_come_at_the_end(lines):
    pool = counted.CountedPool("p")
    observers = Observers([pool], stats_interval=NEVER, monitor=False)
    observers.start()
    pool.batch(4, 8, wait=0.001, process=0.002)
    pool.add(failed=2, rejected=1)
    observers.stop()
    (one,) = lines.lines
    assert "failed 2" in one
    assert "rejected 1" in one
    assert "cancelled" not in one


def test_the_thread_ends_with_the_observers():
    observers = Observers([counted.CountedPool("p")], stats_interval=NEVER, monitor=False)
    assert not threads("pymoe-stats")
    observers.start()
    observers.start()
    assert len(threads("pymoe-stats")) == 1
    observers.stop()
    observers.stop()
    assert not threads("pymoe-stats")


def test_nothing_is_started_that_was_not_asked_for(monkeypatch):
    monkeypatch.delenv("PYMOE_MONITOR", raising=False)
    before = set(threading.enumerate())
    observers = Observers([counted.CountedPool("p")])
    observers.start()
    assert set(threading.enumerate()) == before
    assert observers.socket is None
    observers.stop()


def test_observers_can_be_started_again(lines):
    pool = counted.CountedPool("p")
    observers = Observers([pool], stats_interval=NEVER, monitor=False)
    for requests in (3, 5):
        observers.start()
        pool.batch(requests, requests, wait=0.001, process=0.002)
        observers.stop()
    assert [f"{requests} rows a batch" in one for requests, one in zip((3, 5), lines.lines, strict=True)] == [True] * 2


def test_observers_that_were_never_started_can_be_stopped():
    Observers([counted.CountedPool("p")], stats_interval=1.0, monitor=False).stop()


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
def test_an_interval_must_be_positive(interval):
    with pytest.raises(ValueError, match="stats_interval must be a positive number of seconds"):
        Observers([], stats_interval=interval)


def test_a_pool_is_not_held_once_the_observers_have_gone():
    pool = counted.CountedPool("p")
    gone = weakref.ref(pool)
    observers = Observers([pool], stats_interval=NEVER, monitor=False)
    observers.start()
    observers.stop()
    del pool, observers
    gc.collect()
    assert gone() is None


# --- text ---


def test_a_line_says_what_matters():
    from pymoe.runtime.monitoring.statistics import pool_stats

    pool = counted.CountedPool("expert.forward")
    before = pool._statistics()
    pool.batch(64, 64, wait=0.0005, process=0.002)
    pool.add(queued=7)
    text = line(pool_stats("expert.forward", before, pool._statistics(), 0.5))
    assert text.startswith("expert.forward: 128 requests/s, 128 rows/s, 64 rows a batch, queued 7, wait p50 ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0"), (2.5, "2.5 s"), (0.0321, "32.1 ms"), (4.2e-5, "42 us"), (3e-7, "300 ns")]
)
def test_durations_have_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1.234, "1.23"), (99.5, "99.5"), (123456.7, "123,457")])
def test_numbers_have_three_digits_or_all_before_the_point(value, text):
    assert number(value) == text


def test_a_histogram_has_a_bar_for_every_power_of_two():
    assert histogram([]) == ""
    assert histogram([Bucket(1, 2, 8), Bucket(4, 5, 4), Bucket(6, 7, 4), Bucket(64, 80, 1)]) == "█ █   ▁"


def test_tables_have_lines_of_one_layout():
    from pymoe.runtime.monitoring.statistics import StatsReader

    pools = [counted.CountedPool("a"), counted.CountedPool("a pool with a long name")]
    heading, first, second = table(StatsReader(pools).read().values()).splitlines()
    assert heading.startswith("pool ")
    assert first.startswith("a  ")
    assert second.startswith("a pool with a long name  ")
    assert heading.index("queued") + len("queued") == second.index(" 0 ") + 2
