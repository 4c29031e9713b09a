"""Tests that systems in the benchmark of schedules do equal work, and that failures and errors are reported."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pipeline_schedules
from benchmarks.pipeline import measure, profile, report, torch_orders, work
from benchmarks.pipeline.live import watched
from benchmarks.pipeline.systems import SEQUENTIAL, TORCHGPIPE, System, in_process, open_sequential
from benchmarks.pipeline.torch_peer import on_one_rank
from benchmarks.pipeline.work import Case, Sleeping, gradients, largest_error, reference, sequential
from pymoe.pipe.schedules import build, names, simulate, validate

TINY = Case("tiny", 2, 4)


@pytest.mark.parametrize("name", list(work.WORKS))
def test_the_sequential_run_leaves_the_gradients_of_the_mean_loss(name):
    case = Case(name, 2, 4)
    model, (x, y) = case.model(), case.batch()
    for layer in model:
        layer.seconds = 0.0
    work.LOSS(model(x), y).backward()
    assert largest_error(gradients(model), reference(case)) < 1e-5


def test_a_sleeping_layer_sleeps_where_its_times_say(monkeypatch):
    slept = []
    monkeypatch.setattr(work.time, "sleep", slept.append)
    model, (x, y) = Case("sleep", 2, 4).model(), Case("sleep", 2, 4).batch()
    sequential(Case("sleep", 2, 4), model, x, y)
    assert sum(slept) == pytest.approx(4 * (3 * 8 - 1) * work.SLEEP)  # without the gradient of the model's input
    slept.clear()
    inner = Sleeping(8)
    out = inner(torch.ones(1, 8, requires_grad=True))
    assert len(slept) == 1
    torch.autograd.grad(out.sum(), inner.weight)
    assert len(slept) == 2, "the gradient of the weight alone does not wait for that of the input"


@pytest.mark.parametrize("name", names())
def test_times_of_all_actions_add_up_to_the_sequential_run(name):
    case = Case("sleep", 2, 8)
    stages = 4 if name == "interleaved-1f1b" else 2
    plan = simulate(build(name, stages, 8), case.times(stages))
    assert sum(plan.busy) == 8 * (3 * case.layers - 1)


def test_micro_batches_are_counted_while_their_saved_tensors_live():
    stages = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    with watched(stages) as (first, second):
        outputs = [stages[0](torch.randn(2, 4)) for _ in range(3)]
        stages[1](torch.randn(2, 4)).sum().backward()
        assert (first.now, second.now) == (3, 0)
        for output in outputs:
            output.sum().backward()
    assert (first.now, first.peak, second.now, second.peak) == (0, 3, 0, 1)
    stages[0](torch.randn(2, 4))
    assert first.peak == 3
    assert "forward" not in vars(stages[0][0])


def spoiled(case):
    """Return the sequential run, with a gradient that is wrong by 0.1 %."""
    running = open_sequential(case)
    right = running._step

    def wrong(x, y):
        right(x, y)
        next(running.stages[0].parameters()).grad *= 1.001

    running._step = wrong
    return running


def failing(case):
    """Return a candidate that fails when it is timed."""
    running = open_sequential(case)
    running.step = lambda: 1 / 0
    return running


def absent(case):
    """Raise ImportError, as for a missing package."""
    raise ImportError("no such package")


@pytest.mark.slow
def test_who_fails_or_is_wrong_is_named_and_the_others_are_measured():
    systems = [
        in_process()[0],
        System("spoiled", "", spoiled),
        System("failing", "", failing),
        System("absent", "", absent),
    ]
    record = measure.cell(TINY, systems, 2)
    found = record["systems"]
    assert found[SEQUENTIAL]["verdict"] == "exact"
    assert found[SEQUENTIAL]["speed_up"]["median"] == 1
    assert found["spoiled"]["verdict"] == "WRONG"
    assert found["failing"]["failure"] == "ZeroDivisionError: division by zero"
    assert found["absent"]["failure"] == "ImportError: no such package"
    rows = {row[0]: row[-1] for row in report.cell_table(record).rows}
    assert rows["absent"] == "failed: ImportError: no such package"
    assert rows["spoiled"] == "WRONG"
    cost = measure.bookkeeping(TINY, {one.name: (one, 2) for one in systems}, 2)
    assert cost["systems"][SEQUENTIAL]["cpu"]["median"] == 0
    assert cost["systems"]["failing"]["failure"] == "ZeroDivisionError: division by zero"
    result = {"cells": [record], "bookkeeping": [cost]}
    assert measure.wrong(result) == ["spoiled: tiny, 2 workers, 4 micro-batches"] * 2
    assert pipeline_schedules.failed(result)


def test_torchgpipe_is_right_or_named_as_missing():
    gpipe = next(one for one in in_process() if one.name == TORCHGPIPE)
    found = measure.cell(TINY, [in_process()[0], gpipe], 1)["systems"][TORCHGPIPE]
    if found["failure"]:
        assert "pip install" in found["failure"]
    else:
        assert found["verdict"] in ("exact", "close")
        assert found["live"] == found["planned_live"] == [4, 4]


@pytest.mark.slow
def test_torchs_schedules_on_one_rank_are_right():
    ranks = {}
    chosen = ("torch GPipe", "torch Interleaved1F1B", "torch ZBVZeroBubble")
    systems = {one.name: (one, stages) for one, stages in on_one_rank(ranks, 2) if one.name in chosen}
    try:
        found = measure.bookkeeping(TINY, systems, 1)["systems"]
    finally:
        ranks[1].close()
    assert {name: (one["failure"], one["verdict"]) for name, one in found.items()} == dict.fromkeys(
        chosen, ("", "exact")
    )
    assert [one["stages"] for one in found.values()] == [1, 2, 2]


def test_torchs_orders_become_a_schedule():
    ours = build("interleaved-1f1b", 4, 4)
    letters = {kind: name for name, kind in torch_orders.KINDS.items()}
    orders = [[(action.stage, action.micro_batch, letters[action.kind]) for action in order] for order in ours.orders]
    schedule = torch_orders.schedule("ScheduleInterleaved1F1B", 2, 4, orders)
    validate(schedule)
    assert (schedule.orders, schedule.placement) == (ours.orders, ours.placement)
    assert [torch_orders.rank_of("ScheduleZBVZeroBubble", 2, stage) for stage in range(4)] == [0, 1, 1, 0]
    assert torch_orders.schedule("Schedule1F1B", 2, 4, []) == build("1f1b", 2, 4)


@pytest.mark.parametrize(("share", "met"), [(0.975, True), (0.965, False)])
def test_a_target_is_met_missed_or_not_measured(share, met):
    spread = {"low": 0.9, "median": share, "high": 1.0}
    system = {"share": spread, "live": [2, 1], "planned_live": [2, 1]}
    cell = {"case": {"work": "sleep", "workers": 2, "micro_batches": 8}, "systems": {report.SCHEDULE: system}}
    cost = {"low": 0.0, "median": 61e-6, "high": 1.0}
    cheap = {"case": {"work": "tiny", "workers": 2, "micro_batches": 8}, "systems": {report.SCHEDULE: {"cpu": cost}}}
    result = {"cells": [cell], "bookkeeping": [cheap]}
    assert [one["met"] for one in report.judged(result)] == [met, None, None, None, False, True]
    system["live"] = [2, 2]
    assert report.judged(result)[-1]["met"] is False


def test_a_quick_run_writes_its_files(tmp_path, monkeypatch, capsys):
    arguments = ["--quick", "--works", "tiny", "--systems", "pymoe", "--rounds", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pipeline_schedules", *arguments])
    assert pipeline_schedules.main() == 0
    result = json.loads((tmp_path / "pipeline_schedules.json").read_text())
    assert [record["case"] for record in result["bookkeeping"]] == [vars(replace(TINY, micro_batches=8))]
    assert "tiny, 2 workers, 8 micro-batches" in capsys.readouterr().out
    assert "processor, us" in (tmp_path / "pipeline_schedules.md").read_text()


def test_a_profile_says_what_a_step_consists_of():
    case = replace(TINY, micro_batches=3)
    lines = profile.pieces(case)
    whole, *parts = [float(line.rsplit(" ms", 1)[0].split()[-1]) for line in lines]
    assert whole > 0
    assert len(parts) == 4
    assert "1f1b, tiny, 2 workers, 3 micro-batches" in lines[0]
