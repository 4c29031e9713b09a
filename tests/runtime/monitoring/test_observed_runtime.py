"""Observes a real runtime: its numbers are consistent in log, monitor, live view and Prometheus."""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import prometheus_client
import pytest
import torch
from limits import LONG

from pymoe.integrations.prometheus import register
from pymoe.runtime import Runtime, TaskPool, top

NEVER = 3600.0


@pytest.fixture
def pool():
    return TaskPool(lambda x: x + 1, name="plus", linger=0.0)


def threads():
    return {one.name for one in threading.enumerate()} & {"pymoe-stats", "pymoe-monitor", "pymoe-top"}


def test_counts_add_up_when_all_is_quiet(pool):
    def odd_fails(x):
        if int(x[0, 0]) % 2:
            raise ValueError("odd")
        return x

    failing = TaskPool(odd_fails, name="failing", max_batch_size=2)
    never = TaskPool(lambda x: x, name="never", min_batch_size=1000)
    with Runtime([pool, failing, never]) as runtime:
        futures = [pool.submit_task(torch.zeros(rows, 2)) for rows in (1, 2, 3, 4)]
        failed = [failing.submit_task(torch.full((2, 1), float(i))) for i in range(10)]
        cancelled = [never.submit_task(torch.zeros(1, 1)) for _ in range(3)]
        assert sum(len(future.result()) for future in futures) == 10
        assert sum(future.exception() is not None for future in failed) == 5
        assert runtime.stats()["never"].queued == 3
        assert all(future.cancel() for future in cancelled)
        stats = runtime.stats()
    one = stats["plus"]
    assert (one.submitted, one.completed, one.rows, one.queued, one.running) == (4, 4, 10, 0, 0)
    assert 1 <= one.batches <= 4
    assert one.mean_batch_size == pytest.approx(10 / one.batches)
    assert sum(bucket.count for bucket in one.batch_sizes) == one.batches == one.process.count
    assert one.wait.count == one.latency.count == 4
    assert one.latency.p50 >= one.wait.p50 >= 0
    assert (stats["failing"].completed, stats["failing"].failed, stats["failing"].batches) == (5, 5, 10)
    assert (stats["never"].cancelled, stats["never"].queued, stats["never"].batches) == (3, 0, 0)


def test_a_full_pool_counts_what_it_did_not_take():
    pool = TaskPool(lambda x: x, name="full", capacity=2, on_full="raise")
    for _ in range(2):
        pool.submit_task(torch.zeros(1, 1))
    with pytest.raises(RuntimeError):
        pool.submit_task(torch.zeros(1, 1))
    runtime = Runtime([pool])
    one = runtime.stats()["full"]
    assert (one.submitted, one.queued, one.rejected) == (2, 2, 1)
    with runtime:
        pass
    assert runtime.stats()["full"].completed == 2


def test_the_native_histogram_has_the_buckets_that_python_reads(pool):
    with Runtime([pool]) as runtime:
        for rows in (1, 3, 4, 5, 63, 64, 65, 1000):
            pool(torch.zeros(rows, 1))
        found = runtime.stats()["plus"].batch_sizes
    for rows in (1, 3, 4, 5, 63, 64, 65, 1000):
        (bucket,) = (one for one in found if one.low <= rows < one.high)
        assert bucket.count >= 1
    assert sum(one.count for one in found) == 8


def test_log_lines_come_from_the_runtime(pool, caplog):
    caplog.set_level(logging.INFO, logger="pymoe.runtime")
    with Runtime([pool], stats_interval=NEVER) as runtime:
        assert "pymoe-stats" in threads()
        for _ in range(3):
            pool(torch.zeros(2, 2))
    assert threads() == set()
    assert not runtime.running
    (line,) = (record.message for record in caplog.records if record.message.startswith("plus: "))
    assert "2 rows a batch" in line


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_an_interval_must_be_positive(pool, interval):
    with pytest.raises(ValueError, match="stats_interval"):
        Runtime([pool], stats_interval=interval)


def test_a_terminal_outside_sees_a_runtime_with_a_monitor(pool, tmp_path):
    with Runtime([pool], monitor=tmp_path / "m"):
        pool(torch.zeros(2, 2))
        found = subprocess.run(
            [sys.executable, "-m", "pymoe.runtime.top", "--once", "--interval", "0.05", str(tmp_path / "m")],
            capture_output=True, text=True, timeout=LONG, check=False,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )  # fmt: skip
        assert "plus " in found.stdout, found.stderr
    assert threads() == set()
    assert list((tmp_path / "m").iterdir()) == []


def test_a_runtime_that_is_dropped_ends_its_observers(pool, tmp_path):
    runtime = Runtime([pool], stats_interval=NEVER, monitor=tmp_path / "m")
    runtime.start()
    assert threads() == {"pymoe-stats", "pymoe-monitor"}
    del runtime
    gc.collect()
    assert threads() == set()
    assert list((tmp_path / "m").iterdir()) == []


def test_the_end_of_the_interpreter_removes_the_socket(tmp_path):
    program = (
        "import torch\n"
        "from pymoe.runtime import Runtime, TaskPool\n"
        "pool = TaskPool(lambda x: x, name='p')\n"
        f"runtime = Runtime([pool], monitor={str(tmp_path / 'm')!r}, stats_interval=0.01)\n"
        "runtime.start()\n"
        "pool(torch.zeros(1, 1))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    assert list((tmp_path / "m").iterdir()) == []


def test_a_monitor_that_cannot_listen_is_an_error_and_leaves_nothing_running(pool, tmp_path):
    runtime = Runtime([pool], monitor=tmp_path / ("x" * 120))
    with pytest.raises(OSError, match="cannot listen"):
        runtime.start()
    assert not runtime.running
    assert threads() == set()


def test_a_monitor_that_only_the_environment_asks_for_is_a_warning(pool, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PYMOE_MONITOR", str(tmp_path / ("x" * 120)))
    with Runtime([pool]):
        assert len(pool(torch.zeros(2, 2))) == 2
    assert any("PYMOE_MONITOR" in record.message for record in caplog.records)


def test_the_live_view_draws_a_runtime(pool):
    out = io.StringIO()
    with Runtime([pool]) as runtime, top.live(runtime, interval=0.01, file=out):
        pool(torch.zeros(2, 2))
    assert "plus " in out.getvalue()
    assert threads() == set()


def test_prometheus_scrapes_a_runtime(pool):
    registry = prometheus_client.CollectorRegistry()
    with Runtime([pool]) as runtime:
        register(runtime, registry=registry)
        for _ in range(5):
            pool(torch.zeros(3, 2))
        labels = {"runtime": "default", "pool": "plus"}
        assert registry.get_sample_value("pymoe_requests_finished_total", labels | {"outcome": "completed"}) == 5
        assert registry.get_sample_value("pymoe_rows_total", labels) == 15
        assert registry.get_sample_value("pymoe_batch_rows_bucket", labels | {"le": "3.0"}) == 5
        assert registry.get_sample_value("pymoe_request_latency_seconds_count", labels) == 5


def test_numbers_can_be_read_while_requests_are_served(pool):
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            pool(torch.zeros(1, 1))

    with Runtime([pool]) as runtime:
        several = [threading.Thread(target=ask) for _ in range(3)]
        for one in several:
            one.start()
        before = 0
        for _ in range(200):
            now = runtime.stats()["plus"]
            assert now.completed >= before
            assert now.requests_per_second >= 0
            assert now.latency.p50 <= now.latency.p99 <= now.latency.max
            before = now.completed
        stop.set()
        for one in several:
            one.join()
