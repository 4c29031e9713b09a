"""A capture leaves no trace in the model, whether it succeeds or fails."""

import copy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

sys.path.insert(0, str(Path(__file__).parent))

from same_as_model import as_model, assert_captured, assert_same, run

from pymoe.nn import MoE
from pymoe.pipe.capture import CaptureError, capture

pytestmark = pytest.mark.usefixtures("doubles")


class Model(nn.Module):
    """A model with tied parameters, both kinds of buffers, a parametrization, hooks, a layer with counts, and
    containers.
    """

    def __init__(self, does="nothing more"):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.again = self.first
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.moe = MoE(4, 8, 3, 2, aux_loss_coef=0.1, bias_update_rate=0.1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.notes = {"list": [1, 2], "set": {3}}
        self.does = does
        self.seen = []
        self.first.register_forward_hook(lambda module, args, output: output * 1.5)
        self.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x):
        if self.does == "notes":
            self.notes["list"].append(4)
            self.notes["set"].add(5)
            self.notes["new"] = x
            self.fresh = x
        self.count += 1
        self.mean = self.mean * 0.5 + x.mean(0).detach()
        x = self.norm(self.again(self.second(self.first(x))))
        x = self.moe(self.normed(x))
        if self.does == "fails" and x.sum() > 0:
            return x
        return x * self.count + self.mean


def everything(model):
    """Return the ids and contents of all attributes of all modules."""
    found = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            found[path, key] = value, copy.copy(value) if isinstance(value, (list, dict, set)) else None
    found["notes"] = copy.deepcopy(model.notes), None
    return found


def assert_untouched(before, after):
    assert list(before) == list(after)
    for key, (value, contents) in before.items():
        now, now_contents = after[key]
        assert now is value or key == "notes", key
        if isinstance(contents, dict):
            assert list(contents) == list(now_contents), key
            assert all(now_contents[name] is contents[name] for name in contents), key
        elif contents is not None:
            assert now_contents == contents, key


@pytest.mark.parametrize("does", ["nothing more", "notes", "fails"])
def test_objects_contents_and_values_stay(does):
    model = Model(does)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = everything(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    others = [model.mean.clone(), model.moe.last["load"].clone(), *[p.grad.clone() for p in model.parameters()]]
    random = torch.get_rng_state()
    x = torch.full((5, 4), 0.5)
    with nullcontext() if does == "nothing more" else pytest.raises(CaptureError):
        capture(model, (x,))
    assert_untouched(before, everything(model))
    assert model.notes == {"list": [1, 2], "set": {3}}
    assert_same(dict(model.state_dict()), state)
    assert_same([model.mean, model.moe.last["load"], *[p.grad for p in model.parameters()]], others)
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch._C._is_torch_function_mode_enabled()
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    with torch.inference_mode():
        assert torch.ones(1).is_inference()


def test_the_model_equals_its_graph_and_is_captured_twice():
    model = Model()
    captured = assert_captured(model, (torch.randn(5, 4),))
    again = assert_captured(model, (torch.randn(3, 4),))
    assert captured.graph.code == again.graph.code
    assert "again.weight" not in {node.target for node in captured.graph.graph.find_nodes(op="get_attr")}
    assert set(captured.graph.state_dict()) <= set(model.state_dict())
    assert "mean" not in captured.graph.state_dict()


def test_a_model_captured_in_training_and_in_evaluation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    training = assert_captured(model, (torch.randn(5, 4),))
    evaluation = assert_captured(model.eval(), (torch.randn(5, 4),))
    assert (training.training, evaluation.training) == (True, False)


def test_the_graph_sees_what_the_model_gets():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    captured = capture(model, (torch.randn(5, 4),))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other[1].running_mean.fill_(3)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert_same(run(as_model(captured), model, (torch.ones(5, 4),), {}), run(other, other, (torch.ones(5, 4),), {}))
    model.float()
    other.float()
    x = torch.randn(5, 4, dtype=torch.float32)
    assert_same(run(as_model(captured), model, (x,), {}), run(other, other, (x,), {}))
    assert list(captured.graph.parameters()) == list(model.parameters())


def test_examples_keep_no_memory_and_need_no_values():
    import weakref

    x = torch.full((5, 4), float("nan"), requires_grad=True)
    captured = capture(nn.Linear(4, 4), (x * 2,))
    seen = weakref.ref(x)
    del x
    assert seen() is None
    args, kwargs = captured.arguments.example()
    assert (args[0].shape, kwargs) == ((5, 4), {})
