"""Tests that contenders in the benchmark of published models' blocks agree, and that tables show errors and missed
targets.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("transformers")

from benchmarks import model_layers
from benchmarks.layers import cases, contenders, exact, limits, report
from benchmarks.layers.blocks import BLOCKS, TINY, as_moe, built
from benchmarks.layers.contenders import PYMOE, TRANSFORMERS, Plan
from pymoe import nn as pymoe_nn
from pymoe.bench.timing import WallTimer


def effort():
    return cases.Effort(WallTimer(), limits.READERS["sum of int64"], 0.0, (1, 1))


@pytest.mark.thinned(usual=2, deep=6)
@pytest.mark.parametrize("mode", ["decode", "prefill", "train"])
@pytest.mark.parametrize("name", list(TINY))
def test_everyone_computes_the_same_block(name, mode):
    case = cases.run_case(Plan(built(TINY[name], torch.float32), 5, mode == "train"), mode, effort())
    rows = {row["name"]: row for row in case["rows"]}
    assert {row["verdict"] for row in rows.values()} == {"close"}
    assert {*TRANSFORMERS, PYMOE[0]} <= set(rows)
    assert (PYMOE[1] in rows) == (name != "tiny-gptoss")
    assert set(case["limits"]) == {"decode": {"read"}, "prefill": {"read", "mm"}, "train": {"mm"}}[mode]
    assert all(row["error"] < 2e-6 for row in rows.values() if "int" not in row["name"])


def test_16_bit_blocks_are_judged_by_float32():
    case = cases.run_case(Plan(built(TINY["tiny-qwen3"], torch.bfloat16), 20, True), "train", effort())
    assert {row["verdict"] for row in case["rows"]} == {"close"}
    assert all(1e-4 < row["error"] < 1e-2 for row in case["rows"])


@pytest.mark.parametrize("part", ["output", "gradient of x", "gradient of w_in", "gradient of w_out"])
def test_a_wrong_result_is_noticed(part):
    one = built(TINY["tiny-olmoe"], torch.float32)
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    found = exact.sample(one, one.choice, x, grad)
    leaf = x.clone().requires_grad_()
    output = one.under("grouped_mm")(leaf)
    results = dict(
        zip(
            ("output", "gradient of x", "gradient of w_in", "gradient of w_out"),
            (output.detach(), *torch.autograd.grad(output, (leaf, *one.touched), grad)),
            strict=True,
        )
    )

    def error():
        return found.error(
            results["output"], results["gradient of x"], (results["gradient of w_in"], results["gradient of w_out"])
        )

    assert error() < 1e-5
    results[part] *= 1.01
    assert error() == pytest.approx(0.01, rel=0.01)
    results[part] *= float("nan")
    assert error() != error()


def test_a_wrong_contender_is_called_wrong_and_a_failing_one_left_out(monkeypatch):
    right = contenders.contenders

    def fail(x):
        raise RuntimeError("no such instruction\nat all")

    def with_others(plan):
        everyone = list(right(plan))
        honest = next(one for one in everyone if one.name == PYMOE[1])
        liar = dataclasses.replace(honest, name="liar", forward=lambda x: honest.forward(x) * 1.01)
        return [*everyone, liar, dataclasses.replace(honest, name="failing", forward=fail)]

    monkeypatch.setattr(cases, "contenders", with_others)
    case = cases.run_case(Plan(built(TINY["tiny-mixtral"], torch.float32), 2, False), "decode", effort())
    verdicts = {row["name"]: row["verdict"] for row in case["rows"]}
    assert verdicts["liar"] == "WRONG"
    assert verdicts[PYMOE[1]] == "close"
    absent = {one["name"]: one["reason"] for one in case["absent"]}
    assert absent["failing"] == "RuntimeError: no such instruction"
    case |= {"clock": "wall", "block": "tiny-mixtral"}
    assert "liar is WRONG" in report.missed(case, [case])


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gptoss"])
def test_quantised_experts_are_made_once_a_block(name, monkeypatch):
    asked = []

    def quantize(model, bits):
        asked.append(bits)
        model.experts.quantised = bits
        return 1, 2, 1

    monkeypatch.setattr(pymoe_nn, "quantize_experts", quantize)
    one, made = built(TINY[name], torch.float32), {}
    for tokens in (1, 2):
        case = cases.run_case(Plan(one, tokens, False, made=made), "decode", effort())
        assert {"pymoe int8", "pymoe int4"} <= {row["name"] for row in case["rows"]}
    assert asked == [8, 4]
    assert not hasattr(one.experts, "quantised")
    assert [made[f"pymoe int{bits}"].layer.experts.quantised for bits in (8, 4)] == [8, 4]


def test_ktransformers_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one = built(TINY["tiny-qwen3"], torch.bfloat16)
    absent = {found.name: found.reason for found in contenders.contenders(Plan(one, 1, False)) if not_there(found)}
    assert "not installed" in absent["kt-kernel"]
    plan = Plan(one, 1, False, processor_time=True)
    absent = {found.name: found.reason for found in contenders.contenders(plan) if not_there(found)}
    assert "processor time" in absent["kt-kernel"]


def test_a_reason_to_leave_somebody_out_is_said_without_the_type_of_an_error():
    one = built(TINY["tiny-gptoss"], torch.float32)
    absent = {found.name: found.reason for found in contenders.contenders(Plan(one, 1, False)) if not_there(found)}
    assert absent["kt-kernel"] == "computes bf16 blocks with a plain swiglu"
    assert absent["pymoe.nn.MoE"].startswith("no option of pymoe.nn.MoE computes")


def not_there(found):
    return isinstance(found, contenders.Absent)


def test_copies_that_memory_does_not_hold_are_left_out(monkeypatch):
    monkeypatch.setattr(contenders, "free_gib", lambda device: 1e-6)
    monkeypatch.setattr(contenders, "MOST_WRITTEN", 0)
    plan = Plan(built(TINY["tiny-qwen3"], torch.float32), 4, True)
    absent = {found.name: found.reason for found in contenders.contenders(plan) if not_there(found)}
    assert "copies the weights of every slot" in absent["transformers batched_mm"]
    assert "once for each of them" in absent["transformers eager"]


def test_a_block_is_scaled_where_memory_does_not_hold_it():
    mixtral = BLOCKS["mixtral"]
    assert mixtral.fitting(1e12) is mixtral
    small = mixtral.fitting(1e9)
    assert (small.hidden, small.ffn) == (4096, 3584)
    assert str(small) == "Mixtral-8x7B scaled to F/4: H4096 F3584 E8 K2"
    assert BLOCKS["olmoe"].fitting(0.0) is BLOCKS["olmoe"]


def test_the_layer_shares_the_parameters_of_the_block():
    one = built(TINY["tiny-deepseek"], torch.float32)
    layer = as_moe(one)
    assert layer.experts.w_in is one.touched[0]
    assert layer.experts.w_out is one.touched[1]
    assert layer.router.weight is one.module.gate.weight


@pytest.mark.parametrize("name", list(limits.READERS))
def test_a_read_takes_every_touched_weight_once(name):
    one = built(TINY["tiny-deepseek"], torch.bfloat16)
    index = torch.tensor([[3, 1], [1, 7]])
    memory = limits.weights_read(one, index)
    places = [(vector.data_ptr(), vector.nbytes) for vector in memory]
    assert len(set(places)) == len(places) == 2 * 3 + 3  # three experts of two weights, a shared one of three
    assert sum(size for _, size in places) == (3 + 1) * one.block.per_expert * 2
    limits.read(limits.READERS[name], memory)


def test_no_two_experts_have_the_same_weights():
    w_in, _ = built(TINY["tiny-olmoe"], torch.float32).touched
    assert len({tuple(expert.flatten()[:4].tolist()) for expert in w_in.detach()}) == len(w_in)


def test_inputs_of_decoding_touch_more_than_the_cache(monkeypatch):
    one = built(TINY["tiny-qwen3"], torch.float32)
    monkeypatch.setattr(cases, "last_level_cache", lambda: 3 * one.block.per_expert)
    inputs = cases.inputs_of(Plan(one, 1, False))
    assert len(inputs) * one.block.choices * one.block.per_expert / 2 >= 4 * 3 * one.block.per_expert
    assert not torch.equal(inputs[0], inputs[1])


def test_every_timed_step_of_training_follows_one_that_is_not():
    calls = []
    seconds = cases.AfterOne(lambda function, count: [function() for _ in range(count)] and 1.0)(
        lambda: calls.append(1), 2
    )
    assert (seconds, len(calls)) == (1.0, 3)


def test_a_slow_contender_is_timed_once_and_one_apart_by_itself():
    calls = {name: 0 for name in ("slow", "quick", "apart", "read")}

    def step(name):
        def run():
            calls[name] += 1

        return run

    steps = {name: step(name) for name in ("slow", "quick", "apart")}
    first = {"slow": 99.0, "quick": 1e-3, "apart": 1e-3}
    found = cases.timed(steps, first, {"read": step("read")}, {"apart"}, False, effort())
    assert found["slow"].seconds == (99.0,)
    assert calls["slow"] == 0
    assert set(found) == {"slow", "quick", "apart", "read"}


def test_a_slow_step_of_training_is_timed_by_the_second(monkeypatch):
    class Timer:
        """A clock by which each step takes 30 s; as a timer it returns 25 s."""

        steps = 0

        def now(self):
            return 30.0 * self.steps

        def __call__(self, function, calls):
            function()
            return 25.0

    timer = Timer()

    def slow(plan):
        def forward(x):
            timer.steps += 1
            return plan.one.under("grouped_mm")(x)

        return [contenders.Contender(TRANSFORMERS[1], forward, plan.one.module, plan.one.choice, 1e-4)]

    monkeypatch.setattr(cases, "contenders", slow)
    plan = Plan(built(TINY["tiny-olmoe"], torch.float32), 4, True)
    case = cases.run_case(plan, "train", dataclasses.replace(effort(), timer=timer))
    assert case["rows"][0]["seconds"]["median"] == 25.0
    assert timer.steps == 2


def case_of(mode="decode", dtype="float32", rows=0.5, speed_up=1.2, share=0.8, seconds=1.0, **others):
    limit = "read" if mode == "decode" else "mm"

    def row(name, seconds):
        spread = {"low": speed_up, "median": speed_up, "high": speed_up}
        shares = {"low": share, "median": share, "high": share}
        times = {"low": seconds, "median": seconds, "high": seconds, "rounds": 3}
        return {
            "name": name,
            "error": 0.0,
            "verdict": "close",
            "seconds": times,
            "speed_up": spread,
            "of": {limit: shares},
        }

    named = [row(PYMOE[0], seconds), *(row(name, value) for name, value in others.items())]
    return {
        "clock": "cpu",
        "block": "olmoe",
        "title": "OLMoE: H1",
        "dtype": dtype,
        "mode": mode,
        "tokens": 1,
        "rows_per_expert": rows,
        "best": None,
        "rows": named,
        "limits": {},
        "absent": [],
    }


def test_targets():
    assert report.missed(case_of(), []) == []
    assert report.missed(case_of(speed_up=0.9), []) == ["1.0x transformers"]
    assert report.missed(case_of(share=0.7), []) == ["75 % of read"]
    assert report.missed(case_of("prefill", rows=64, share=0.89), []) == ["90 % of mm"]
    assert report.missed(case_of("train", rows=32, share=0.64), []) == ["65 % of mm"]
    assert report.missed(case_of("prefill", rows=4, share=0.1), []) == []
    wide, narrow = case_of(), case_of(dtype="bfloat16", **{"pymoe int8": 0.3, "pymoe int4": 0.3})
    assert report.missed(narrow, [wide, narrow]) == ["int4 3.5x fp32"]
    assert report.missed(narrow | {"rows": narrow["rows"][1:]}, []) == ["pymoe was not measured"]


@pytest.mark.slow
def test_a_run_writes_its_tables_and_keeps_earlier_cases(tmp_path, monkeypatch, capfd):
    def run(*arguments):
        given = ["model_layers", "--blocks", "tiny-qwen3", "--dtypes", "fp32", "--modes", "decode", "--budget", "0.01"]
        monkeypatch.setattr(sys, "argv", [*given, *arguments, "--rounds", "1", "--output", str(tmp_path)])
        assert model_layers.main() == 0
        return json.loads((tmp_path / "model_layers.json").read_text())

    monkeypatch.chdir(Path(__file__).parents[2])
    rendered = tmp_path / "rendered.md"
    monkeypatch.setattr(model_layers, "RENDERED", rendered)
    result = run("--clock", "cpu", "--tokens", "1")
    (case,) = result["cases"]
    assert (case["clock"], case["tokens"], case["threads"]) == ("cpu", 1, 1)
    assert not rendered.exists()

    def started(command, **_):
        """Write a result for another number of tokens, instead of running a process."""
        file = Path(command[command.index("--worker") + 1])
        file.write_text(json.dumps({**result, "run": result["runs"][0], "cases": [case | {"tokens": 2}]}))
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(model_layers.subprocess, "run", started)
    result = run("--clock", "cpu", "--tokens", "2", "--keep", "--render")
    assert [case["tokens"] for case in result["cases"]] == [1, 2]
    assert rendered.read_text() == (tmp_path / "model_layers.md").read_text()
    assert "## Processor time, one thread on one core" in rendered.read_text()


def test_a_process_that_dies_fails_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_layers.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=-9))
    monkeypatch.setattr(sys, "argv", ["model_layers", "--clock", "cpu", "--output", str(tmp_path)])
    assert model_layers.main() == 1
    assert "olmoe by the cpu clock: the process failed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--blocks", "llama"], ["--tokens", "0"], ["--modes", "decode,sleep"]])
def test_unknown_names_are_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["model_layers", *arguments])
    with pytest.raises(SystemExit):
        model_layers.parse()
    assert "expected" in capsys.readouterr().err
