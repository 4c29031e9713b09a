"""Numbers of activations that stages hold at once, and pictures of runs."""

import threading
import time

import pytest
import torch
from pipe_models import SCHEDULES, WIDTH, assert_same_gradients
from torch import nn
from torch.nn import functional as F
from unseen import unseen

from pymoe.pipe import Pipe
from pymoe.pipe.schedules import Schedule, build, simulate, text

# Emitted, for example, by pipes with one micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")


class Counter:
    """Counts living objects by owner, and records the largest counts."""

    def __init__(self, stages):
        self.now, self.peak = [0] * stages, [0] * stages
        self.lock = threading.Lock()


class Held:
    """An object that lives as long as the graph that holds it."""

    def __init__(self, counter, stage):
        self.counter, self.stage = counter, stage
        with counter.lock:
            counter.now[stage] += 1
            counter.peak[stage] = max(counter.peak[stage], counter.now[stage])

    def __del__(self):
        with self.counter.lock:
            self.counter.now[self.stage] -= 1


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Stage(nn.Module):
    """A linear layer whose graphs are counted; ``pause``: seconds that each forward takes."""

    def __init__(self, counter, number, pause):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.counter, self.number, self.pause = unseen(counter), number, pause  # not part of the model's state

    def forward(self, x):
        time.sleep(self.pause)
        return self.linear(Keep.apply(x, Held(self.counter(), self.number)))


@pytest.mark.parametrize("pause", [0.0, 0.001])  # inline, and on several threads
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_hold_as_many_activations_as_the_simulator_says(schedule, micro_batches, pause):
    counter = Counter(4)
    model = nn.Sequential(*[Stage(counter, number, pause) for number in range(4)])
    x = torch.randn(2 * micro_batches, WIDTH, requires_grad=True)
    pipe = Pipe(model, micro_batches, "never")
    predicted = simulate(build(schedule, 4, micro_batches))
    for _ in range(3):
        counter.peak = [0] * 4
        pipe.step(x, target=x.detach(), loss_fn=F.mse_loss, schedule=schedule)
        assert counter.now == [0] * 4
        assert tuple(counter.peak) == pipe.last_run.peak_live_of_stages
        assert tuple(counter.peak) == predicted.peak_live_of_stages
        assert pipe.last_run.peak_live == predicted.peak_live


def test_checkpointed_micro_batches_hold_graphs_in_their_backward_alone():
    counter = Counter(4)
    model = nn.Sequential(*[Stage(counter, number, 0.001) for number in range(4)])
    x = torch.randn(16, WIDTH, requires_grad=True)
    Pipe(model, 8, "always").step(x, target=x.detach(), loss_fn=F.mse_loss, schedule="gpipe")
    assert counter.peak == [1] * 4
    assert counter.now == [0] * 4


def test_the_graph_of_a_checkpointed_forward_goes_with_it():
    """The graph is built for modules that ask for gradients, but nothing keeps it for the backward."""
    counter = Counter(2)
    model = nn.Sequential(*[Stage(counter, number, 0.0) for number in range(2)])
    loss = Pipe(model, 4, "always")(torch.randn(8, WIDTH, requires_grad=True)).sum()
    assert (counter.now, counter.peak) == ([0, 0], [1, 1])
    loss.backward()
    assert (counter.now, counter.peak) == ([0, 0], [1, 1])


def test_activations_of_a_forward_are_gone_when_gradients_are_added():
    counter = Counter(2)
    model = nn.Sequential(*[Stage(counter, number, 0.0) for number in range(2)])
    loss = Pipe(model, 4, "never")(torch.randn(8, WIDTH, requires_grad=True)).sum()
    assert counter.now == [4, 4]
    left = []
    model[0].linear.weight.register_hook(lambda grad: left.append(list(counter.now)))
    loss.backward()
    assert left == [[0, 0]]


def test_a_run_is_drawn_as_a_plan_is():
    model = nn.Sequential(*[Stage(Counter(3), number, 0.002) for number in range(3)])
    pipe = Pipe(model, 4, "never")
    assert pipe.last_run is None
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x, loss_fn=F.mse_loss, schedule="1f1b")
    record = pipe.last_run
    planned = build("1f1b", 3, 4)
    assert [tuple(span.action for span in order) for order in record.spans] == list(planned.orders)
    assert "worker 2" in text(record)
    pipe(x)
    assert {str(span.action)[1] for order in pipe.last_run.spans for span in order} == {"F"}


def test_a_schedule_of_ones_own_is_run():
    """The schedule runs all of a micro-batch before the next."""
    base = build("gpipe", 2, 3)
    orders = tuple(
        tuple(action for number in range(3) for action in order if action.micro_batch == number)
        for order in base.orders
    )
    schedule = Schedule("one by one", 3, base.placement, orders)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    x = torch.randn(6, WIDTH)
    pipe = Pipe(model, 3)
    pipe.step(x, target=x, loss_fn=F.mse_loss, schedule=schedule)
    assert pipe.last_run.peak_live == (1, 1)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    pipe.zero_grad()
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    assert_same_gradients(model, expected, atol=0)
