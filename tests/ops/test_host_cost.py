"""Tests of the host's cost of a call in addition to its kernel, in counts, since these are equal on all machines.

A call for a few tokens takes some microseconds, half of them in the native call. Each further Python function takes a
twentieth of a microsecond, and ``Function.apply`` of an ``autograd.Function`` takes ten.
"""

import pytest
import torch
from called import Operators, functions_of

import pymoe.ops as ops

pytestmark = pytest.mark.only_on("cpu")


def calls():
    torch.manual_seed(0)
    x, logits = torch.randn(3, 8), torch.randn(3, 4)
    gate = ops.gate_topk(logits, 2)
    routing = ops.build_routing(gate.experts, 4)
    rows, weight, h = ops.dispatch(x, routing), torch.randn(4, 6, 8), torch.randn(6, 10)
    return {
        "build_routing": lambda: ops.build_routing(gate.experts, 4),
        "combine": lambda: ops.combine(rows, routing, gate.weights),
        "dispatch": lambda: ops.dispatch(x, routing),
        "expert_activation": lambda: ops.expert_activation(h, "swiglu"),
        "gate_topk": lambda: ops.gate_topk(logits, 2),
        "grouped_linear": lambda: ops.grouped_linear(rows, weight, routing.offsets),
        "router_losses": lambda: ops.router_losses(logits, gate.load),
    }


LOOKED_FOR_BAD_INDICES = "_to_check"


def checked(operator):
    return [f"check_{operator}", f"_{operator}_fits", "is_matrix"]


FUNCTIONS = {
    "build_routing": [
        "build_routing",
        "check_build_routing",
        "_build_routing_fits",
        "experts_in_range",
        LOOKED_FOR_BAD_INDICES,
        "raw",
    ],
    "combine": [
        *("combine", *checked("combine"), "is_routing", "is_matrix", "slots_in_range", LOOKED_FOR_BAD_INDICES),
        *("raw", "accumulate_dtype", "call", "forward"),
    ],
    "dispatch": [
        *("dispatch", *checked("dispatch"), "is_routing", "slots_in_range", LOOKED_FOR_BAD_INDICES, "spread_rows"),
        *("call", "forward"),
    ],
    "expert_activation": [
        *(
            "expert_activation",
            *checked("expert_activation"),
            "raw",
            "activation_options",
            "call",
            "forward",
        ),
    ],
    "gate_topk": ["gate_topk", *checked("gate_topk"), "call", "forward"],
    "grouped_linear": [
        *("grouped_linear", "cast_operands", "autocast_enabled", *checked("grouped_linear"), "is_index"),
        *("offsets_in_range", LOOKED_FOR_BAD_INDICES, "call", "forward"),
    ],
    "router_losses": ["router_losses", *checked("router_losses"), "call", "forward"],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_runs_these_functions_of_python(name):
    found = functions_of(calls()[name])
    assert [function for module, function in found if module.startswith("pymoe.")] == FUNCTIONS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_is_one_operator(name):
    call = calls()[name]
    with Operators() as called:
        call()
    assert called.names == [f"pymoe.{name}.default"]


@pytest.mark.parametrize("name", ["combine", "dispatch"])
def test_a_recorded_call_binds_no_signature(name, monkeypatch):
    """``Function.apply`` calls ``inspect.signature`` every time, which takes 20 of its 30 microseconds."""
    monkeypatch.setattr(torch.autograd.Function, "apply", lambda *_: pytest.fail("the slow way"))
    x = torch.randn(3, 8, requires_grad=True)
    gate = ops.gate_topk(torch.randn(3, 4, requires_grad=True), 2)
    routing = ops.build_routing(gate.experts, 4)
    rows = ops.dispatch(x, routing)
    assert ops.combine(rows, routing, gate.weights).grad_fn is not None
