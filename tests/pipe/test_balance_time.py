"""Balance by time: times layers with a fake clock that they advance themselves."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pymoe.pipe import Pipe, balance
from pymoe.pipe.balance import balance_by_time, profile_times
from pymoe.pipe.skip import pop, skippable, stash


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr(balance, "time", types.SimpleNamespace(perf_counter=lambda: Clock.now))


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        Clock.now += forward
        ctx.seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Clock.now += ctx.seconds
        return gradient, None, None


class Layer(nn.Module):
    """Takes a given time, by the fake clock."""

    def __init__(self, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(x * self.weight, *self.seconds)


def model(*seconds: Any) -> nn.Sequential:
    return nn.Sequential(*[Layer(*pair) for pair in seconds])


SAMPLE = torch.ones(2, 3)


def test_forward_and_backward_of_each_layer_are_timed():
    times = profile_times(model((1, 2), (4, 0.5)), SAMPLE, timeout=30)
    assert [(layer.name, layer.forward, layer.backward, layer.total) for layer in times] == [
        ("0", 1, 2, 3),
        ("1", 4, 0.5, 4.5),
    ]
    assert [layer.passes for layer in times] == [4, 4]


def test_stages_are_balanced_by_the_sum_of_both():
    assert balance_by_time(2, model((1, 9), (5, 5), (1, 1), (1, 1)), SAMPLE) == [1, 3]
    assert balance_by_time(2, model((1, 1), (1, 1), (1, 1), (3, 3)), SAMPLE) == [3, 1]
    assert balance_by_time(4, model((1, 1), (1, 1), (1, 1), (3, 3)), SAMPLE) == [1, 1, 1, 1]


def test_a_pipe_takes_the_balance():
    layers = model((1, 9), (5, 5), (1, 1), (1, 1))
    assert [len(stage) for stage in Pipe(layers, balance=balance_by_time(3, layers, SAMPLE))] == [1, 1, 2]


class Uneven(Layer):
    """Takes longer the first time, as if for set-up, and the third time."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).passes += 1
        return Spend.apply(x, {1: 100, 3: 50}.get(self.passes, 1), 0)


def test_the_first_pass_and_outliers_do_not_count(monkeypatch):
    monkeypatch.setattr(Uneven, "passes", 0)
    (layer,) = profile_times(nn.Sequential(Uneven(0)), SAMPLE, timeout=53)
    assert (layer.forward, layer.backward, layer.passes) == (1, 0, 4)
    assert layer.forward_spread == pytest.approx(12.25)
    assert layer.backward_spread == 0


def test_one_pass_is_timed_however_short_the_time():
    (layer,) = profile_times(model((5, 1)), SAMPLE, timeout=0)
    assert (layer.forward, layer.backward, layer.passes, layer.forward_spread) == (5, 1, 1, 0)


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"twice": [x * 2], "numbers": torch.arange(3), "text": "no tensor", "none": None}


class Unnested(nn.Module):
    def forward(self, value: Any) -> Tensor:
        return value["twice"][0] + value["numbers"]


def test_layers_may_have_no_parameters_and_nested_outputs():
    times = profile_times(nn.Sequential(Layer(1, 2), Nested(), Unnested(), Layer(3, 4)), SAMPLE, timeout=10)
    assert [layer.total for layer in times] == [3, 0, 0, 7]


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", Spend.apply(x * 2, 1, 7))
        return x.detach()


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + Spend.apply(skip, 0, 3)


def test_skips_count_where_they_begin_and_end():
    times = profile_times(nn.Sequential(Layer(1, 1), Down(), Layer(2, 2), Up(), Layer(1, 1)), SAMPLE, timeout=10)
    assert [layer.total for layer in times] == [2, 8, 4, 3, 2]


def test_integers_are_an_input():
    times = profile_times(nn.Sequential(nn.Embedding(5, 3), Layer(1, 2)), torch.tensor([1, 4]), timeout=3)
    assert [layer.total for layer in times] == [0, 3]


def test_layers_that_write_into_their_input_are_timed():
    sample = -torch.ones(2, 3)
    layers = nn.Sequential(nn.ReLU(inplace=True), Layer(1, 1), nn.ReLU(inplace=True), nn.Tanh(), nn.ReLU(inplace=True))
    assert [layer.total for layer in profile_times(layers, sample, timeout=3)] == [0, 2, 0, 0, 0]
    assert sample.eq(-1).all()


def test_no_backward_takes_no_time(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(balance, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    plain, layer = profile_times(nn.Sequential(nn.Tanh(), Layer(0)), SAMPLE, timeout=0)
    assert (plain.forward, plain.backward) == (1, 0)
    assert (layer.forward, layer.backward) == (1, 1)


def test_every_pass_begins_without_gradients():
    class Clean(Layer):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.grad is None
            return super().forward(x)

    assert profile_times(nn.Sequential(Clean(1)), SAMPLE, timeout=3)[0].passes == 3


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3)


def test_nothing_of_the_model_changes():
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), Draws(), nn.Linear(3, 3))
    layers[1].eval()
    layers[4].weight.requires_grad_(False)
    layers[0].weight.grad = torch.full((3, 3), 7.0)
    layers[0].weight.register_hook(lambda gradient: pytest.fail("a parameter's hook was called"))
    sample = torch.randn(4, 3, requires_grad=True)
    flags = [module.training for module in layers.modules()]
    state = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    tensors = [*layers.parameters(), *layers.buffers()]
    versions = [tensor._version for tensor in tensors]
    drawn = torch.get_rng_state(), random.getstate()
    profile_times(layers.train(), sample, timeout=0)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    layers[1].eval()
    assert [module.training for module in layers.modules()] == flags
    for name, tensor in layers.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert all(x is y for x, y in zip(tensors, [*layers.parameters(), *layers.buffers()], strict=True))
    assert [tensor._version for tensor in tensors] == versions
    assert [parameter.grad is None for parameter in layers.parameters()] == [False] + [True] * 5
    assert layers[0].weight.grad.eq(7).all()
    assert sample.grad is None


def test_layers_are_timed_in_their_mode():
    class Mode(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return Spend.apply(x, 5.0 if self.training else 1.0, 0)

    layers = nn.Sequential(Mode(0), Mode(0))
    layers[1].eval()
    assert [layer.forward for layer in profile_times(layers, SAMPLE, timeout=0)] == [5, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_backward_is_timed_whatever_the_mode_outside(mode):
    with mode():
        (layer,) = profile_times(model((1, 2)), torch.ones(2, 3), timeout=0)
    assert layer.total == 3


def test_a_layer_that_is_there_twice_is_timed_twice():
    layer = Layer(1, 1)
    times = profile_times(nn.Sequential(layer, layer, Layer(2, 2)), SAMPLE, timeout=0)
    assert [layer.total for layer in times] == [2, 2, 4]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("lost")


def test_an_error_says_which_layer():
    with pytest.raises(KeyError, match="lost") as caught:
        profile_times(nn.Sequential(Layer(1), Fails()), SAMPLE)
    assert getattr(caught.value, "__notes__", ["in layer '1'"]) == ["in layer '1'"]


def test_what_is_no_argument_is_refused():
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential, got Linear"):
        balance_by_time(2, nn.Linear(3, 3), SAMPLE)
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential, got Linear"):
        profile_times(nn.Linear(3, 3), SAMPLE)
    with pytest.raises(ValueError, match="from 1 to the number of layers, 2, got 3"):
        balance_by_time(3, model((1,), (1,)), SAMPLE)
    with pytest.raises(TypeError, match="integer"):
        balance_by_time("2", model((1,), (1,)), SAMPLE)
    with pytest.raises(ValueError, match="timeout must not be negative"):
        balance_by_time(1, model((1,)), SAMPLE, timeout=-1)
