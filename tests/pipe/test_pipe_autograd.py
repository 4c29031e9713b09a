"""Gradients that a pipe leaves, and its behaviour as a part of autograd."""

import threading

import pytest
import torch
from pipe_models import CHECKPOINT, SCHEDULES, WIDTH, assert_same_gradients, batches, plain_step, row_model
from torch import nn
from torch.nn import functional as F

from pymoe.pipe import Pipe

# Emitted, for example, by pipes with one micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")


def a_batch(rows=7):
    return next(batches(1, (rows,)))


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def expected_gradients(x, y, build=row_model):
    plain = build()
    plain_step(plain, x, y)
    return gradients(plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_hooks_of_a_parameter_are_called_once_a_step_with_the_sum(schedule, checkpoint):
    model = row_model()
    x, y = a_batch()
    expected = expected_gradients(x, y)
    seen, accumulated = {}, []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda grad, number=number: seen.setdefault(number, []).append(grad.clone()))
        parameter.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(id(parameter)))
    pipe = Pipe(model, 3, checkpoint, balance=[2, 2, 2, 2])
    pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    assert sorted(accumulated) == sorted(map(id, model.parameters()))
    for number, reference in enumerate(expected):
        (grad,) = seen[number]
        torch.testing.assert_close(grad, reference, rtol=0, atol=1e-12)


def test_hooks_of_a_parameter_are_called_once_for_a_loss_outside():
    model = row_model()
    x, y = a_batch()
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(id(parameter)))
    F.mse_loss(Pipe(model, 3, balance=[2, 2, 2, 2])(x), y).backward()
    assert sorted(calls) == sorted(map(id, model.parameters()))


def test_gradients_accumulate_over_steps():
    model = row_model()
    pipe = Pipe(model, 3, balance=[4, 4])
    sums = None
    for x, y in batches(3, (5, 8)):
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        new = expected_gradients(x, y)
        sums = new if sums is None else [a + b for a, b in zip(sums, new, strict=True)]
    assert_same_gradients(model, sums)


def test_a_sum_as_loss_is_not_weighted():
    x, y = a_batch()
    plain, model = row_model(), row_model()
    F.mse_loss(plain(x), y, reduction="sum").backward()
    pipe = Pipe(model, 3, balance=[4, 4])
    pipe.step(x, target=y, loss_fn=lambda a, b: F.mse_loss(a, b, reduction="sum"), reduction="sum")
    assert_same_gradients(model, gradients(plain))


def test_inputs_and_targets_get_their_gradients():
    x, y = a_batch()
    sources = [t.clone().requires_grad_() for t in (x, y)]
    model, plain = row_model(), row_model()
    given = [source * 2 for source in sources]  # tensors with a history
    F.mse_loss(plain(given[0]), given[1]).backward()
    expected = [source.grad.clone() for source in sources]
    for source in sources:
        source.grad = None
    given = [source * 2 for source in sources]
    Pipe(model, 3, balance=[4, 4]).step(given[0], target=given[1], loss_fn=F.mse_loss)
    for source, reference in zip(sources, expected, strict=True):
        torch.testing.assert_close(source.grad, reference, rtol=0, atol=1e-12)


def test_parameters_of_the_loss_are_trained():
    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, output, target):
            return (self.scale * output - target).square().mean()

    x, y = a_batch()
    plain, model, losses = row_model(), row_model(), (Margin(), Margin())
    losses[0](plain(x), y).backward()
    Pipe(model, 3, balance=[4, 4]).step(x, target=y, loss_fn=losses[1])
    assert_same_gradients(model, gradients(plain))
    torch.testing.assert_close(losses[1].scale.grad, losses[0].scale.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_stages_in_front_cost_no_backward_and_get_no_gradient(schedule, checkpoint):
    x, y = a_batch()

    def build():
        model = row_model()
        for layer in model[:3]:
            layer.requires_grad_(False)
        return model

    model = build()
    Pipe(model, 3, checkpoint, balance=[2, 2, 2, 2]).step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    assert_same_gradients(model, expected_gradients(x, y, build))


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_tensors_of_closures_get_gradients_too(checkpoint):
    secret = torch.full((WIDTH,), 0.5, dtype=torch.float64, requires_grad=True)
    derived = secret * 2  # an existing graph in which all micro-batches end

    class Closure(nn.Module):
        def forward(self, x):
            return x * secret + derived

    def build():
        return nn.Sequential(Closure(), nn.Linear(WIDTH, WIDTH).double(), Closure())

    x, y = a_batch()
    torch.manual_seed(0)
    model = build()
    F.mse_loss(model(x), y).backward(retain_graph=True)
    expected, secret.grad = secret.grad.clone(), None
    for use in ("step", "outside"):
        pipe = Pipe(model, 3, checkpoint)
        if use == "step":
            pipe.step(x, target=y, loss_fn=F.mse_loss)
        else:
            F.mse_loss(pipe(x), y).backward(retain_graph=True)
        torch.testing.assert_close(secret.grad, expected, rtol=0, atol=1e-12)
        secret.grad = None


def test_several_backward_passes_where_the_graph_is_kept():
    x, y = a_batch()
    for checkpoint in CHECKPOINT:
        model = row_model()
        loss = F.mse_loss(Pipe(model, 3, checkpoint, balance=[4, 4])(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_gradients(model, [2 * grad for grad in expected_gradients(x, y)])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_backward_pass_cannot_be_differentiated():
    x, _ = a_batch()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(Pipe(row_model(), 2, balance=[4, 4])(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_a_tensor_changed_between_the_passes_is_noticed():
    x, _ = a_batch()
    weight = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    class Times(nn.Module):
        def forward(self, x):
            return x * weight

    output = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Times()), 2, "never")(x)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_an_edit_of_what_the_stage_before_has_saved_is_noticed(checkpoint):
    """Sigmoid saves its result, which the next stage changes: the model without a pipe fails, too."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.LeakyReLU(inplace=True)).double()
    x, y = a_batch()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.mse_loss(model(x), y).backward()
    pipe = Pipe(model, 2, checkpoint)
    if checkpoint != "always":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe.step(x, target=y, loss_fn=F.mse_loss)
    else:  # a recomputation saves it again
        pipe.step(x, target=y, loss_fn=F.mse_loss)


class Fork(nn.Module):
    def forward(self, x):
        y = x * 1.0
        return y, y.view(-1)


class Edit(nn.Module):
    def forward(self, pair):
        pair[0].add_(1)
        return pair[0] * pair[1].view_as(pair[0])


def test_an_edit_of_one_of_two_inputs_that_share_memory_is_refused():
    x, y = a_batch()
    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Fork(), Edit()), 2, "never")
    with pytest.raises(RuntimeError, match="shares its memory"):
        pipe.step(x, target=y, loss_fn=F.mse_loss)


def test_two_threads_may_use_one_pipe():
    model = row_model()
    pipe = Pipe(model, 3, balance=[2, 2, 2, 2])
    x, y = a_batch()
    expected = expected_gradients(x, y)
    results, errors = [], []

    def work():
        try:
            for _ in range(10):
                output = pipe(x)
                results.append(torch.autograd.grad(F.mse_loss(output, y), list(model.parameters())))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors
    assert len(results) == 30
    for found in results:
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


def test_a_pipe_may_be_a_layer_of_a_pipe_and_not_of_itself():
    x, y = a_batch()
    model = row_model()
    inner = Pipe(model, 2, balance=[4, 4])
    outer = Pipe(nn.Sequential(inner, nn.Identity()), 3)
    outer.step(x, target=y, loss_fn=F.mse_loss)
    assert_same_gradients(model, expected_gradients(x, y))

    class Again(nn.Module):
        def forward(self, x):
            return pipe(x)

    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Again()), 2)
    with pytest.raises(RuntimeError, match="cannot run the pipe itself"):
        pipe(x)


def test_hooks_of_layers_are_called_for_every_micro_batch():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).double()

    model = build()
    x, y = a_batch()
    calls = []
    for layer in model:
        layer.register_full_backward_hook(lambda *args: calls.append("backward"))
        layer.register_forward_hook(lambda *args: calls.append("forward"))
    for schedule in SCHEDULES:
        model.zero_grad()
        calls.clear()
        x.requires_grad_()
        Pipe(model, 3, "never", balance=[2, 2]).step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        assert calls.count("forward") == calls.count("backward") == 3 * len(model)
        assert_same_gradients(model, expected_gradients(x, y, build))


def test_transforms_of_torch_func_go_through():
    x, _ = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    pipe = Pipe(model, 3)
    torch.testing.assert_close(torch.func.vmap(pipe)(torch.stack([x, x])), model(torch.stack([x, x])))
    grad = torch.func.grad(lambda given: pipe(given).sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda given: model(given).sum())(x))
    doubled = {name: 2 * parameter for name, parameter in pipe.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(pipe, doubled, (x,)), torch.func.functional_call(model, doubled, (x,))
    )


def test_a_compiled_pipe_leaves_itself_to_python():
    x, y = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    F.mse_loss(model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
    F.mse_loss(torch.compile(Pipe(model, 3), backend="aot_eager")(x), y).backward()
    assert_same_gradients(model, expected)


def test_a_checkpoint_around_a_pipe_is_refused():
    x, _ = a_batch()
    pipe = Pipe(row_model(), 2, balance=[4, 4])
    output = torch.utils.checkpoint.checkpoint(pipe, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"use Pipe\(\.\.\., checkpoint=\.\.\.\) instead"):
        output.sum().backward()
    pipe(x).sum().backward()
