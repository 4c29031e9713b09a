"""A layer checks its inputs but not its own intermediate results; values that other code passes in between are still
checked.
"""

import sys

import pytest
import torch
from called import functions_of
from moe_layers import make_input, make_layer
from torch import nn

from pymoe._common.types import Gate
from pymoe.nn import apply_experts

pytestmark = pytest.mark.only_on("cpu")
OF_OPERATORS = ("is_routing", "is_matrix", "slots_in_range", "offsets_in_range")


def choices():
    """Return the arguments of a call of apply_experts."""
    weights = torch.randn(8, 20, 12), torch.randn(8, 12, 10, requires_grad=True)
    return torch.randn(5, 12), torch.randint(8, (5, 2)), torch.rand(5, 2), *weights


class Replaced(nn.Module):
    """A stand-in for a part of a layer that changes the part's output."""

    def __init__(self, part, change):
        super().__init__()
        self.part, self.change = part, change

    def forward(self, *arguments):
        return self.change(self.part(*arguments))


@pytest.mark.parametrize("direct", [True, False])
def test_what_a_layer_made_is_not_checked_again(direct, monkeypatch):
    if not direct:
        monkeypatch.setattr(sys.modules["pymoe.nn.moe"], "forward_directly", lambda *_: None)
    layer, x = make_layer(bias=True, capacity_factor=1.0), make_input(5)
    found = functions_of(lambda: layer(x).sum().backward())
    # The options of the gate are attributes of the router, which anybody may have set since the last call.
    assert [name for _, name in found if name in OF_OPERATORS] == ["is_matrix"]
    found = functions_of(lambda: apply_experts(*choices()))
    assert [name for _, name in found if name in OF_OPERATORS] == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda rows: rows[1:], ValueError, "combine: y must have size 10"),
        (lambda rows: torch.cat([rows, rows]), ValueError, "combine: y must have size 10"),
        (lambda rows: rows.long(), TypeError, "combine: y must have dtype"),
    ],
)
def test_rows_of_other_experts_are_checked(change, error, words):
    layer = make_layer()
    layer.experts = Replaced(layer.experts, change)
    with pytest.raises(error) as raised:
        layer(make_input(5))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda gate: gate._replace(experts=gate.experts + 7), IndexError, "experts must lie in"),
        (lambda gate: gate._replace(experts=gate.experts.float()), TypeError, "experts must have dtype"),
        (
            lambda gate: gate._replace(weights=gate.weights[:, :1]),
            ValueError,
            "weights must have the shape of experts ((5, 2)), got (5, 1)",
        ),
        (
            lambda gate: gate._replace(weights=gate.weights[:4]),
            ValueError,
            "weights must have the shape of experts ((5, 2)), got (4, 2)",
        ),
        (
            lambda gate: Gate(gate.weights[:4], gate.experts[:4], gate.load),
            ValueError,
            "experts must have size 5 (T of x)",
        ),
    ],
)
def test_choices_of_another_router_are_checked(change, error, words):
    layer = make_layer()
    layer.router = Replaced(layer.router, lambda result: (change(result[0]), result[1]))
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), pytest.raises(error) as raised:
            layer(make_input(5))
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("activation", "error", "words"),
    [
        (lambda rows: rows[:-1, :10], IndexError, "offsets must lie in [0, S] (S = 9)"),
        (lambda rows: rows[:, :9], ValueError, "grouped_linear: weight must have size 9 (H of x)"),
        (lambda rows: rows[:, :10].double(), TypeError, "grouped_linear: weight must have dtype float64"),
        (lambda rows: torch.cat([rows, rows])[:, :10], ValueError, "combine: y must have size 10"),
        (lambda rows: rows[0], ValueError, "grouped_linear: x must have shape (S, H)"),
    ],
)
def test_rows_of_a_function_between_the_products_are_checked(activation, error, words):
    with pytest.raises(error) as raised:
        apply_experts(*choices(), activation=activation)
    assert words in str(raised.value)
