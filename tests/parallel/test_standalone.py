"""Tests of a single isolated call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pymoe.runtime import run_isolated_backward, run_isolated_forward


def test_outputs_have_no_history_and_gradients_come_by_argument() -> None:
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0])
    context, outputs = run_isolated_forward(lambda a, n, b: (a * a * b, None, n, a), x, 7, y)
    assert [o.tolist() if isinstance(o, torch.Tensor) else o for o in outputs] == [[12.0], None, 7, [2.0]]
    assert not outputs[0].requires_grad
    assert not outputs[3].requires_grad
    gradients = run_isolated_backward(context, torch.tensor([1.0]), None, None, torch.tensor([5.0]))
    assert (gradients[0].tolist(), gradients[1:]) == ([17.0], (None, None))
    assert x.grad is None


def test_gradients_of_parameters_are_handed_over() -> None:
    module = nn.Linear(2, 2)
    context, (y,) = run_isolated_forward(module, torch.ones(3, 2))
    assert {id(leaf) for leaf in context.leaves} == {id(p) for p in module.parameters()}
    assert run_isolated_backward(context, torch.ones_like(y)) == (None,)
    found = dict(zip(map(id, context.leaves), context.leaf_gradients, strict=True))
    assert found[id(module.bias)].tolist() == [3.0, 3.0]
    assert module.bias.grad is None


def test_a_second_backward_pass_needs_the_graph() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    context, (y,) = run_isolated_forward(torch.exp, x)
    first = run_isolated_backward(context, y, retain_graph=True)
    assert torch.equal(run_isolated_backward(context, y)[0], first[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_isolated_backward(context, y)


def test_containers() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    context, (out,) = run_isolated_forward(lambda t: {"a": t * 2, "b": [t * 3, None]}, x)
    (gradient,) = run_isolated_backward(context, {"a": torch.ones(1), "b": [out["b"][0], None]})
    assert gradient.item() == 20.0


def test_without_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        context, (y,) = run_isolated_forward(torch.sin, x)
    assert run_isolated_backward(context, y) == (None,)
    context, (y,) = run_isolated_forward(torch.sin, torch.ones(2))
    assert run_isolated_backward(context, y) == (None,)


def test_one_tensor_in_two_outputs() -> None:
    def func(tensor: torch.Tensor) -> Any:
        y = tensor * 2
        return y, y

    context, (_, _) = run_isolated_forward(func, torch.ones(1, requires_grad=True))
    assert run_isolated_backward(context, torch.ones(1), torch.ones(1))[0].item() == 4.0


def test_wrong_use() -> None:
    context, _ = run_isolated_forward(torch.sin, torch.ones(1, requires_grad=True))
    with pytest.raises(ValueError, match=r"expected one gradient per output \(1\), got 2"):
        run_isolated_backward(context, None, None)
    with pytest.raises(ValueError, match=r"gradient 0: expected the shape of its output, \(1,\), got \(3, 7\)"):
        run_isolated_backward(context, torch.ones(3, 7))
    with pytest.raises(TypeError, match="callable"):
        run_isolated_forward(None)
