"""Balance by size: counts the bytes that layers hold, on every device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pymoe.pipe.balance import balance_by_size, profile_sizes
from pymoe.pipe.skip import pop, skippable, stash


class Saves(nn.Module):
    """Makes autograd keep its input and ``copies`` copies of it."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.copies):
            x = x.exp()
        return x


SAMPLE = torch.ones(8, 4, requires_grad=True)  # 128 bytes


def test_activations_are_what_autograd_keeps():
    sizes = profile_sizes(nn.Sequential(Saves(2), Saves(0), Saves(3)), SAMPLE)
    assert [(layer.name, layer.activations) for layer in sizes] == [("0", 256), ("1", 0), ("2", 384)]


def test_activations_are_those_of_one_micro_batch():
    for chunks, bytes_each in [(1, 128), (2, 64), (3, 48), (8, 16), (99, 16)]:
        (layer,) = profile_sizes(nn.Sequential(Saves(1)), SAMPLE, chunks=chunks)
        assert layer.activations == bytes_each


def test_a_storage_that_two_layers_keep_counts_for_the_first():
    first, second, third = profile_sizes(nn.Sequential(nn.ReLU(), nn.Linear(4, 4, bias=False), nn.ReLU()), SAMPLE)
    assert first.activations == 128  # the ReLU's output, which the Linear also keeps
    assert second.activations == 0
    assert third.activations == 128


def test_a_view_holds_what_it_is_a_view_of():
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.exp() * 2)[:1].square()  # exp keeps its output, square keeps one row of another tensor

    (layer,) = profile_sizes(nn.Sequential(Part()), SAMPLE)
    assert layer.activations == 256


def test_parameters_and_buffers_count_and_are_no_activations():
    layers = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    layers[2].bias.requires_grad_(False)
    sizes = profile_sizes(layers, SAMPLE)
    assert [(layer.parameters, layer.fixed) for layer in sizes] == [(40, 0), (16, 24), (16, 8)]
    assert [layer.total(3) - layer.activations for layer in sizes] == [120, 72, 56]
    assert sizes[0].activations == 128


def test_what_layers_share_counts_for_the_first():
    first, second, tied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = first.weight
    sizes = profile_sizes(nn.Sequential(first, second, tied, first), SAMPLE)
    assert [layer.parameters for layer in sizes] == [80, 80, 16, 0]


def test_without_gradients_nothing_is_kept():
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().exp()

    assert [layer.activations for layer in profile_sizes(nn.Sequential(Plain(), Saves(2)), SAMPLE)] == [0, 0]


def test_stages_are_balanced_by_parameters_and_activations():
    few = torch.ones(1, 4, requires_grad=True)
    many = torch.ones(500, 4, requires_grad=True)
    late = nn.Sequential(Saves(1), Saves(1), Saves(1), Saves(5))
    assert balance_by_size(2, late, many) == [3, 1]
    weighty = nn.Sequential(nn.Linear(4, 4), Saves(1), Saves(1), Saves(1))  # 80 bytes of parameters; 16 each and 16
    assert balance_by_size(2, weighty, few, param_scale=0) == [2, 2]
    assert balance_by_size(2, weighty, few, param_scale=4) == [1, 3]
    assert balance_by_size(2, weighty, many, chunks=500, param_scale=4) == [1, 3]
    assert balance_by_size(2, weighty, many, param_scale=4) == [2, 2]


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.exp())
        return {"value": [x], "flag": None}


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, value: Any) -> Any:
        skip = yield pop("skip")
        return value["value"][0] + skip.sin()


def test_skips_and_nested_values_are_counted():
    down, up = profile_sizes(nn.Sequential(Down(), Up()), SAMPLE)
    assert (down.activations, up.activations) == (128, 0)  # sin keeps its input, which exp keeps as its output


def test_integers_are_an_input():
    tokens = torch.arange(8).view(4, 2)
    embedding, _ = profile_sizes(nn.Sequential(nn.Embedding(8, 3), Saves(1)), tokens, chunks=2)
    assert (embedding.parameters, embedding.activations) == (96, 32)


class Penalty(nn.Module):
    """Runs a backward pass within its forward."""

    def forward(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(x.exp().sum(), x, retain_graph=True)
        assert torch.equal(gradient, x.exp())
        return x + gradient


def test_layers_may_go_backward_themselves():
    assert [layer.activations for layer in profile_sizes(nn.Sequential(Penalty(), Saves(1)), SAMPLE)] == [256, 128]


def test_nothing_stays_alive():
    kept = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.exp()
            kept.append(weakref.ref(x))
            return x

    profile_sizes(nn.Sequential(Watched(), Watched()), SAMPLE)
    assert [reference() for reference in kept] == [None, None]


def test_nothing_of_the_model_changes():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True))
    state = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    drawn = torch.get_rng_state()
    sample = SAMPLE.detach().clone()
    profile_sizes(layers, sample)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(sample, SAMPLE)
    assert all(parameter.grad is None for parameter in layers.parameters())
    for name, tensor in layers.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_what_is_no_argument_is_refused():
    layers = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential, got Linear"):
        balance_by_size(1, nn.Linear(4, 4), SAMPLE)
    with pytest.raises(ValueError, match="from 1 to the number of layers, 1, got 2"):
        balance_by_size(2, layers, SAMPLE)
    for chunks in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="chunks must be a positive integer"):
            balance_by_size(1, layers, SAMPLE, chunks=chunks)
    for scale in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="param_scale must not be negative"):
            balance_by_size(1, layers, SAMPLE, param_scale=scale)
