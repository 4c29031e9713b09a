"""Steps under zero-bubble schedules have the gradients of 1F1B and of the plain model, and do all work once."""

from collections import Counter

import pytest
import torch
from split_graphs import InParts, Scaled, calls
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pymoe.nn import MoE
from pymoe.pipe import Pipe
from pymoe.pipe.execution import plan
from pymoe.pipe.skip import pop, skippable, stash

ROWS, CHUNKS = 13, 4


@pytest.fixture(autouse=True)
def on_threads(monkeypatch):
    """Use threads, however short the actions are."""
    monkeypatch.setattr(plan, "ALWAYS_THREADS", True)


pytestmark = [pytest.mark.usefixtures("doubles"), pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")]


class Scale(nn.Module):
    """A Function without ``backward_in_parts``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


class Parts(nn.Module):
    """A Function with ``backward_in_parts``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return InParts.apply("parts", x, self.weight)


class Residual(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + self.layer(x)


class Repeated(nn.Module):
    """A layer that torch checkpoints itself."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.runs = Counter()

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x):
        self.runs["all"] += 1
        return self.layer(x)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x - skip


def custom_functions():
    return nn.Sequential(nn.Linear(8, 8), Scale(), nn.Tanh(), Parts(), Residual(Scale()), nn.Linear(8, 8))


def mixtures():
    return nn.Sequential(
        Residual(MoE(8, 16, 4, 2)), nn.LayerNorm(8), Residual(MoE(8, 16, 4, 1, bias=True)), nn.Linear(8, 8)
    )


def tied():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    scale = Scale()
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, scale, first, nn.Tanh(), second, scale)


def skips():
    return nn.Sequential(nn.Linear(8, 8), Stash(), nn.Linear(8, 8), nn.Tanh(), Scale(), nn.Linear(8, 8), Pop())


def frozen():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), Scale(), nn.Linear(8, 8))
    for layer in (model[0], model[2], model[5]):
        layer.requires_grad_(False)
    return model


def images():
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 8))


def in_stages(model, stages):
    layers = len(model)
    return [layers // stages + (number < layers % stages) for number in range(stages)]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step(model, schedule, mode="never", stages=3, inputs=None):
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8) if inputs is None else inputs
    target = torch.randn(ROWS, 8)
    model.zero_grad()
    calls.clear()
    pipe = Pipe(model, chunks=CHUNKS, checkpoint=mode, balance=in_stages(model, stages))
    losses = pipe.step(x, target=target, loss_fn=F.mse_loss, schedule=schedule)
    return losses, gradients(model), dict(calls)


def whole(model, inputs=None):
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8) if inputs is None else inputs
    target = torch.randn(ROWS, 8)
    model.zero_grad()
    F.mse_loss(model(x), target).backward()
    return gradients(model)


def assert_same(found, expected, exact):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None, name
        elif exact:
            assert torch.equal(found[name], grad), name
        else:
            assert torch.allclose(found[name], grad, rtol=0, atol=1e-12), name


MODELS = [custom_functions, mixtures, tied, skips, frozen, images]


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_gradients_are_those_of_other_schedules_and_of_the_plain_model(model, mode):
    model = model()
    expected = whole(model)
    for stages in (1, 2, 4):
        losses, of_1f1b, calls_of_1f1b = step(model, "1f1b", mode, stages)
        found_losses, found, found_calls = step(model, "zero-bubble", mode, stages)
        assert torch.equal(losses, found_losses)
        assert_same(found, of_1f1b, exact=model is not tied)
        assert_same(found, expected, exact=False)
        assert found_calls == calls_of_1f1b


def test_python_functions_run_once_a_micro_batch():
    _, _, counted = step(custom_functions(), "zero-bubble")
    assert counted == {"Scaled": 2 * CHUNKS, "InParts.x": CHUNKS, "InParts.w": CHUNKS}


def test_gradients_reach_the_inputs():
    model, inputs = custom_functions(), torch.randn(ROWS, 8, requires_grad=True)
    whole(model, inputs)
    expected, inputs.grad = inputs.grad, None
    step(model, "zero-bubble", inputs=inputs)
    assert torch.allclose(inputs.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_hooks_of_parameters_run_once_a_step_with_the_whole_gradient(mode):
    model, seen, after = tied(), Counter(), Counter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.update([name]) or grad * 2)
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: after.update([name]))
    _, found, _ = step(model, "zero-bubble", mode)
    once = dict.fromkeys(found, 1)
    assert seen == once
    assert after == once
    seen.clear()
    assert_same(found, whole(model), exact=False)


def test_steps_add_up():
    model = mixtures()
    _, first, _ = step(model, "zero-bubble")
    first = {name: grad.clone() for name, grad in first.items()}
    pipe = Pipe(model, chunks=CHUNKS, checkpoint="never", balance=in_stages(model, 2))
    torch.manual_seed(1)
    x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    pipe.step(x, target=target, loss_fn=F.mse_loss, schedule="zero-bubble")
    assert_same(gradients(model), {name: 2 * grad for name, grad in first.items()}, exact=False)


def test_auxiliary_losses_of_a_middle_stage_count_once():
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, 16, 4, 2, aux_loss_coef=0.1, z_loss_coef=0.1), nn.Linear(8, 8))
    _, expected, _ = step(model, "1f1b")
    _, found, _ = step(model, "zero-bubble")
    assert_same(found, expected, exact=True)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_dropout_draws_the_same_under_both_schedules(mode):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), Scale(), nn.Dropout(0.4), nn.Linear(8, 8))
    _, expected, _ = step(model, "1f1b", mode)
    _, found, _ = step(model, "zero-bubble", mode)
    assert_same(found, expected, exact=True)


def test_a_layer_under_torch_checkpointing_repeats_its_forward_once():
    model = nn.Sequential(nn.Linear(8, 8), Repeated(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 8))
    expected = whole(model)
    model[1].runs.clear()
    _, found, _ = step(model, "zero-bubble")
    assert model[1].runs["all"] == 2 * CHUNKS
    assert_same(found, expected, exact=False)


class FailsOnce(torch.autograd.Function):
    """Fails in the backward of the third micro-batch."""

    left = None

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        FailsOnce.left -= 1
        if FailsOnce.left == 0:
            raise KeyError("third")
        return grad


class FailingWeight(nn.Module):
    """A layer whose weight gradient raises: a failure in the second part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return F.linear(x, FailsOnce.apply(self.weight))


class FailingInput(nn.Module):
    def forward(self, x):
        return FailsOnce.apply(x)


@pytest.mark.parametrize("failing", [FailingWeight, FailingInput])
def test_after_a_failure_nothing_is_added_and_the_pipe_goes_on(failing):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), failing(), nn.Linear(8, 8))
    pipe = Pipe(model, chunks=CHUNKS, checkpoint="never", balance=[1, 2, 1])
    x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    FailsOnce.left = 3
    with pytest.raises(KeyError, match="third") as raised:
        pipe.step(x, target=target, loss_fn=F.mse_loss, schedule="zero-bubble")
    assert any("stage 1" in note and "micro-batch 2" in note for note in raised.value.__notes__)
    assert all(grad is None for grad in gradients(model).values())
    FailsOnce.left = 100
    pipe.step(x, target=target, loss_fn=F.mse_loss, schedule="zero-bubble")
    found = gradients(model)
    model.zero_grad()
    F.mse_loss(model(x), target).backward()
    assert_same(found, gradients(model), exact=False)
