"""Tests that systems in the benchmark of captured models do equal work, and that failures and errors are reported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pipeline_distributed
from benchmarks.pipeline import measure, traced_work
from benchmarks.pipeline.systems import SEQUENTIAL, System
from benchmarks.pipeline.torch_peer import Ranks
from benchmarks.pipeline.traced_systems import open_alone, systems
from benchmarks.pipeline.traced_work import MODELS, TracedCase, loss
from benchmarks.pipeline.work import gradients, largest_error, reference
from pymoe.pipe.schedules import build, simulate

TINY = TracedCase("sleep", 2, 3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(traced_work, "SLEEP", 0.0)


@pytest.mark.parametrize("work", MODELS)
def test_the_sequential_run_leaves_the_gradients_of_the_mean_loss(work):
    case = TracedCase(work, 1, 2)
    model, (x, y) = case.model(), case.batch()
    loss(model(x), y).backward()
    assert largest_error(gradients(model), reference(case)) < 1e-5
    assert set(case.beginnings(4)) <= {name for name, _ in model.named_modules()}


def test_times_of_all_actions_add_up_to_the_sequential_run():
    case = TracedCase("sleep", 2, 4)
    for name, stages in (("gpipe", 2), ("interleaved-1f1b", 4)):
        assert sum(simulate(build(name, stages, 4), case.times(stages)).busy) == 4 * 3 * case.layers


def spoiled(case):
    """Return the model alone, with a gradient that is wrong by 0.1 %."""
    running = open_alone(case)
    right = running._step

    def wrong(x, y):
        right(x, y)
        next(running.stages[0].parameters()).grad *= 1.001

    running._step = wrong
    return running


def absent(case):
    """Raise ImportError, as for a missing package."""
    raise ImportError("no such package")


def test_who_fails_or_is_wrong_is_named_and_pymoe_must_not():
    alone, threads, *_ = systems({}, ["Schedule1F1B"])
    everyone = [alone, threads, System("torch spoiled", "", spoiled), System("torch absent", "", absent)]
    record = measure.cell(TINY, everyone, 2)
    found = record["systems"]
    assert found[SEQUENTIAL]["verdict"] == "exact"
    assert found["pymoe 1F1B, threads"]["verdict"] in ("exact", "close")
    assert found["pymoe 1F1B, threads"]["ideal"] == pytest.approx(1.5)
    assert found["torch spoiled"]["verdict"] == "WRONG"
    assert found["torch absent"]["failure"] == "ImportError: no such package"
    result = {"cells": [record]}
    assert not pipeline_distributed.failed(result)
    found["pymoe 1F1B, threads"]["verdict"] = "WRONG"
    assert pipeline_distributed.failed(result)


@pytest.mark.slow
def test_processes_are_measured_and_a_tied_weight_tells_who_adds_up():
    ranks: dict[int, Ranks] = {}
    try:
        everyone = systems(ranks, ["Schedule1F1B"])
        record = measure.cell(TracedCase("tied", 2, 2), [everyone[0], *everyone[2:]], 1)
    finally:
        for one in ranks.values():
            one.close()
    found = record["systems"]
    assert not any(one["failure"] for one in found.values()), found
    assert found["pymoe 1F1B, processes"]["verdict"] in ("exact", "close")
    assert found["torch 1F1B, processes"]["verdict"] == "WRONG", "then the text on tied weights can go"
