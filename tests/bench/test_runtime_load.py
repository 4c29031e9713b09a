"""benchmarks/runtime_load.py: every system's answers are checked, and one that lies, stalls or stops is noticed."""

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
from benchmarks.runtime import clients, hivemind_peer, profile, report, systems, targets  # noqa: E402
from benchmarks.runtime.batcher import Batcher, BatcherServer  # noqa: E402
from benchmarks.runtime.bounds import Direct  # noqa: E402
from benchmarks.runtime.clients import Effort, Log, Window  # noqa: E402
from benchmarks.runtime.ours import BackendServer, PoolServer  # noqa: E402
from benchmarks.runtime.scenario import Cell, Expert, all_cells, call, is_right, prepared, requests  # noqa: E402
from benchmarks.runtime.serving import InProcess, check  # noqa: E402

SHORT = Effort(0.0, 0.0, cycles=2, limit=30.0)
NO_HIVEMIND = Path("/no/such/python")
IN_PROCESS = (systems.PYMOE, systems.POOL, systems.BATCHER, systems.DIRECT, systems.READY)


def run(monkeypatch, folder, *options):
    """main() with these options; its exit status and what it wrote."""
    monkeypatch.setattr("sys.argv", ["runtime_load", "--hivemind", str(NO_HIVEMIND), "--output", str(folder), *options])
    monkeypatch.setattr(runtime_load, "FULL", SHORT)
    status = runtime_load.main()
    return status, json.loads((folder / "runtime_load.json").read_text())


def test_every_combination_is_a_cell():
    cells = all_cells()
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 3 * 2
    assert all(target.cell in cells for target in targets.TARGETS)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_two_requests_are_alike(direction):
    asked = [request[0] for client in requests(Cell("small", direction, 1, 8, "threads")) for request in client]
    assert len({tuple(one.flatten().tolist()) for one in asked}) == len(asked)


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


def in_half_precision(direction, function, expert):
    return lambda *tensors: function(*tensors).bfloat16()


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


def two_steps(direction, function, expert):
    if direction == "backward":
        once = expert.optimizer.step
        expert.optimizer.step = lambda: (once(), once())
    return function


def keeps_gradients(direction, function, expert):
    if direction == "backward":
        expert.optimizer.zero_grad = lambda set_to_none: None
    return function


def forward_trains(direction, function, expert):
    def also_trains(*tensors):
        with torch.no_grad():
            expert.module[0].bias += 0.01
        return function(*tensors)

    return also_trains if direction == "forward" else function


@pytest.mark.parametrize(
    "spoil",
    [
        swap_rows,
        slightly_off,
        raises,
        in_half_precision,
        answers_the_request_before,
        no_step,
        two_steps,
        keeps_gradients,
        forward_trains,
    ],
)
def test_a_broken_system_is_found_by_the_check(spoil):
    assert check(lambda expert: Broken(expert, spoil)) != ""


@pytest.mark.parametrize("server", [BatcherServer, BackendServer, PoolServer])
def test_the_check_finds_nothing_wrong_with_who_is_measured(server):
    assert check(server) == ""


def test_a_pymoe_that_cannot_be_measured_fails_the_run(monkeypatch, tmp_path):
    def fails(expert):
        raise RuntimeError("no workers")

    monkeypatch.setattr(systems, "BackendServer", fails)
    cell = ("--cells", "small forward 1 row 1 thread", "--rounds", "1")
    status, result = run(monkeypatch, tmp_path, "--systems", "pymoe,direct", *cell)
    assert status == 1
    assert result["systems"]["pymoe"]["absent"] == "RuntimeError: no workers"


def test_a_system_that_never_answers_is_found_by_the_check():
    release = threading.Event()

    def stalls(direction, function, expert):
        return lambda *tensors: release.wait() and function(*tensors)

    try:
        assert "not answered" in check(lambda expert: Broken(expert, stalls), patience=0.1)
    finally:
        release.set()


@pytest.mark.parametrize("spoil", [swap_rows, slightly_off, in_half_precision])
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_answers_are_checked_under_load_too(kind, spoil):
    expert = Expert("small")
    contender = InProcess(Broken(expert, spoil), expert, lambda: 0.0)
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


def test_a_system_that_raises_under_load_is_named_and_measured_no_more(monkeypatch, tmp_path):
    calls = []

    def fails_at_third(self, cell, effort):
        calls.append(cell)
        if len(calls) == 3:
            raise TimeoutError("client-0 never got its answer")
        return right(self, cell, effort)

    right = InProcess.measure
    monkeypatch.setattr(InProcess, "measure", fails_at_third)
    status, result = run(
        monkeypatch,
        tmp_path,
        "--systems",
        "batcher,direct",
        "--cells",
        "small forward 1 row .* thread",
        "--rounds",
        "2",
    )
    assert status == 0  # a peer's failure is no fault of pymoe
    first, second, third = (record["systems"] for record in result["cells"])
    assert first["batcher"]["verdict"] == "right"
    assert second["batcher"]["verdict"].startswith("TimeoutError: client-0")
    assert "batcher" not in third
    assert third["direct"]["verdict"] == "right"


def test_a_client_that_fails_ends_the_window_and_is_reported():
    cell = Cell("small", "forward", 1, 4, "threads")
    expert = Expert("small")
    sample = InProcess(Broken(expert, raises), expert, lambda: 0.0).measure(cell, SHORT)
    assert sample.rate == 0
    assert sample.error == "ValueError: no"


def test_an_answer_that_never_comes_ends_in_an_error(monkeypatch):
    release = threading.Event()
    asked, _ = prepared(Cell("small", "forward", 1, 2, "threads"))
    with pytest.raises(TimeoutError, match="never got its answer"):
        clients.with_threads(lambda x: release.wait(), asked, Effort(0.0, 0.0, limit=0.05))
    release.set()


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

    judged = targets.judged([record(targets.MANY, hivemind=100.0, batcher=2.9)])
    assert [one["met"] for one in judged] == [True, False, None, None, None, None]
    words = [row[-1] for row in report.targets_table({"targets": judged}).rows]
    assert words == ["met", "missed", *["not measured"] * 4]


def test_bounds_agree_with_each_other():
    cell = Cell("small", "backward", 3, 4, "threads")
    asked, expected = prepared(cell)
    expert = Expert("small")
    for own, right in zip(asked, expected, strict=True):
        assert all(is_right(call(expert, request), answer) for request, answer in zip(own, right, strict=True))
    for ready_batch in (False, True):
        sample = Direct(expert, ready_batch).measure(cell, SHORT)
        assert sample.wrong == 0
        assert sample.requests % (4 if ready_batch else 1) == 0


def test_a_bound_that_computes_something_else_is_wrong():
    expert = Expert("small")
    with torch.no_grad():
        expert.module[0].weight *= 1.01
    assert Direct(expert, True).measure(Cell("small", "forward", 1, 2, "threads"), SHORT).wrong > 0


def test_a_batcher_never_makes_a_batch_beyond_its_limit():
    sizes, release = [], threading.Event()

    def noted(x):
        release.wait()
        sizes.append(len(x))
        return x

    batcher = Batcher(noted, threading.Lock(), most_rows=4)
    futures = [batcher.submit(torch.full((1, 2), float(i))) for i in range(10)]
    release.set()
    assert [float(future.result()[0, 0]) for future in futures] == list(range(10))
    batcher.close()
    assert max(sizes) <= 4
    assert sum(sizes) == 10


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


def test_a_profile_is_made_of_cells_below_a_target_or_of_those_that_were_chosen(monkeypatch):
    monkeypatch.setattr(profile, "profile", lambda cell: str(cell))
    cells = [targets.MANY, targets.MANY_BACKWARD]
    result = {"targets": [{"cell": str(targets.MANY), "met": False}, {"cell": str(targets.MANY_BACKWARD), "met": True}]}
    profile.add(result, cells, chosen=False)
    assert result["profiles"] == [str(targets.MANY)]
    profile.add(result, cells, chosen=True)
    assert result["profiles"] == [str(cell) for cell in cells]


# --- hivemind's process ---


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


def test_an_environment_without_hivemind_is_named():
    with pytest.raises(hivemind_peer.PeerError, match="hivemind"):
        hivemind_peer.version(Path(sys.executable))


@pytest.mark.parametrize("program", ["print('{\"half\": ', end='')", "import sys; sys.stdin.readline(); sys.exit(3)"])
def test_a_worker_that_ends_is_an_error_and_not_a_hang(monkeypatch, tmp_path, program):
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setattr(hivemind_peer, "WORKER", "worker")
    monkeypatch.setattr(hivemind_peer, "ROOT", tmp_path)
    worker = hivemind_peer.HivemindProcess("small", Path(sys.executable))
    with pytest.raises(hivemind_peer.PeerError, match="ended"):
        worker.check()
    worker.close()


def test_replies_that_come_in_pieces_are_put_together(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text(
        "import sys, time\n"
        "for line in sys.stdin:\n"
        "    for part in ('\"fi', 'ne\"', '\\n'):\n"
        "        print(part, end='', flush=True)\n"
        "        time.sleep(0.01)\n"
    )
    monkeypatch.setattr(hivemind_peer, "WORKER", "worker")
    monkeypatch.setattr(hivemind_peer, "ROOT", tmp_path)
    worker = hivemind_peer.HivemindProcess("small", Path(sys.executable))
    assert worker.check() == worker.check() == "fine"
    worker.close()
