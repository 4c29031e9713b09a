"""Tests of bugs that were found and fixed in pipelines. Docstrings describe the bugs."""

import copy
import sys
import time
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from pymoe._runtime import WorkerPool
from pymoe.nn import inject_loss
from pymoe.pipe import INPUT, Pipe, Source, pipeline, split_by_time
from pymoe.pipe.execution.graph import moved

CHECKPOINT = ["never", "except_last", "always"]


def train(model, forward, steps=4):
    """Return the losses of the usual autocast recipe, with backward passes outside the block, and of an evaluation."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(forward(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return torch.stack(losses), model(x)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_the_casts_of_a_repeated_forward_are_those_of_its_own_weights(checkpoint):
    """A recomputation in the backward pass set autocast's flag without entering a block, so the casts of weights that
    autocast caches within a block were not cleared. The next forward and evaluations used these casts: by default,
    training continued with weights that were a step behind.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain, copied = copy.deepcopy(model), copy.deepcopy(model)
    losses, _ = train(copied, Pipe(copied, 4, "never"))
    expected, _ = train(plain, plain)
    found, evaluated = train(model, Pipe(model, 4, checkpoint))
    assert torch.equal(found, losses)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)
    again = copy.deepcopy(model)  # a copy, so no cast of its weights can have been kept
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(again(torch.randn(8, 8)), evaluated)


@pytest.mark.parametrize("threads", [False, True])
def test_no_cast_of_a_weight_outlives_a_backward_pass(threads, monkeypatch):
    """A layer that was set to zero after a backward pass returned 0.7 in the next autocast block."""
    monkeypatch.setattr("pymoe.pipe.execution.plan.ALWAYS_THREADS", threads)
    layer = nn.Linear(8, 8)
    pipe = Pipe(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 8)), 3, "always")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = pipe(torch.randn(6, 8))
    y.float().sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 8)).abs().max() == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_what_a_module_keeps_of_a_checkpointed_forward_has_its_history(checkpoint, schedule):
    """The first run of a checkpointed forward made no graph, and ``parametrize.cached()`` cached the weights that it
    computed. Later forwards got these weights without a history, so their parameters got no gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 4))).double()
    plain, mine = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(8, 4).double()
    plain(x).square().mean().backward()
    with parametrize.cached():
        Pipe(mine, 4, checkpoint).step(x, loss_fn=lambda y: y.square().mean(), schedule=schedule)
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    mine.zero_grad()
    with parametrize.cached():
        Pipe(mine, 4, checkpoint)(x).square().mean().backward()
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Gradient(nn.Module):
    """A module that returns a gradient, as layers of energy-based models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return gradient.tanh()


class Hooked(Gradient):
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("layer", [Gradient, Hooked])
def test_a_stage_may_ask_for_gradients_and_hooks(layer, checkpoint):
    """The first run of a checkpointed forward disabled gradients: "element 0 of tensors does not require grad"."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Tanh(), layer()).double()
    plain, mine = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(8, 4).double()
    plain(x).square().mean().backward()
    Pipe(mine, 4, checkpoint).step(x, loss_fn=lambda y: y.square().mean())
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_ctrl_c_as_a_worker_starts_waits_for_it_and_leaves_torchs_generators(monkeypatch):
    """An interrupt came after a worker's start and before the start was recorded. The step returned while the worker
    was running, and ``torch.random`` kept the replacements of its generators.
    """

    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.3)
            return super().forward(x)

    class Interrupted:
        def __init__(self, threads):
            self.pool = WorkerPool(threads)

        def submit(self, function, *args):
            future = self.pool.submit(function, *args)
            if args:  # a worker: Ctrl-C comes after its start and before its start is noted
                time.sleep(0.1)
                raise KeyboardInterrupt
            return future

    monkeypatch.setattr("pymoe.pipe.execution.plan.ALWAYS_THREADS", True)
    monkeypatch.setattr("pymoe.pipe.execution.plan.WorkerPool", Interrupted)
    edges = [[Source(INPUT, 0)], [Source(INPUT, 1)]]
    pipe = Pipe.from_stages([nn.Linear(4, 4), Slow(4, 4)], takes=edges, outputs=[0, 1], chunks=2)
    with pytest.raises(KeyboardInterrupt):
        pipe(torch.randn(4, 4), torch.randn(4, 4))
    assert type(torch.random) is types.ModuleType


def test_the_host_waits_for_what_a_stage_on_the_cpu_gets_from_a_gpu(monkeypatch):
    """On an H200 a pipe over a CPU, a GPU and a CPU had gradients that were off by 0.2 %, without a word: copies to the
    CPU were not waited for, so that a stage could read what the memory had held before.
    """
    asked = []

    class Elsewhere:
        device = None

        def to(self, device, non_blocking):
            asked.append((device.type, non_blocking))

    for device in ("cpu", "cuda:1"):
        moved(Elsewhere(), torch.device(device))
    assert asked == [("cpu", False), ("cuda", True)]
    callers = set()

    def recorded(tensor, device):
        callers.add(sys._getframe(1).f_code.co_name)
        return moved(tensor, device)

    monkeypatch.setattr("pymoe.pipe.execution.graph.moved", recorded)
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), chunks=2, devices=["cpu", "cpu"])
    pipe.step(torch.ones(4, 3), loss_fn=torch.sum, reduction="sum")
    assert callers == {"receive", "deliver"}  # of activations and of gradients


def test_parameters_of_a_stage_that_is_one_layer_have_the_pipes_names():
    """``info()`` listed them by their names in the layer, ``weight`` and ``bias``, for every stage."""
    pipe = Pipe.from_stages([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
    assert [stage.modules for stage in pipe.info().stages] == [("0.weight", "0.bias"), ("1.0", "1.1")]
    assert {"0.weight", "0.bias"} < {*dict(pipe.named_parameters())}


def test_buffers_are_restored_when_a_measurement_of_time_fails():
    """If a layer raised while nodes were timed, buffers of layers that run as a whole kept what the timing had written
    into them.
    """

    class Fails(nn.Module):
        is_timed = False

        def forward(self, x):
            if self.is_timed:
                raise ValueError("no")
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), Fails())
    before = copy.deepcopy(model.state_dict())

    def policy(graph):
        Fails.is_timed = True
        return split_by_time(2)(graph)

    with pytest.raises(ValueError, match="no"):
        pipeline(model, (torch.randn(6, 4),), split_policy=policy, opaque=[nn.BatchNorm1d, Fails])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class MaskedMean(nn.Module):
    """Returns the mean of the squares of rows whose first number is 1, after a layer with an injected loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, given):
        y = inject_loss(self.layer(x), x.pow(4).sum())
        squares = (x + y.tanh()).square().sum(1) * given[:, 0]
        return squares.sum() / given[:, 0].sum()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_a_micro_batch_of_weight_0_adds_nothing_through_a_loss_of_the_models_own(checkpoint, schedule):
    """The backward of the model's own loss ran with a gradient of 0 for a micro-batch whose ``reduction`` was 0. A mean
    over nothing, 0 / 0, then made all gradients NaN. Losses that layers inject must stay.
    """
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    x[:, 0] = torch.tensor([1.0, 1, 0, 0, 1, 0])
    first, last = nn.Linear(4, 4), MaskedMean()
    last(first(x), x).backward()
    expected = [parameter.grad.clone() for parameter in [*first.parameters(), *last.parameters()]]
    pipe = Pipe.from_stages([first, last], [[Source(INPUT, 0)], [0, Source(INPUT, 0)]], chunks=3, checkpoint=checkpoint)
    pipe.zero_grad()
    losses = pipe.step(x, schedule=schedule, reduction=lambda x: x[:, 0].sum())
    assert losses[1] == 0
    assert losses.isfinite().all()
    for parameter, grad in zip(pipe.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
