"""Values that cross the boundaries of stages, and how mini-batches are cut and joined."""

import dataclasses
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pipe_models import SCHEDULES, WIDTH, Say, assert_same_gradients, batches, row_model
from torch import nn
from torch.nn import functional as F

from pymoe.pipe import Pipe, Whole


def grow(x):
    return {"all": [x, x.mean(1, keepdim=True)], "none": None, "word": "word", "count": 3, "whole": x.long()}


def shrink(value):
    assert value["none"] is None
    assert value["word"] == "word"
    assert value["whole"].dtype == torch.long
    x, mean = value["all"]
    return (x - mean * value["count"], value["whole"] > 0)


VALUES = {
    "a tensor": (lambda x: x * 2, lambda x: x + 1),
    "a tuple": (lambda x: (x * 2, x + 1), lambda pair: pair[0] * pair[1]),
    "a nested structure": (grow, lambda value: shrink(value)[0]),
    "no tensor": (lambda x: ("n", x), lambda pair: pair[1]),
    "other shapes": (lambda x: x.repeat_interleave(3, 1), lambda x: x[:, ::3] + x[:, 1::3]),
    "other rows": (lambda x: x.repeat(2, 1), lambda x: x[: len(x) // 2]),
    "no history": (lambda x: x.detach() * 2, lambda x: x + 1),
    "the input itself": (lambda x: x, lambda x: x),
    "a view": (lambda x: x.t(), lambda x: x.t()),
    "the same twice": (lambda x: (x, x), lambda pair: pair[0] * pair[1]),
    "in place": (lambda x: x * 2, lambda x: x.clamp_(min=0.1).mul_(3)),
    "in place on a view": (lambda x: x * 2, lambda x: F.pad(x[:, 1:].mul_(3) + x[:, :-1], (0, 1))),
    "complex": (lambda x: torch.complex(x, -x), lambda x: (x * x).imag),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", VALUES)
def test_it_crosses(name, checkpoint):
    first, second = VALUES[name]

    def build():
        torch.manual_seed(0)
        linears = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
        return nn.Sequential(linears[0], Say(first), Say(second), linears[1])

    for x, y in batches(2, (7,)):
        plain, model = build(), build()
        x.requires_grad_()
        F.mse_loss(plain(x), y[:, :WIDTH]).backward()
        expected, x.grad = x.grad, None
        Pipe(model, 3, checkpoint).step(x, target=y, loss_fn=F.mse_loss, schedule="1f1b")
        if expected is not None:
            torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-12)
        assert_same_gradients(model, plain)
        torch.testing.assert_close(Pipe(model, 3, checkpoint)(x), plain(x), rtol=0, atol=1e-12)


def test_nested_inputs_outputs_and_targets():
    model = nn.Sequential(
        Say(lambda v: {"sum": v["a"] + v["b"][0], "mask": v["mask"], "flag": v["flag"]}),
        nn.Identity(),
        Say(lambda v: (v["sum"] @ v["mask"], {"half": v["sum"] / 2, "flag": v["flag"]})),
    )
    a, b = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4)
    given = {"a": a, "b": [b], "mask": Whole(torch.eye(4)), "flag": True}
    product, rest = Pipe(model, 3)(given)
    torch.testing.assert_close(product, a + b)
    torch.testing.assert_close(rest["half"], (a + b) / 2)
    assert rest["flag"] is True
    targets = (torch.randn(7, 4), {"half": torch.randn(7, 4)})

    def loss_fn(output, target):
        return F.mse_loss(output[0], target[0]) + F.mse_loss(output[1]["half"], target[1]["half"])

    loss_fn((a + b, {"half": (a + b) / 2}), targets).backward()
    expected, a.grad = a.grad, None
    Pipe(model, 3).step(given, target=targets, loss_fn=loss_fn)
    torch.testing.assert_close(a.grad, expected)


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1]), (5, 4, [2, 1, 1, 1]), (0, 3, [0])]
)
def test_micro_batches_differ_by_one_row_at_most(rows, chunks, sizes):
    seen = []
    pipe = Pipe(nn.Sequential(Say(lambda x: (seen.append(len(x)), x)[1]), nn.Identity()), chunks)
    assert pipe(torch.randn(rows, 2)).shape == (rows, 2)
    assert seen == sizes


def test_what_cannot_be_cut_or_put_together_is_refused():
    pipe = Pipe(nn.Sequential(nn.Identity()), 2)
    with pytest.raises(ValueError, match=r"same number of rows .* got 4 and 3; pymoe\.pipe\.Whole"):
        pipe((torch.zeros(4), torch.zeros(3)))
    with pytest.raises(ValueError, match="scalar outputs of micro-batches cannot be combined"):
        Pipe(nn.Sequential(Say(torch.sum)), 2)(torch.zeros(4))
    with pytest.raises(ValueError, match="differ in structure"):
        Pipe(nn.Sequential(Say(lambda x: (x,) * len(x))), 2)(torch.zeros(3))
    with pytest.raises(ValueError, match="differ between micro-batches"):
        Pipe(nn.Sequential(Say(lambda x: (x, len(x)))), 2)(torch.zeros(3))
    assert Pipe(nn.Sequential(Say(torch.sum)), 1)(torch.zeros(4)).shape == ()
    assert pipe(("nothing", "to cut")) == ("nothing", "to cut")


def test_shapes_may_change_from_step_to_step():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool1d(2), nn.Flatten())
    pipe = Pipe(model, 3)
    for rows, width in [(5, 9), (3, 20), (8, 5)]:
        x = torch.randn(rows, 1, width)
        torch.testing.assert_close(pipe(x), model(x))
        pipe.step(x, target=torch.randn(rows, 4), loss_fn=F.mse_loss)


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_left_of_a_step(schedule):
    """Tensors of a step are freed with it, without the garbage collector."""
    kept = []
    model = row_model()
    model.append(Say(lambda x: (kept.append(weakref.ref(x)), x)[1]))
    pipe = Pipe(model, 3, balance=[3, 3, 3])
    x, y = next(batches(1, (7,)))
    gc.collect()
    gc.disable()
    try:
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        assert kept
        assert not any(ref() is not None for ref in kept)
        kept.clear()
        loss = F.mse_loss(pipe(x), y)
        loss.backward()
        del loss
        assert kept
        assert not any(ref() is not None for ref in kept)
        kept.clear()
        pipe(x)  # its result is never differentiated
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()


@dataclasses.dataclass
class Box:
    value: torch.Tensor


class OwnDict(dict):
    pass


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


HIDING = {
    "Box": (Box, lambda box: box.value),
    "Slots": (Slots, lambda box: box.value),
    "SimpleNamespace": (lambda x: SimpleNamespace(value=[x]), lambda box: box.value[0]),
    "OwnDict": (lambda x: OwnDict(value=x), lambda box: box["value"]),
    "function": (lambda x: lambda: x, lambda box: box()),
    "partial": (lambda x: partial(torch.add, x, 0), lambda box: box()),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", HIDING)
def test_an_object_that_hides_tensors_with_gradients_is_refused_by_its_class(kind, checkpoint):
    """The step failed in the backward pass with "a backward pass went past the beginning of a stage's graph"."""
    put, take = HIDING[kind]
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], Say(put), Say(take), layers[2])
    pipe = Pipe(model, 3, checkpoint, balance=[1, 2, 2])
    with pytest.raises(TypeError, match=f"a stage sends a .*{kind} with a tensor inside .*register_pytree_node"):
        pipe.step(torch.randn(6, WIDTH), loss_fn=torch.sum, reduction="sum")
    with torch.no_grad():
        pipe.step(torch.randn(6, WIDTH), loss_fn=torch.sum, reduction="sum")


@dataclasses.dataclass
class Registered:
    value: torch.Tensor


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_object_of_a_registered_class_crosses_with_gradients(checkpoint):
    if Registered not in torch.utils._pytree.SUPPORTED_NODES:
        torch.utils._pytree.register_pytree_node(
            Registered, lambda box: ([box.value], None), lambda values, _: Registered(*values)
        )
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], Say(Registered), Say(lambda box: box.value), layers[2])
    x = torch.randn(6, WIDTH)
    Pipe(model, 3, checkpoint, balance=[1, 2, 2]).step(x, loss_fn=torch.mean)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).mean().backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)
