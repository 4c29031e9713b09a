"""A pipe has the same results as the model: outputs, gradients, statistics and, after training, parameters. Pipes of
four stages with default checkpointing train for a hundred steps, others for fewer; with ``--level=exhaustive`` all are
trained for a hundred.
"""

import copy
import itertools

import pytest
import torch
from limits import rounds
from pipe_models import CHECKPOINT, SCHEDULES, batch_model, batches, plain_step, row_model, sgd, step_by_micro_batches
from torch.nn import functional as F

from pymoe.pipe import Pipe

# Emitted, for example, by pipes with one micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")

TOLERANCE = 1e-12
STEPS = rounds(12, 100)
CHUNKS = (1, 2, 3, 4, 8)
STAGES = (1, 2, 4)
ROWS = (7, 12, 3, 8)


def compare(ours, theirs, what):
    for (name, mine), (_, reference) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        error = (mine - reference).abs().max().item()
        assert error <= TOLERANCE, f"{what}: {name} differs by {error}"
    for (name, mine), (_, reference) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        error = (mine - reference).abs().max().item()
        assert error <= TOLERANCE, f"{what}: {name} differs by {error}"


def compare_gradients(ours, theirs, what):
    for (name, mine), (_, reference) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        error = (mine.grad - reference.grad).abs().max().item()
        assert error <= TOLERANCE, f"{what}: the gradient of {name} differs by {error}"


@pytest.mark.thinned(usual=3, deep=12)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", STAGES)
def test_training_equals_that_of_the_model(stages, schedule, checkpoint):
    """The model has skips, tied weights, nested values and in-place edits; mini-batches are uneven and change sizes."""
    models = {chunks: row_model() for chunks in CHUNKS}
    pipes = {chunks: Pipe(models[chunks], chunks, checkpoint, balance=[8 // stages] * stages) for chunks in CHUNKS}
    optimizers = {chunks: sgd(model) for chunks, model in models.items()}
    plain = row_model()
    optimizer = sgd(plain)
    steps = 100 if (stages, checkpoint) == (4, "except_last") else STEPS
    for number, (x, y) in enumerate(batches(steps, ROWS)):
        optimizer.zero_grad()
        loss = plain_step(plain, x, y)
        for chunks, pipe in pipes.items():
            what = f"{chunks} chunks, step {number}"
            optimizers[chunks].zero_grad()
            losses = pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
            rows = torch.tensor([len(part) for part in x.tensor_split(min(chunks, len(x)))])
            assert abs((losses * rows).sum() / len(x) - loss) <= TOLERANCE, what
            compare_gradients(models[chunks], plain, what)
            optimizers[chunks].step()
        optimizer.step()
    for chunks, pipe in pipes.items():
        compare(models[chunks], plain, f"{chunks} chunks")
        torch.testing.assert_close(pipe(x), plain(x), rtol=0, atol=TOLERANCE)


@pytest.mark.thinned(usual=2, deep=8)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_training_with_dropout_and_statistics_equals_micro_batches_by_hand(stages, schedule, checkpoint):
    """Batch norm, spectral norm and dropout see micro-batches, so the model runs part by part on each micro-batch,
    too.
    """
    for chunks in CHUNKS[1:]:
        model, plain = batch_model(), batch_model()
        pipe = Pipe(model, chunks, checkpoint, balance=[8 // stages] * stages)
        parts = Pipe(plain, balance=[8 // stages] * stages)
        optimizers = sgd(model), sgd(plain)
        for number, (x, y) in enumerate(batches(STEPS, (16, 19, 17))):
            what = f"{chunks} chunks, step {number}"
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.manual_seed(number)
            losses = pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
            torch.manual_seed(number)
            torch.testing.assert_close(losses, step_by_micro_batches(parts, x, y, chunks), rtol=0, atol=TOLERANCE)
            compare_gradients(model, plain, what)
            for optimizer in optimizers:
                optimizer.step()
        compare(model, plain, f"{chunks} chunks")


@pytest.mark.parametrize(("stages", "chunks", "checkpoint"), [*itertools.product(STAGES, CHUNKS, CHECKPOINT)])
def test_any_loss_outside_of_the_pipe_gives_the_models_gradients(stages, chunks, checkpoint):
    model, plain = row_model(), row_model()
    pipe = Pipe(model, chunks, checkpoint, balance=[8 // stages] * stages)
    for x, _ in batches(4, ROWS):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        for net, given in ((pipe, ours), (plain, theirs)):
            net.zero_grad()
            output = net(given)
            (output.logsumexp(0) * output.std()).sum().backward()
        compare_gradients(model, plain, f"{len(x)} rows")
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE)


def test_results_are_the_same_bit_for_bit_whatever_the_threads_do():
    def train(seed):
        model = batch_model()
        pipe = Pipe(model, 4, "except_last", balance=[2, 2, 2, 2])
        torch.manual_seed(seed)
        for x, y in batches(3, (13,)):
            pipe.step(x, target=y, loss_fn=F.mse_loss, schedule="1f1b")
        return [parameter.grad for parameter in model.parameters()] + list(model.buffers())

    first = train(5)
    for _ in range(10):
        assert all(map(torch.equal, train(5), first))
    assert not all(map(torch.equal, train(6), first))


def test_a_copy_of_a_pipe_is_a_pipe_of_its_own():
    pipe = Pipe(row_model(), 3, balance=[3, 5])
    (x, y) = next(batches(1, (7,)))
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    other = copy.deepcopy(pipe)
    other.zero_grad()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    other.step(x, target=y, loss_fn=F.mse_loss)
    expected = copy.deepcopy(row_model())
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(0.1)
    plain_step(expected, x, y)
    compare_gradients(other, expected, "copy")
