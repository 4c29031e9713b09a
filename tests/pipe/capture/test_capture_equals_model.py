"""A captured graph computes what its model computes, bit by bit."""

import contextlib
import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from same_as_model import as_model, assert_captured, assert_same, run

from pymoe.pipe.capture import capture


@pytest.fixture(autouse=True)
def fp64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def test_mlp():
    assert_captured(mlp(), (torch.randn(5, 4),), None, ((torch.randn(7, 4),), {}), ((torch.randn(1, 4),), {}))


@pytest.mark.parametrize("training", [True, False])
def test_cnn_with_batch_norm(training):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    model.train(training)
    captured = assert_captured(model, (torch.randn(4, 3, 10, 10),), None, ((torch.randn(6, 3, 10, 10),), {}))
    assert captured.training is training


def test_dropout_draws_as_the_model_does():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))
    assert_captured(model, (torch.randn(6, 4),), None, ((torch.randn(3, 4),), {}))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, x, other, *rest, scale=None, flag=True, **more):
        y = self.a(x) + self.b(other["part"][0])
        for tensor in rest:
            y = y + tensor
        if scale is not None:
            y = y * scale
        return {"y": y, "sums": (y.sum(0), [more["extra"] * 2]), "flag": flag, "none": None, "word": "w"}


def test_several_inputs_kwargs_and_dicts():
    def call(rows):
        args = (torch.randn(rows, 4), {"part": [torch.randn(rows, 3)]}, torch.randn(rows, 5))
        return args, {"extra": torch.randn(rows, 2), "scale": torch.randn(rows, 1), "flag": False}

    assert_captured(Several(), *call(4), call(6), call(3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def test_tied_weights_go_by_one_name():
    captured = assert_captured(Tied(), (torch.randint(11, (3, 5)),), None, ((torch.randint(11, (4, 7)),), {}))
    assert [n.target for n in captured.graph.graph.nodes if n.op == "get_attr"] == ["embed.weight"]


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.linear = nn.Linear(4, 4)
        self.shift = torch.ones(4)

    def forward(self, x):
        self.count.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x) + self.mean.detach() * self.count + self.shift


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Buffers()

    def forward(self, x):
        return self.inner(x) * 2


def test_buffers_change_as_in_the_model():
    model = Outer()
    captured = assert_captured(model, (torch.randn(5, 4),), None, ((torch.randn(3, 4),), {}))
    assert set(captured.graph.state_dict()) == set(model.state_dict())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        y[:, 0] = 0
        y[:, 1:3].mul_(2)
        y += x
        return F.relu_(y), y.t()


def test_edits_in_place():
    assert_captured(InPlace(), (torch.randn(5, 4),), None, ((torch.randn(8, 4),), {}))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            target = self.b(y).relu()
            with torch.enable_grad():
                kept = self.c(y)
        return y * target + kept


def test_blocks_without_gradients():
    captured = assert_captured(Blocks(), (torch.randn(5, 4),))
    assert "b.weight" in {node.target for node in captured.graph.graph.find_nodes(op="get_attr")}


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(y)
            with torch.autocast("cpu", enabled=False):
                y = y.float() @ y.float().t()
        return y


@pytest.mark.parametrize("outside", [True, False])
def test_autocast_blocks(outside):
    torch.set_default_dtype(torch.float32)
    around = torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext()
    with around:
        assert_captured(Autocast(), (torch.randn(5, 4),))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_capture_made_without_gradients_has_them(context):
    model = Blocks()
    eager = copy.deepcopy(model)
    with context():
        captured = capture(model, (torch.randn(5, 4),))
    x = torch.randn(5, 4)
    assert_same(run(as_model(captured), model, (x,), {}), run(eager, eager, (x,), {}))
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 13)

    def forward(self, tokens, mask=None):
        length = tokens.shape[1]
        causal = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        return self.head(self.layer(self.embed(tokens), src_mask=causal, is_causal=True))


def test_transformer_layer_of_any_batch_and_length():
    assert_captured(Attention(), (torch.randint(13, (3, 5)),), None, ((torch.randint(13, (4, 9)),), {}))


class BehindTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x):
        self.sum.data.add_(x.data.sum(0))
        with torch.inference_mode():
            shift = self.linear(x).mean()
        return self.linear(x) + shift + self.linear.weight.data.sum()


def test_data_and_inference_mode_within_a_model():
    assert_captured(BehindTensors(), (torch.randn(5, 4),), None, ((torch.randn(3, 4),), {}))


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift):
        return x + shift

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0) * 2


class HeldElsewhere(nn.Module):
    """Has a parameter that no module has registered, and shared layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})
        self.layers["b"], self.norm = self.layers["a"], self.layers["norm"]
        self.held = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))]

    def forward(self, x):
        x = self.norm(self.layers["b"](self.layers["norm"](self.layers["a"](x))))
        return x * self.held[0] + Shifted.apply(x, self.held[1])


def test_shared_layers_and_parameters_that_nobody_registered():
    model = HeldElsewhere()
    eager = copy.deepcopy(model)
    captured = capture(model, (torch.randn(5, 4),))
    x = torch.randn(5, 4)
    assert_same(run(as_model(captured), model, (x,), {}), run(eager, eager, (x,), {}))
    for held, expected in zip(model.held, eager.held, strict=True):
        assert torch.equal(held.grad, expected.grad)
    assert set(captured.graph.state_dict()) <= set(model.state_dict())


def test_compiled_layers_are_looked_into():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].compile(backend="eager")
    compiled = model[2]._compiled_call_impl
    captured = assert_captured(model, (torch.randn(5, 4),))
    assert model[2]._compiled_call_impl is compiled
    assert sum(node.target is torch.ops.aten.linear.default for node in captured.graph.graph.nodes) == 2


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        wide = self.down(x).relu()
        return self.out(torch.cat([wide, self.up(self.deep(F.max_pool2d(wide, 2)).relu())], 1))


def test_skips_and_images_of_any_size():
    assert_captured(UNet(), (torch.randn(2, 1, 8, 8),), None, ((torch.randn(3, 1, 12, 6),), {}))
