"""A traced pipe computes what the model computes: outputs, gradients, training."""

import functools

import pytest
import torch
from pipe_models import CHECKPOINT, SCHEDULES, can_build
from torch import nn
from torch.nn import functional as F
from traced_models import WIDTH, Counting, Many, Mlp, Skips, Tied, call_of, furthest, gradients, made, rows

from pymoe import pipe_split, pipeline

pytestmark = pytest.mark.usefixtures("doubles")
TOLERANCE = 1e-12
STAGES = {Mlp: 3, Skips: 4, Tied: 3}


@functools.cache
def traced(kind):
    """Return a model and its pipe."""
    model, _ = made(kind)
    args, kwargs = call_of(kind, 2)
    return model, pipeline(model, args, kwargs, chunks=3)


def fresh(kind, checkpoint):
    """Return the same with the initial weights, and a separate model."""
    model, pipe = traced(kind)
    _, plain = made(kind)
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    pipe.checkpoint = checkpoint
    return model, pipe, plain


def loss_of(output):
    return F.mse_loss(output, torch.ones_like(output))


@pytest.mark.parametrize("kind", STAGES)
def test_the_output_is_the_models_for_any_number_of_rows(kind):
    _, pipe, plain = fresh(kind, "except_last")
    assert len(pipe) == STAGES[kind]
    for count in (1, 2, 7, 8):
        args, kwargs = call_of(kind, count)
        torch.testing.assert_close(pipe(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=TOLERANCE)


@pytest.mark.thinned(usual=8, deep=20)
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_twenty_steps_are_those_of_the_model(kind, checkpoint, schedule):
    model, pipe, plain = fresh(kind, checkpoint)
    chunks = next(count for count in (3, 4) if can_build(schedule, len(pipe), count))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain))
    for step in range(20):
        count = (7, 6, 8)[step % 3]  # micro-batches of equal and of different sizes
        args, kwargs = call_of(kind, count, seed=step)
        target = torch.ones_like(plain(*args, **kwargs))
        pipe.step(*args, **kwargs, target=target, loss_fn=F.mse_loss, schedule=schedule, chunks=chunks)
        loss_of(plain(*args, **kwargs)).backward()
        assert furthest(gradients(model), gradients(plain)) <= TOLERANCE
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(model.state_dict(), plain.state_dict()) <= TOLERANCE


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_a_loss_outside_of_the_pipe_gives_the_same_gradients(kind, checkpoint):
    model, pipe, plain = fresh(kind, checkpoint)
    args, kwargs = call_of(kind, 7)
    loss_of(pipe(*args, **kwargs)).backward()
    loss_of(plain(*args, **kwargs)).backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def test_inputs_get_gradients_also_those_by_name():
    _, pipe, plain = fresh(Skips, "always")
    found = []
    for model in (pipe, plain):
        args, kwargs = call_of(Skips, 7)
        tensors = [*args, *kwargs.values()]
        for tensor in tensors:
            tensor.requires_grad_()
        loss_of(model(*args, **kwargs)).backward()
        found.append({number: tensor.grad for number, tensor in enumerate(tensors)})
    assert furthest(*found) <= TOLERANCE


def test_arguments_by_name_go_straight_to_the_stages_that_use_them():
    _, pipe, _ = fresh(Skips, "never")
    takes = [stage.takes for stage in pipe.info().stages]
    gate, offset = (-1, 1), (-1, 2)
    assert [gate in inputs for inputs in takes] == [False, True, False, True]
    assert [offset in inputs for inputs in takes] == [False, False, True, False]


def test_values_skip_stages_and_fan_out():
    _, pipe, _ = fresh(Skips, "never")
    first = (0, 0)
    assert [first in stage.takes for stage in pipe.info().stages] == [False, True, True, True]
    assert pipe.info().stages[0].gives == 1


def test_sizes_are_taken_from_tensors_that_a_stage_has():
    _, pipe, _ = fresh(Skips, "never")
    given = [node for part in pipe for node in part._graphs[0].graph.find_nodes(op="placeholder")]
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in given)
    assert "sym_size" in pipe[3].code()


def test_a_number_that_no_tensor_has_crosses():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            columns = x.shape[1] * 2
            x = self.linear(x.sum(1))
            pipe_split()
            return x * columns

    model = Sizes()
    pipe = pipeline(model, (torch.randn(2, 3, WIDTH),), chunks=2)
    for length in (3, 5):
        x = torch.randn(4, length, WIDTH)
        torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=TOLERANCE)
    for checkpoint in CHECKPOINT:
        pipe.checkpoint = checkpoint
        model.zero_grad()
        pipe.step(x, loss_fn=torch.mean)
        ours = gradients(model)
        model.zero_grad()
        model(x).mean().backward()
        assert furthest(ours, gradients(model)) <= TOLERANCE


def test_structures_come_and_go():
    model, _ = made(Many)
    pair = {"left": rows(2), "right": rows(2, 2)}
    pipe = pipeline(model, (pair,), chunks=2)
    pair = {"left": rows(5), "right": rows(5, 2)}
    ours, theirs = pipe(pair), model(pair)
    assert ours["name"] == "many"
    assert isinstance(ours["halves"], tuple)
    torch.testing.assert_close(ours["halves"], theirs["halves"], rtol=0, atol=TOLERANCE)
    losses = pipe.step(pair, target=rows(5, 3), loss_fn=lambda out, y: F.mse_loss(out["halves"][1], y))
    ours = gradients(model)
    model.zero_grad()
    F.mse_loss(model(pair)["halves"][1], rows(5, 3)).backward()
    assert furthest(ours, gradients(model)) <= TOLERANCE
    assert losses.shape == (2,)


def test_calls_that_do_not_fit_are_refused():
    _, pipe, _ = fresh(Skips, "never")
    args, kwargs = call_of(Skips, 4)
    with pytest.raises(TypeError, match="gate"):
        pipe(*args)
    with pytest.raises(ValueError, match="offset: expected a tensor"):
        pipe(*args, gate=kwargs["gate"])
    with pytest.raises(ValueError, match="dimension 1 of x"):
        pipe(torch.randn(4, WIDTH + 3), **kwargs)
    with pytest.raises(ValueError, match="same number of rows"):
        pipe(*args, gate=kwargs["gate"][:3], offset=kwargs["offset"])


def test_counts_and_statistics_are_those_of_one_pass_a_micro_batch():
    for checkpoint in CHECKPOINT:
        torch.manual_seed(3)
        model, plain = Counting(0.0), Counting(0.0)
        plain.load_state_dict(model.state_dict())
        pipe = pipeline(model, (rows(2),), chunks=3, checkpoint=checkpoint)
        pipe.step(rows(9), loss_fn=torch.mean)
        for part in rows(9).split(3):
            (plain(part).mean() / 3).backward()
        assert model.seen == 3
        assert furthest(dict(model.named_buffers()), dict(plain.named_buffers())) <= TOLERANCE
        assert furthest(gradients(model), gradients(plain)) <= TOLERANCE
        torch.testing.assert_close(pipe(rows(9)), torch.cat([plain(part) for part in rows(9).split(3)]))
