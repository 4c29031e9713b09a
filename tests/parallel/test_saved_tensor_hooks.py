"""Tests that saved-tensor hooks, such as those of ``torch.utils.checkpoint``, work around maps as around loops."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from random_maps import serial
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from pymoe.runtime import map_with_parallel_backward, parallel_workers, run_in_background

CALLS = 5
Mapper = Callable[..., Any]


@pytest.fixture(autouse=True)
def workers() -> Any:
    with parallel_workers(4):
        yield


def late(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` after a random delay."""
    time.sleep(random.random() / 500)
    return x


class Net(nn.Module):
    """Saves several tensors of one shape; concurrent calls save theirs in any order."""

    def __init__(self, inner_checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.inner_checkpoint = inner_checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.step, layer, x, use_reentrant=False) if self.inner_checkpoint else self.step(layer, x)
        return x

    @staticmethod
    def step(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(late(layer(x)))


def summed(mapper: Mapper, function: Callable[..., Any], *xs: torch.Tensor) -> torch.Tensor:
    return torch.stack([y.square().sum() for (y,) in mapper(function, *[(x,) for x in xs])]).sum()


def nested(mapper: Mapper, net: nn.Module, *xs: torch.Tensor) -> torch.Tensor:
    return summed(mapper, lambda x: summed(mapper, net, x, x * 2) * x, *xs)


def twice(mapper: Mapper, net: nn.Module, *xs: torch.Tensor) -> torch.Tensor:
    """Run two maps, with operations around them that save tensors."""
    return (summed(mapper, net, *xs).exp().sin() * summed(mapper, net, *xs[:2])).tanh()


def without(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    return block(*xs)


def once_more(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, *xs, use_reentrant=False)


def late_stop(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return once_more(block, *xs)


def within_another(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    return once_more(lambda *xs: once_more(block, *xs) * 2, *xs) / 2


def selective(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(block, *xs, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


def reentrant(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, *xs, use_reentrant=True)


def on_the_cpu(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(*xs)


def forbidden(block: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return block(*xs)


AROUND = [once_more, late_stop, within_another, selective, reentrant, on_the_cpu, forbidden]


def gradients(around: Any, program: Any, mapper: Mapper, inner: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Net(inner)
    xs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(CALLS)]
    around(partial(program, mapper, net), *xs).backward()
    return [tensor.grad for tensor in (*xs, *net.parameters())]  # type: ignore[misc]


@pytest.mark.thinned(usual=21)
@pytest.mark.parametrize("inner", [False, True], ids=["", "checkpoints in calls"])
@pytest.mark.parametrize("program", [summed, nested, twice])
@pytest.mark.parametrize("around", AROUND)
def test_gradients_are_those_of_the_loop(around: Any, program: Any, inner: bool) -> None:
    if inner and around is forbidden:
        pytest.skip("torch's checkpoint needs hooks")
    expected = gradients(without, program, serial)
    for _ in range(2):
        found = gradients(around, program, map_with_parallel_backward, inner)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_around_a_map_runs_its_block_once_more_in_each_backward_pass() -> None:
    runs = []

    def block(*xs: torch.Tensor) -> torch.Tensor:
        runs.append(threading.get_ident())
        return summed(map_with_parallel_backward, torch.exp, *xs)

    xs = [torch.full((2,), float(i), requires_grad=True) for i in range(CALLS)]
    y = checkpoint(block, *xs, use_reentrant=False)
    for backward_pass in (1, 2):
        y.backward(retain_graph=backward_pass == 1)
        assert runs == [threading.get_ident()] * (1 + backward_pass)
        for i, x in enumerate(xs):
            torch.testing.assert_close(x.grad, torch.full((2,), 2.0 * i).exp() * 2 * backward_pass)


def test_hooks_are_asked_in_the_order_of_the_calls_on_the_callers_thread() -> None:
    packed: list[float] = []
    unpacked: list[float] = []
    threads: set[int] = set()

    def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        packed.append(tensor.flatten()[0].item())
        threads.add(threading.get_ident())
        assert not torch.is_grad_enabled()
        return len(packed) - 1, tensor

    def unpack(kept: tuple[int, torch.Tensor]) -> torch.Tensor:
        unpacked.append(packed[kept[0]])
        threads.add(threading.get_ident())
        return kept[1]

    xs = [torch.full((2,), float(i), requires_grad=True) for i in range(CALLS)]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = map_with_parallel_backward(lambda x: late(late(x).square()).square(), *[(x,) for x in xs])
    torch.stack([y for (y,) in outputs]).sum().backward()
    assert packed == unpacked == [value for i in range(CALLS) for value in (float(i), float(i * i))]
    assert threads == {threading.get_ident()}
    assert [x.grad[0].item() for x in xs] == [4.0 * i**3 for i in range(CALLS)]


def test_only_what_a_backward_pass_needs_is_unpacked_and_what_graphs_drop_is_let_go_of() -> None:
    alive: dict[int, torch.Tensor] = {}
    unpacked: list[int] = []

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.number = len(alive)
            alive[self.number] = tensor

        def __del__(self) -> None:
            alive.pop(self.number)

    def unpack(kept: Kept) -> torch.Tensor:
        unpacked.append(kept.number)
        return alive[kept.number]

    xs = [torch.full((2,), float(i + 1), requires_grad=True) for i in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(Kept, unpack):
        outputs = map_with_parallel_backward(torch.square, *[(x,) for x in xs])
    assert sorted(alive) == [0, 1, 2]
    outputs[1][0].sum().backward()
    assert unpacked == [1]
    assert [x.grad is None for x in xs] == [True, False, True]
    del outputs
    assert not alive


def test_a_tensor_that_is_edited_after_it_was_saved_is_noticed() -> None:
    """With a loop the hook would see the tensor before the edit. Here it cannot, so an error must be raised."""

    def func(x: torch.Tensor, edits: bool) -> torch.Tensor:
        h = x * 2
        y = h.square()  # saves h
        if edits:
            with torch.no_grad():
                h.zero_()
        return y

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        ((edited,), (whole,)) = map_with_parallel_backward(func, (x, True), (x, False))
    whole.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edited.sum().backward()
    assert x.grad.tolist() == [8.0, 8.0]


def test_a_call_that_goes_backward_itself_under_hooks() -> None:
    def func(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((x * x).sum(), x)
        return x * grad

    found = []
    for mapper in (map_with_parallel_backward, serial):
        x = torch.full((2,), 3.0, requires_grad=True)
        once_more(partial(summed, mapper, func), x, x).backward()
        found.append(x.grad.tolist())
    assert found[0] == found[1]


def test_a_background_call_within_a_checkpoint_is_refused() -> None:
    """The order in which its tensors are saved is unknown, so tensors of equal shape could be mixed up."""
    x = torch.ones(2, requires_grad=True)

    def background(x: torch.Tensor) -> torch.Tensor:
        return run_in_background(torch.sin, x).result()

    for block in (background, lambda x: summed(map_with_parallel_backward, background, x, x)):
        with pytest.raises(RuntimeError, match=r"run_in_background: called inside torch\.utils\.checkpoint"):
            checkpoint(block, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        y = run_in_background(torch.sin, x).result()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
