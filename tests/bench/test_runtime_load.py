"""Tests that benchmarks/runtime_load.py checks all answers, and detects systems that are wrong, stall or stop."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import runtime_load  # noqa: E402
from benchmarks.common.targets import targets_table  # noqa: E402
from benchmarks.runtime import clients, profile, report, systems  # noqa: E402
from benchmarks.runtime.batcher import BatcherServer  # noqa: E402
from benchmarks.runtime.clients import Effort, Log, Window  # noqa: E402
from benchmarks.runtime.ours import BackendServer, PoolServer  # noqa: E402
from benchmarks.runtime.scenario import Cell, Expert  # noqa: E402
from benchmarks.runtime.serving import InProcess, check  # noqa: E402

SHORT = Effort(0.0, 0.0, cycles=2, limit=30.0)
NO_HIVEMIND = Path("/no/such/python")
IN_PROCESS = (systems.PYMOE, systems.POOL, systems.BATCHER, systems.DIRECT, systems.READY)


def run(monkeypatch, folder, *options):
    """Run main() with these options; return its exit status and the results it wrote."""
    monkeypatch.setattr("sys.argv", ["runtime_load", "--hivemind", str(NO_HIVEMIND), "--output", str(folder), *options])
    monkeypatch.setattr(runtime_load, "FULL", SHORT)
    status = runtime_load.main()
    return status, json.loads((folder / "runtime_load.json").read_text())


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_tiny_run_finds_everyone_right(monkeypatch, tmp_path, direction, kind):
    cells = f"small {direction} 1 row 8 {'thread' if kind == 'threads' else 'coroutine'}"
    status, result = run(monkeypatch, tmp_path, "--systems", ",".join(IN_PROCESS), "--cells", cells, "--rounds", "2")
    assert status == 0
    (record,) = result["cells"]
    assert record["cell"]["kind"] == kind
    assert set(record["systems"]) == set(IN_PROCESS)
    for one in record["systems"].values():
        assert one["verdict"] == "right"
        assert one["starved"] == 0
        assert one["rate"]["median"] > 0
        assert 0 < one["p50"]["median"] <= one["p99"]["median"]
    assert set(record["systems"][systems.PYMOE]["over"]) == set(IN_PROCESS) - {systems.PYMOE}
    text = (tmp_path / "runtime_load.md").read_text()
    assert f"| small | {direction} | 1 | 8 {kind} |" in text
    assert (tmp_path / "runtime_load.png").stat().st_size > 1000


# --- systems that are broken ---


class Broken(BatcherServer):
    """A batcher whose answers go through ``spoil``."""

    def __init__(self, expert, spoil):
        super().__init__(expert)
        for direction, batcher in self.batchers.items():
            batcher.function = spoil(direction, batcher.function, expert)


def swap_rows(direction, function, expert):
    return lambda *tensors: function(*tensors).flip(0)


def slightly_off(direction, function, expert):
    return lambda *tensors: function(*tensors) * 1.001


def raises(direction, function, expert):
    def broken(*tensors):
        raise ValueError("no")

    return broken


def answers_the_request_before(direction, function, expert):
    last = []

    def stale(*tensors):
        last.append(function(*tensors))
        before = last[-2] if len(last) > 1 and last[-2].shape == last[-1].shape else last[-1]
        return before

    return stale


def no_step(direction, function, expert):
    if direction == "backward":
        expert.optimizer.step = lambda: None
    return function


@pytest.mark.parametrize(
    "spoil",
    [swap_rows, slightly_off, raises, answers_the_request_before, no_step],
)
def test_a_broken_system_is_found_by_the_check(spoil):
    assert check(lambda expert: Broken(expert, spoil)) != ""


@pytest.mark.parametrize("server", [BatcherServer, BackendServer, PoolServer])
def test_the_check_finds_nothing_wrong_with_who_is_measured(server):
    assert check(server) == ""


def test_a_system_that_never_answers_is_found_by_the_check():
    release = threading.Event()

    def stalls(direction, function, expert):
        return lambda *tensors: release.wait() and function(*tensors)

    try:
        assert "not answered" in check(lambda expert: Broken(expert, stalls), patience=0.1)
    finally:
        release.set()


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_answers_are_checked_under_load_too(kind):
    expert = Expert("small")
    contender = InProcess(Broken(expert, slightly_off), expert, lambda: 0.0)
    sample = contender.measure(Cell("small", "forward", 16, 8, kind), SHORT)
    contender.close()
    assert sample.wrong == 8
    assert runtime_load.verdict([sample]) == "WRONG"


def test_a_wrong_answer_fails_the_run_and_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(systems, "BatcherServer", lambda expert: Broken(expert, slightly_off))
    status, result = run(
        monkeypatch, tmp_path, "--systems", "batcher,direct", "--cells", "small forward 1 row 1 thread", "--rounds", "1"
    )
    assert status == 1
    assert result["cells"][0]["systems"]["batcher"]["verdict"] == "WRONG"
    assert result["systems"]["batcher"]["fault"].startswith("forward: a wrong answer")
    assert "WRONG" in (tmp_path / "runtime_load.md").read_text()


# --- figures ---


def test_rate_and_latency_are_those_of_the_clients_cycles():
    # Two clients that are served in batches every 0.1 s, and one every 0.05 s: 10 + 10 + 20 requests per second,
    # wherever the window begins and ends.
    right = [[torch.ones(1, 1)]] * 3
    stamps = [[0.1 * i for i in range(20)]] * 2 + [[0.05 * i for i in range(40)]]
    for begin, end in ((0.31, 1.49), (0.39, 1.41), (0.3, 1.5)):
        window = Window(lambda: 0.0, begin=begin, end=end, cpu_seconds=4.0)
        sample = clients.summary(window, [Log(own, torch.ones(1, 1)) for own in stamps], right)
        assert sample.rate == pytest.approx(40)
        assert sample.p99 == pytest.approx(0.1)
        assert sample.cpu == pytest.approx(4.0 / (40 * (end - begin)))
        assert (sample.wrong, sample.starved) == (0, 0)


def test_a_starved_client_is_counted():
    window = Window(lambda: 0.0, begin=0.0, end=1.0)
    logs = [Log([0.1, 0.2, 0.3], torch.ones(1, 1)), Log([0.5], torch.ones(1, 1)), Log([], None)]
    sample = clients.summary(window, logs, [[torch.ones(1, 1)]] * 3)
    assert sample.starved == 2
    assert sample.rate == pytest.approx(10)


def test_ratios_are_taken_round_by_round():
    def sample(rate):
        return clients.Sample(rate, 0.1, 0.2, 0.001, 10)

    cell = Cell("small", "forward", 1, 1, "threads")
    record = runtime_load.record_of(
        cell, {"pymoe": [sample(30), sample(90), sample(8)], "direct": [sample(10), sample(30), sample(4)]}
    )
    assert record["systems"]["pymoe"]["over"]["direct"]["median"] == 3.0


def test_a_target_is_met_missed_or_not_measured():
    def record(cell, **over):
        ratios = {name.replace("_", " "): {"low": r, "median": r, "high": r} for name, r in over.items()}
        return {"cell": runtime_load.asdict(cell), "systems": {"pymoe": {"over": ratios}}}

    judged = report.judged([record(report.TARGETS[0][0], hivemind=100.0, batcher=2.9)])
    assert [one["met"] for one in judged] == [True, False, None, None, None, None]
    words = [row[-1] for row in targets_table(judged).rows]
    assert words == ["met", "missed", *["not measured"] * 4]


# --- hivemind's process ---


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_profile_says_where_the_time_goes(kind):
    cell = Cell("small", "backward", 2, 4, kind)
    rows = {row["what"]: row["value"] for row in profile.profile(cell, seconds=0.1)["rows"]}
    assert 2 <= rows["mean batch, rows"] <= 8
    assert rows["wall time"] > 0
    parts = [value for what, value in rows.items() if what.startswith("part: ")]
    assert len(parts) == 4
    assert all(value > 0 for value in parts)
    assert rows["sum of the parts"] > rows["part: the expert's function"]
    assert rows["clients: on a core"] > 0


def test_hivemind_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch, tmp_path):
    status, result = run(
        monkeypatch,
        tmp_path,
        "--systems",
        "hivemind,direct",
        "--cells",
        "small forward 1 row 1 thread",
        "--rounds",
        "1",
    )
    assert status == 0
    assert "make bench-runtime" in result["systems"]["hivemind"]["absent"]
    assert set(result["cells"][0]["systems"]) == {"direct"}
