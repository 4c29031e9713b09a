"""Concurrent steps of several pipes: correct if none writes to shared state, and otherwise both are refused."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from kinds_of_state import KINDS, Buffer, Norm
from limits import LONG
from pipe_models import assert_same_gradients
from torch import nn

from pymoe.pipe import Pipe
from pymoe.pipe.execution import held_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pipe. a forward:UserWarning"),
]
OPAQUE = {"GeneratorFunction", "Cycles", "ReversedArray"}
"""For these kinds, it cannot be detected whether they are written to."""
WRITING = sorted({*KINDS} - OPAQUE - {"NormalisedByData"})
"""Kinds whose state every forward changes."""


class Meet(nn.Module):
    """Waits once per step for the other pipe's step."""

    def __init__(self, barrier):
        super().__init__()
        self.wait = [barrier.wait]

    def forward(self, x):
        if self.wait:
            self.wait[0](LONG)
            self.wait = []
        return x

    def __deepcopy__(self, memo):
        return nn.Identity()


def pair(layer, checkpoint="never"):
    """Return pipes of two models that share a layer; their steps wait for each other at their beginnings and ends."""
    first, last = threading.Barrier(2), threading.Barrier(2)
    models = [
        nn.Sequential(Meet(first), nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Tanh(), Meet(last)) for _ in range(2)
    ]
    return models, [Pipe(model, 2, checkpoint, balance=[2, 4]) for model in models]


def step(pipe):
    try:
        return pipe.step(torch.ones(6, 4), loss_fn=loss_fn)
    except RuntimeError as error:
        return error


def loss_fn(output):
    return output.square().mean()


@pytest.mark.thinned(usual=40)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", WRITING)
def test_steps_at_the_same_time_that_share_a_layer_to_which_a_forward_writes_are_refused(kind, checkpoint):
    torch.manual_seed(0)
    models, pipes = pair(KINDS[kind]().float(), checkpoint)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(step, pipes)]
    assert all(isinstance(one, RuntimeError) for one in found), found
    assert any("ran at the same time, in two threads, share" in str(one) for one in found)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())
    assert not held_state._running
    assert not held_state._overlaps


@pytest.mark.thinned(usual=30)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(
    "kind", ["Buffer", "BatchNorm", "LargeByData", "ParameterByData", "InClosure", "ClassNumber", "Array"]
)
def test_steps_that_share_a_layer_to_which_nobody_writes_run_at_the_same_time(kind, checkpoint):
    torch.manual_seed(0)
    layer = KINDS[kind]().float()
    layer.on = False
    layer(torch.ones(2, 4))
    models, pipes = pair(layer, checkpoint)
    plain = copy.deepcopy(models)
    plain[1][2] = plain[0][2]
    plain[0][2].on = False
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(step, pipes)]
    for model, losses in zip(plain, found, strict=True):
        loss = loss_fn(model(torch.ones(6, 4)))
        loss.backward()
        torch.testing.assert_close(losses.mean(), loss)
    for mine, of_plain in zip(models, plain, strict=True):
        assert_same_gradients(mine, of_plain, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("kind", WRITING)
def test_a_recomputation_that_puts_back_what_another_step_may_read_is_refused_with_it(kind):
    """States of random generators, and numpy arrays, were restored without a note: a step may have drawn another's
    numbers, and both succeeded.
    """
    torch.manual_seed(0)
    layer = KINDS[kind]().float()
    barriers = [threading.Barrier(2) for _ in range(2)]
    trained = Pipe(nn.Sequential(nn.Linear(4, 4), layer), 2, "always", balance=[1, 1])
    other = Pipe(nn.Sequential(*map(Meet, barriers), layer), 1, balance=[2, 1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):  # some start to write later; some are copied only after a write was seen
            output = trained(torch.ones(6, 4))  # writes to the layer, but runs alone
    expected = pytest.raises(RuntimeError, match="ran at the same time")
    if any("keeps its graphs" in str(one.message) for one in said):  # so nothing is recomputed or restored
        expected = nullcontext()

    def evaluate():
        try:
            return other(torch.ones(6, 4))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(evaluate)
        barriers[0].wait(LONG)
        try:
            with expected:
                output.sum().backward()
        finally:
            barriers[1].wait(LONG)
        is_refused = not isinstance(expected, nullcontext)
        assert is_refused == ("ran at the same time" in str(waiting.result(LONG)))
    assert is_refused == all(parameter.grad is None for parameter in trained.parameters())
    assert isinstance(evaluate(), torch.Tensor)


@pytest.mark.parametrize("kind", ["Generator", "NumpyGenerator", "Buffer", "Array"])
def test_a_state_that_was_put_back_is_noted_before_another_step_may_leave_it_there(kind, monkeypatch):
    """Two recomputations that overlap may leave the state of the first forward behind, as it was when the steps began:
    then nothing shows afterwards that the state was ever different. Here, another recomputation has restored it just
    before.
    """
    layer = KINDS[kind]().float()
    barriers = [threading.Barrier(2) for _ in range(2)]
    trained = Pipe(nn.Sequential(nn.Linear(4, 4), layer), 1, "always", balance=[2])
    other = Pipe(nn.Sequential(*map(Meet, barriers), layer), 1, balance=[3])
    enter = held_state.PutBack.__enter__

    def enter_after_another(self):
        enter(held_state.PutBack(self._held, self._seen))
        enter(self)

    monkeypatch.setattr(held_state.PutBack, "__enter__", enter_after_another)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(step, other)
        barriers[0].wait(LONG)
        try:
            with pytest.raises(RuntimeError, match="ran at the same time"):
                trained.step(torch.ones(6, 4), loss_fn=loss_fn)
        finally:
            barriers[1].wait(LONG)
        assert "ran at the same time" in str(waiting.result(LONG))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_pipe_in_a_stage_of_another_is_a_part_of_its_step(checkpoint):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Norm(nn.BatchNorm1d(4)), Buffer().float()))
    inner = Pipe(copy.deepcopy(made[1]), 1, checkpoint, balance=[1, 2])
    outer = Pipe(nn.Sequential(copy.deepcopy(made[0]), inner), 2, checkpoint, balance=[1, 1])
    for _ in range(2):
        outer.step(torch.ones(6, 4), loss_fn=loss_fn)
        for part in torch.ones(6, 4).chunk(2):
            (loss_fn(made(part)) / 2).backward()
    assert_same_gradients(outer, made, rtol=1.3e-6, atol=1e-5)
    for one, other in zip(outer.buffers(), made.buffers(), strict=True):
        torch.testing.assert_close(one, other)
