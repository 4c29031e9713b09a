"""Tests that raw operators, called without Python's checks, touch no memory outside their tensors.

Index tensors that point outside must raise; every other wrong call must raise or return. The address and
undefined-behaviour sanitizers detect accesses outside the tensors, and two planted faults show that they work.
"""

import pytest
import torch

import pymoe

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
TOKENS, CHOICES, EXPERTS, HIDDEN = 40, 3, 5, 17
ROWS = TOKENS * CHOICES
OUTSIDE = [-2, -3, ROWS, ROWS + 1, INT_MIN, INT_MIN + 1, INT_MAX, INT_MAX - 1]
IN_DEBUG_MODE = pytest.mark.only_on("cpu", "pretended")  # on CUDA: see test_cuda_indices.py
PLACES = [0, 1, ROWS // 2, ROWS - 1]


def routing():
    generator = torch.Generator().manual_seed(0)
    return pymoe.ops.build_routing(torch.randint(0, EXPERTS, (TOKENS, CHOICES), generator=generator), EXPERTS)


def with_value(index, place, value):
    index = index.clone()
    index.view(-1)[place] = value
    return index


def raw_calls(slot, offsets):
    x, rows = torch.ones(TOKENS, HIDDEN), torch.ones(ROWS, HIDDEN)
    weights = torch.ones(TOKENS, CHOICES)
    ops = torch.ops.pymoe
    return {
        "dispatch": lambda: ops.dispatch(x, slot, offsets),
        "dispatch_out": lambda: ops.dispatch_out(x, slot, offsets, torch.empty(ROWS, HIDDEN)),
        "combine": lambda: ops.combine(rows, slot, None),
        "combine_weighted": lambda: ops.combine(rows, slot, weights),
        "combine_backward": lambda: ops.combine_backward(x, rows, weights, slot, offsets, True, True),
    }


@IN_DEBUG_MODE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("name", raw_calls(None, None))
def test_slot_outside_raises(name, value, threads):
    slot, _, offsets = routing()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for place in PLACES:
            with pytest.raises(IndexError, match=rf"routing.slot must lie in \[-1, S\) \(S = {ROWS}\), got {value} at"):
                raw_calls(with_value(slot, place, value), offsets)[name]()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("used", OUTSIDE)
def test_offsets_outside_stay_inside_the_output(used):
    """The number of rows in use is clamped to the number of rows."""
    slot, _, offsets = routing()
    out = torch.ops.pymoe.dispatch(torch.ones(TOKENS, HIDDEN), slot, with_value(offsets, -1, used))
    assert out.shape == (ROWS, HIDDEN)
    assert torch.equal(out, torch.ones_like(out) if used > 0 else torch.zeros_like(out))


@IN_DEBUG_MODE
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", [-1, -2, EXPERTS, EXPERTS + 1, INT_MIN, INT_MAX])
def test_expert_outside_raises(value, dtype):
    experts = torch.zeros(TOKENS, CHOICES, dtype=dtype)
    for place in PLACES:
        with pytest.raises(IndexError, match=rf"build_routing: experts must lie in \[0, E\).* got {value} at"):
            torch.ops.pymoe.build_routing(with_value(experts, place, value), EXPERTS, None)


@IN_DEBUG_MODE
@pytest.mark.parametrize("value", [2**32, 2**32 + 1, -(2**32), -(2**63), 2**63 - 1])
def test_wide_expert_that_wraps_to_a_valid_one_raises(value):
    experts = with_value(torch.zeros(TOKENS, CHOICES, dtype=torch.int64), 7, value)
    with pytest.raises(IndexError, match=f"got {value} at"):
        torch.ops.pymoe.build_routing(experts, EXPERTS, None)


@IN_DEBUG_MODE
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 3, 2, 6, 8],
        [0, 2, 4, 6, 9],
        [-1, 2, 4, 6, 8],
        [1, 2, 4, 6, 8],
        [0, 2, INT_MAX, 6, 8],
        [0, INT_MIN, 4, 6, 8],
        [0, 2, 4, 6, INT_MAX],
        [8, 6, 4, 2, 0],
        [0, -2, 4, 6, 8],
        [INT_MIN, 0, 0, 0, 0],
    ],
    ids=str,
)
def test_grouped_linear_refuses_offsets_out_of_order_or_range(offsets):
    x, weight = torch.ones(8, 16, requires_grad=True), torch.ones(4, 5, 16, requires_grad=True)
    with pytest.raises((IndexError, ValueError), match=r"grouped_linear: .*offsets"):
        pymoe.ops.grouped_linear(x, weight, torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("fault", "report"), [("read_past_end", "heap-buffer-overflow"), ("overflow", "runtime error")]
)
def test_sanitizers_report_a_planted_fault(run_sanitized, fault, report):
    result = run_sanitized(fault)
    assert result.returncode != 0
    assert report in result.stderr
    assert "tests/sanitized/probe.cpp" in result.stderr


def calls_made(result, phase):
    """Return the number of calls that ``phase`` reports; the process must have ended well."""
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[:6000]
    line = next(line for line in result.stdout.splitlines() if line.startswith(f"{phase}: "))
    return int(line.split()[1])


@pytest.mark.only_on("cpu")
def test_sanitizers_find_nothing_in_hostile_calls_and_mistakes(run_sanitized):
    result = run_sanitized("hostile", "errors")
    assert calls_made(result, "hostile") >= 500
    assert calls_made(result, "errors") >= 100


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("isa", ["baseline", "v4_bf16"] + ["amx"] * (pymoe.build_info()["cpu_isa"] == "amx"))
def test_sanitizers_find_nothing_in_ordinary_calls(run_sanitized, isa):
    """v4_bf16 selects the widest instruction set without AMX that the machine has."""
    result = run_sanitized("samples", PYMOE_CPU_ISA=isa)
    assert calls_made(result, "samples") >= 150
