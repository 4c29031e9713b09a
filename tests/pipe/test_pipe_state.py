"""A pipe as a module, and the thread state in which its stages run."""

import contextvars
import itertools
import pickle

import pytest
import torch
from pipe_models import WIDTH, batches, row_model
from torch import nn
from torch.nn import functional as F
from unseen import unseen

from pymoe.pipe import Pipe, is_recomputing, micro_batch
from pymoe.pipe.execution import plan


class Ask(nn.Module):
    """Records the answer of ``question()`` while it runs."""

    def __init__(self, question):
        super().__init__()
        self.question = question
        self.found = unseen([])  # not part of the model's state, so recomputations ask, too

    @property
    def answers(self):
        return self.found()

    def forward(self, x):
        self.answers.append(self.question())
        return x


variable = contextvars.ContextVar("variable", default="outside")
STATES = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled, False),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled, True),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.is_autocast_enabled("cpu"), True),
    "device": (lambda: torch.device("meta"), lambda: torch.empty(1).device.type, "meta"),
    "anomaly": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled, True),
}


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_stages_run_in_the_callers_state(name, threads, monkeypatch):
    monkeypatch.setattr(plan, "ALWAYS_THREADS", threads)
    manager, question, answer = STATES[name]
    x = torch.randn(4, WIDTH)
    layers = [Ask(question) for _ in range(3)]
    pipe = Pipe(nn.Sequential(*layers), 2, "never")
    with manager():
        pipe(x)
    assert {answer for layer in layers for answer in layer.answers} == {answer}
    assert all(len(layer.answers) == 2 for layer in layers)


def test_context_variables_reach_the_stages(monkeypatch):
    monkeypatch.setattr(plan, "ALWAYS_THREADS", True)
    layers = [Ask(variable.get) for _ in range(3)]
    pipe = Pipe(nn.Sequential(*layers), 2)
    variable.set("inside")
    pipe(torch.randn(4, 1))
    assert {answer for layer in layers for answer in layer.answers} == {"inside"}


def test_autocast_reaches_forward_and_repetition():
    """Recomputations cast, too, so gradients equal the gradients without checkpointing."""
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = Pipe(model, 3, checkpoint).step(x, target=y, loss_fn=lambda a, b: F.mse_loss(a.float(), b))
        found.append([losses, *[parameter.grad for parameter in model.parameters()]])
    assert all(map(torch.equal, *found))
    assert all(grad is not None and grad.abs().sum() > 0 for grad in found[0])


def test_with_gradients_off_a_step_computes_losses_alone():
    model = row_model()
    x, y = next(batches(1, (7,)))
    pipe = Pipe(model, 3, balance=[4, 4])
    with torch.no_grad():
        losses = pipe.step(x, target=y, loss_fn=F.mse_loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(losses, pipe.step(x, target=y, loss_fn=F.mse_loss))


def test_keys_are_those_of_the_model():
    model = nn.Sequential()
    for name in ("embed", "chunks", "forward", "devices"):  # for any names of layers
        model._modules[name] = nn.Linear(WIDTH, WIDTH)
    pipe = Pipe(model, 2, balance=[2, 2])
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(pipe.parameters(), model.parameters(), strict=True))
    changed = {key: torch.full_like(value, 0.25) for key, value in model.state_dict().items()}
    pipe.load_state_dict(changed)
    assert all((parameter == 0.25).all() for parameter in model.parameters())
    assert pipe.chunks == 2
    pipe(torch.randn(3, WIDTH)).sum().backward()


def test_length_index_and_iteration_are_over_stages():
    model = row_model()
    pipe = Pipe(model, 2, balance=[3, 1, 4])
    assert len(pipe) == 3
    assert [len(stage) for stage in pipe] == [3, 1, 4]
    assert pipe[-1][0] is model[4]
    assert list(itertools.chain(*pipe)) == list(model)
    with pytest.raises(IndexError):
        pipe[3]
    assert "balance=[3, 1, 4]" in repr(pipe)


def test_modes_reach_the_layers():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.9))
    pipe = Pipe(model, 2)
    x = torch.randn(4, WIDTH)
    pipe.eval()
    assert not any(module.training for module in model)
    torch.testing.assert_close(pipe(x), model[0](x))  # not bit for bit: torch's products of other numbers of rows
    pipe.train()
    assert all(module.training for module in model)
    assert not torch.allclose(pipe(x), model[0](x))


def test_a_pipe_is_not_moved():
    pipe = Pipe(row_model(), 2, balance=[4, 4])
    pipe.to("cpu").double().to(torch.float64)
    for move in (lambda: pipe.to("meta"), lambda: pipe.to_empty(device="meta"), pipe.cuda):
        with pytest.raises((RuntimeError, AssertionError)) as failed:
            move()
        assert "stages cannot be moved" in str(failed.value) or move == pipe.cuda
    pipe.float()
    assert all(parameter.dtype == torch.float32 for parameter in pipe.parameters())


def test_devices_take_the_layers_and_what_they_are_given():
    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2)), 2, devices=["cpu", "meta"])
    assert [next(stage.parameters()).device.type for stage in pipe] == ["cpu", "meta"]
    assert pipe(torch.randn(4, WIDTH)).device.type == "meta"
    with pytest.raises(ValueError, match=r"one device per stage \(2\), got 1"):
        Pipe(nn.Sequential(nn.Identity(), nn.Identity()), devices=["cpu"])
    shared = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ValueError, match="weight' is used by stage 0 on cpu, stage 1 on meta"):
        Pipe(nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared)), devices=["cpu", "meta"])


def test_a_pipe_can_be_pickled():
    pipe = Pipe(row_model(), 3, balance=[3, 5])
    x, y = next(batches(1, (7,)))
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    again = pickle.loads(pickle.dumps(pipe))
    torch.testing.assert_close(again(x), pipe(x), rtol=0, atol=0)


def test_modules_can_ask_which_micro_batch_they_see():
    layer = Ask(micro_batch)
    linear = nn.Linear(WIDTH, WIDTH)
    pipe = Pipe(nn.Sequential(linear, layer), 2, "always")
    pipe.step(torch.randn(3, WIDTH), target=torch.randn(3, WIDTH), loss_fn=F.mse_loss, schedule="gpipe")
    first, second, *again = layer.answers
    assert [(a.index, a.count, a.weight, a.stage) for a in (first, second)] == [(0, 2, 2 / 3, 1), (1, 2, 1 / 3, 1)]
    assert all(a.checkpointing and not a.recomputing for a in (first, second))
    assert [(a.index, a.recomputing, a.checkpointing) for a in again] == [(0, True, False), (1, True, False)]
    assert micro_batch() is None
    assert not is_recomputing()


def test_a_micro_batch_is_one_object_within_a_forward_and_another_in_every_mini_batch():
    layers = [Ask(micro_batch) for _ in range(2)]
    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers), 2, "never", balance=[1, 2])
    for _ in range(3):
        pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH), loss_fn=F.mse_loss)
    first, second = (layer.answers for layer in layers)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert len({id(answer) for answer in first}) == 6


@pytest.mark.parametrize(("checkpoint", "forwards"), [("never", 4), ("except_last", 7), ("always", 8)])
def test_there_is_no_hidden_forward(checkpoint, forwards):
    layers = [Ask(lambda: None) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), layers[0]), layers[1])
    pipe = Pipe(model, 4, checkpoint)
    for count in (1, 2):
        pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH), loss_fn=F.mse_loss)
        assert [len(layer.answers) for layer in layers] == [count * forwards] * 2
    pipe.eval()
    pipe(torch.randn(8, WIDTH)).sum().backward()
    assert [len(layer.answers) for layer in layers] == [2 * forwards + 4] * 2


@pytest.mark.parametrize("threads", [False, True])
def test_torch_random_is_as_it_was_after_a_step(monkeypatch, threads):
    """While stages run, its functions refer to their streams; other modules no longer see a changed torch.random."""
    monkeypatch.setattr(plan, "ALWAYS_THREADS", threads)
    before = type(torch.random), vars(torch.random)["default_generator"]
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), 2)
    pipe.step(torch.randn(4, 2), loss_fn=torch.sum, reduction="sum")
    assert (type(torch.random), vars(torch.random)["default_generator"]) == before
    pipe(torch.randn(4, 2)).sum().backward()
    assert (type(torch.random), vars(torch.random)["default_generator"]) == before


def test_a_mode_that_is_switched_between_forward_and_backward_does_not_reach_a_recomputation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    found = []
    for switch in (False, True):
        model.zero_grad()
        pipe = Pipe(model, 3, "always", balance=[2, 1]).train()
        torch.manual_seed(1)
        output = pipe(torch.ones(6, WIDTH))
        if switch:
            pipe.eval()
        output.sum().backward()
        assert pipe.training is not switch
        assert model[1].training is not switch
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
