"""Tests of timing on a GPU, with a simulated device whose events read a clock that only the calls advance."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from pymoe.bench import cold, lines
from pymoe.bench.calls import Sample, Target
from pymoe.bench.cold import InGraph, Rotating, copies_needed, copies_of, in_graph
from pymoe.bench.correctness import Verdict
from pymoe.bench.floor import Floor, Rates
from pymoe.bench.lines import Candidates, Effort, Line, run_line
from pymoe.bench.report import plain, run_table
from pymoe.bench.timing import CudaTimer

CUDA = torch.device("cuda")
LAUNCH, REPLAY = 20e-6, 1e-6


class Device:
    """A simulated GPU; a call takes its given seconds, and an eager call at least the time of a launch."""

    def __init__(self):
        self.clock, self.log, self.capturing = 0.0, [], None
        self.waiting, self.stream, self.failed = "default", "the usual one", 0

    def work(self, name, seconds):
        def call():
            if self.capturing is not None:
                self.capturing.append((name, seconds))
            else:
                self.log.append(name)
                self.clock += max(seconds, LAUNCH)

        return call


@pytest.fixture
def gpu(monkeypatch):
    device = Device()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device.clock

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    class Graph:
        def replay(self):
            device.clock += REPLAY + sum(seconds for _, seconds in self.work)
            device.log += [name for name, _ in self.work]

    class Capture:
        def __init__(self, graph):
            self.graph = graph

        def __enter__(self):
            device.capturing = self.graph.work = []
            device.stream = "the capture's"

        def __exit__(self, kind, *error):  # as torch does: see torch.cuda.graph
            device.capturing = None
            if kind:
                device.failed += 1
                raise RuntimeError("operation failed due to a previous error during capture")
            device.stream = "the usual one"

    @contextmanager
    def use(stream):
        before = device.stream
        try:
            yield
        finally:
            device.stream = before

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Capture,
        "Stream": lambda *_: stream,
        "stream": use,
        "get_sync_debug_mode": lambda: device.waiting,
        "set_sync_debug_mode": lambda mode: setattr(device, "waiting", mode),
        "current_stream": lambda *_: stream,
        "synchronize": lambda *_: None,
        "device": lambda _: nullcontext(),
        "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=60 << 20),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device


@pytest.fixture
def timer(gpu, monkeypatch):
    made = CudaTimer.__new__(CudaTimer)
    made.device, made._scratch = CUDA, SimpleNamespace(zero_=lambda: setattr(gpu, "clock", gpu.clock + 1.0))
    made.now = lambda: gpu.clock
    return made


def test_the_timer_counts_the_calls_and_not_the_work_before_them(gpu, timer):
    assert timer(gpu.work("a", 1e-3), 7) == pytest.approx(1e-3)
    assert gpu.log == ["a"] * 7


def test_calls_in_a_graph_cost_no_launch(gpu, timer):
    tiny = gpu.work("tiny", 3e-6)
    assert timer(tiny, 10) == pytest.approx(LAUNCH)
    graph = InGraph(tiny, 100)
    assert timer(graph, 10) == pytest.approx(3e-6, rel=0.01)


def test_every_copy_has_its_turn_in_a_graph(gpu):
    rotating = Rotating([gpu.work(str(i), 1e-6) for i in range(7)])
    graph = in_graph(rotating)
    assert graph.calls >= cold.CALLS_IN_GRAPH
    assert graph.calls % 7 == 0
    gpu.log.clear()
    graph()
    assert {gpu.log.count(str(i)) for i in range(7)} == {graph.calls // 7}


def test_copies_are_several_times_the_cache(gpu):
    for size in (1 << 17, 1 << 21, 58 << 20):
        assert copies_needed(size, CUDA) * size >= 3 * (60 << 20)
    assert copies_needed(1 << 30, CUDA) == 1
    assert copies_needed(0, CUDA) == cold.MOST_COPIES
    assert copies_needed(1, torch.device("cpu")) == 1


def test_copies_are_other_memory_with_the_same_values(gpu):
    x = torch.randn(1 << 12, 1 << 12).t().requires_grad_()
    copies = copies_of(Sample("", (x, 3)), CUDA)
    assert len(copies) == 3
    assert len({one.args[0].data_ptr() for one in copies}) == 3
    for one in copies:
        assert one.args[0].is_leaf
        assert one.args[0].requires_grad
        assert one.args[0].stride() == x.stride()
        assert one.args[1] == 3
        assert torch.equal(one.args[0], x)


def line_of(gpu, target, *, baseline=None, bytes=3000):
    calls = {"native": gpu.work("native", 3e-6), "reference": gpu.work("reference", 300e-6)}
    if baseline:
        calls["baseline"] = baseline
    floor = Floor("copy_", gpu.work("floor", 2e-6), bytes, bytes)
    candidates = Candidates(calls, floor, lambda: Verdict("exact"))
    targets = {"cpu": Target("reference", 1e9), "cuda": target}
    return Line("tiny", "case", torch.float32, "forward", bytes, 0, "", targets, lambda *_: candidates)


EFFORT = Effort(budget=1e-9, rounds=(3, 3))
RATES = Rates(2e9, {torch.float32: 1.0})


@pytest.mark.parametrize(("most", "reached"), [(4e-6, True), (2e-6, False)])
def test_a_line_shows_eager_time_and_time_in_a_graph(gpu, timer, most, reached):
    line = line_of(gpu, Target("seconds", most), baseline=gpu.work("baseline", 30e-6))
    record = run_line(line, CUDA, RATES, EFFORT, timer)
    assert record["native"]["median"] == pytest.approx(LAUNCH)
    assert record["native_in_graph"]["median"] == pytest.approx(3e-6, rel=0.05)
    assert record["over_baseline"]["median"] == pytest.approx(30e-6 / LAUNCH)
    assert record["over_baseline_in_graph"]["median"] == pytest.approx(10, rel=0.05)
    assert record["share_of_floor"]["median"] == pytest.approx(2 / 3, rel=0.05)
    assert record["share_of_copy"] == pytest.approx(0.5, rel=0.05)
    assert record["target"] == {"over": "seconds", "ratio": most, "reached": reached}
    text = plain(run_table([record]))
    assert "in graph" in text
    assert f"<= {most * 1e6:.0f} us: {'reached' if reached else 'missed'}" in text


def test_what_waits_for_the_device_is_measured_eagerly_alone(gpu, timer):
    """If torch detects the wait, no capture is tried, because a failed capture would break later captures."""

    def waits():
        if gpu.waiting == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        gpu.work("baseline", 50e-6)()

    record = run_line(line_of(gpu, None, baseline=waits), CUDA, RATES, EFFORT, timer)
    assert record["baseline"]["median"] == pytest.approx(50e-6)
    assert record["not_in_graph"] == {"baseline": "RuntimeError: called a synchronizing CUDA operation"}
    assert record["native_in_graph"]
    assert (gpu.failed, gpu.waiting, gpu.stream) == (0, "default", "the usual one")


def test_what_cannot_be_captured_is_measured_eagerly_alone(gpu, timer):
    def waits():
        if gpu.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        gpu.work("baseline", 50e-6)()

    record = run_line(line_of(gpu, None, baseline=waits), CUDA, RATES, EFFORT, timer)
    assert record["correctness"]["verdict"] == "exact"
    assert record["baseline"]["median"] == pytest.approx(50e-6)
    assert record["baseline_in_graph"] is None
    assert record["not_in_graph"] == {"baseline": "RuntimeError: operation not permitted when stream is capturing"}
    assert record["native_in_graph"]
    assert (gpu.failed, gpu.stream) == (1, "the usual one")


def test_a_target_belongs_to_a_device(gpu):
    line = line_of(gpu, Target("seconds", 1e-6))
    assert lines.described(line, line.targets["cuda"])["target"]["over"] == "seconds"
    assert lines.described(line, line.targets["cpu"])["target"]["over"] == "reference"
