"""Ownership of a traced pipe's parameters and buffers, its modes, and copies of it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced_models import WIDTH, Counting, Mlp, Skips, Tied, call_of, furthest, gradients, ids, made, rows

import pymoe
from pymoe import MultiUseParameterConfig, PipeSequential, pipe_split, pipeline
from pymoe.pipe import Whole

pytestmark = pytest.mark.usefixtures("doubles")
TOLERANCE = 1e-12


def step(pipe, kind=Mlp, count=6, schedule="1f1b"):
    args, kwargs = call_of(kind, count)
    return pipe.step(*args, **kwargs, loss_fn=lambda out: out.square().mean(), schedule=schedule)


@pytest.mark.parametrize("kind", [Mlp, Skips, Tied, Counting])
def test_keys_of_the_state_are_the_models(kind):
    model, _ = made(kind)
    args, kwargs = call_of(kind, 2)
    pipe = pipeline(model, args, kwargs)
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert dict(pipe.named_buffers()).keys() == dict(model.named_buffers()).keys()
    for name, parameter in model.named_parameters():
        assert dict(pipe.named_parameters())[name] is parameter
    assert {name for part in pipe for name in part.state_dict()} == set(model.state_dict())


def test_stages_that_share_no_state_take_no_turns():
    """Each knows where the model holds its parameters; the walk over what it holds must not go from there to others."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(model, (rows(2),), split_spec={"2": pymoe.SplitPoint.BEGINNING}, chunks=2)
    for _ in range(2):
        pipe.step(rows(4), loss_fn=lambda out: out.square().mean())
        assert [stage.turns for stage in pipe._engine._states.values()] == [None] * len(pipe._engine._states)


def test_buffers_that_are_not_persistent_stay_so():
    for kind, name in [(Tied, "positions"), (Counting, "table")]:
        model, _ = made(kind)
        pipe = pipeline(model, *call_of(kind, 2))
        assert name not in pipe.state_dict()
        assert not any(name in part.state_dict() for part in pipe)
        assert name in dict(pipe.named_buffers())


def test_a_stage_has_what_it_uses_and_no_more():
    pipe = pipeline(made(Skips)[0], *call_of(Skips, 2))
    assert [sorted(part.state_dict()) for part in pipe] == [
        ["layers.0.bias", "layers.0.weight", "scale"],
        ["layers.1.bias", "layers.1.weight"],
        ["layers.2.bias", "layers.2.weight"],
        ["layers.3.bias", "layers.3.weight", "shift"],
    ]
    assert all(parameter is not None for part in pipe for parameter in part.parameters())


def test_what_the_model_gets_the_pipe_sees():
    model, _ = made(Skips)
    pipe = pipeline(model, *call_of(Skips, 2), chunks=2)
    args, kwargs = call_of(Skips, 4)
    other, _ = made(Skips, seed=5)
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(pipe(*args, **kwargs), other(*args, **kwargs), rtol=0, atol=TOLERANCE)
    pipe.load_state_dict({name: value * 2 for name, value in other.state_dict().items()}, assign=True)
    assert not torch.equal(model.scale, other.scale)
    torch.testing.assert_close(pipe(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=TOLERANCE)
    model.scale = nn.Parameter(torch.full((WIDTH,), 3.0))
    torch.testing.assert_close(pipe(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=TOLERANCE)
    step(pipe, Skips)
    assert model.scale.grad is not None


def test_replaced_buffers_are_seen():
    model, _ = made(Counting)
    pipe = pipeline(model, (rows(2),)).eval()
    before = pipe(rows(4))
    model.seen = torch.tensor(7.0)
    torch.testing.assert_close(pipe(rows(4)), before + 7, rtol=0, atol=TOLERANCE)
    model.norm.running_mean = torch.ones(WIDTH)
    torch.testing.assert_close(pipe(rows(4)), model(rows(4)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", [Skips, Tied])
def test_pipes_change_their_precision(kind):
    model, _ = made(kind)
    model.float()
    args, kwargs = call_of(kind, 4)

    def as_float(value):
        return value.float() if value.is_floating_point() else value

    pipe = pipeline(
        model, tuple(map(as_float, args)), {name: as_float(value) for name, value in kwargs.items()}, chunks=2
    )
    pipe.double()
    torch.testing.assert_close(pipe(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=TOLERANCE)
    step(pipe, kind, 4)
    assert all(parameter.grad.dtype == torch.float64 for parameter in model.parameters())


def test_training_and_evaluation_are_those_of_the_modules():
    model, plain = made(Counting)
    pipe = pipeline(model, (rows(2),), chunks=2)
    pipe.eval()
    plain.eval()
    assert not any(part.training for part in pipe)
    torch.testing.assert_close(pipe(rows(6)), plain(rows(6)), rtol=0, atol=TOLERANCE)
    assert model.seen == 0
    assert torch.equal(model.norm.num_batches_tracked, torch.tensor(0))
    pipe.train()
    assert not torch.equal(pipe(rows(6)), pipe(rows(6)))  # dropout
    assert model.seen == 4
    pipe.eval()
    torch.testing.assert_close(pipe(rows(6)), model(rows(6)), rtol=0, atol=TOLERANCE)
    model.train()  # the modes of the model's modules count
    pipe(rows(6))
    assert model.seen == 6
    assert len(pipe.staged._variants) == 2


def test_one_frozen_layer_is_another_mode():
    model, _ = made(Counting)
    pipe = pipeline(model, (rows(2),), chunks=2)
    model.norm.eval()
    pipe(rows(6))
    assert model.norm.num_batches_tracked == 0
    assert model.seen == 2


def test_a_model_captured_for_evaluation_trains_as_well():
    model, plain = made(Mlp)
    model.eval()
    pipe = pipeline(model, (rows(2),), chunks=2)
    pipe.train()
    step(pipe)
    plain(rows(6)).square().mean().backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def test_a_backward_after_a_change_of_mode_repeats_what_was_run():
    model, plain = made(Counting)
    model.drop.p = 0.0
    pipe = pipeline(model, (rows(2),), checkpoint="always")
    output = pipe(rows(6))
    pipe.eval()
    output.square().mean().backward()
    plain.drop.p = 0.0
    plain(rows(6)).square().mean().backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def copies(pipe):
    yield copy.deepcopy(pipe)
    yield pickle.loads(pickle.dumps(pipe))
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", [Skips, Tied, Counting])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_copies_are_pipes_of_their_own(kind):
    model, plain = made(kind)
    if kind is Counting:
        model.drop.p = plain.drop.p = 0.0
    args, kwargs = call_of(kind, 6)
    pipe = pipeline(model, *call_of(kind, 2), chunks=1)
    plain(*args, **kwargs).square().mean().backward()
    for twin in copies(pipe):
        step(twin, kind)
        assert furthest(gradients(twin), gradients(plain)) <= TOLERANCE
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        twin.eval()
        twin(*args, **kwargs)  # another capture
        assert list(twin.state_dict()) == list(model.state_dict())
    if kind is not Counting:
        torch.testing.assert_close(pipe(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=TOLERANCE)


class Scale(torch.autograd.Function):
    """Its backward uses the factor three, its forward the factor two."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Experts(nn.Module):
    """Has opaque layers, one of them in two stages, and an autograd Function."""

    def __init__(self):
        super().__init__()
        self.first = pymoe.nn.MoE(WIDTH, 8, 4, 2, aux_loss_coef=0.1)
        self.second = pymoe.nn.MoE(WIDTH, 8, 4, 2)

    def forward(self, x):
        x = x + Scale.apply(self.first(x))
        pipe_split()
        with torch.no_grad():
            still = self.second(x)
        x = x + self.second(x) + still
        pipe_split()
        return x + self.first(x)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_layers_with_a_state_of_their_own_are_called_as_they_are():
    model, plain = made(Experts)
    pipe = pipeline(model, (rows(3),), chunks=2, checkpoint="never")
    assert pipe[0].first is pipe[2].first is model.first
    assert pipe[1].second is model.second
    for twin in (pipe, *copies(pipe)):
        assert twin[0].first is twin.staged.module.first
        twin.chunks = 1
        twin.zero_grad()
        plain.zero_grad()
        twin.step(rows(6), loss_fn=lambda out: out.square().mean())
        plain(rows(6)).square().mean().backward()
        assert furthest(gradients(twin), gradients(plain)) <= TOLERANCE


class TestTied:
    """A parameter that two stages use."""

    @pytest.mark.thinned(usual=6)
    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
    @pytest.mark.parametrize("checkpoint", ["never", "always"])
    @pytest.mark.parametrize(
        "spec", ["TRANSMIT", "REPLICATE", {"head.weight": "TRANSMIT"}, {"words.weight": "REPLICATE"}]
    )
    def test_its_gradients_are_the_models(self, spec, schedule, checkpoint):
        config = MultiUseParameterConfig
        named = {name: config[use] for name, use in spec.items()} if isinstance(spec, dict) else config[spec]
        sent = "TRANSMIT" in (spec.values() if isinstance(spec, dict) else [spec])
        model, plain = made(Tied)
        pipe = pipeline(model, (ids(2),), chunks=3, checkpoint=checkpoint, multi_use_param_spec=named)
        users = ["words.weight" in dict(part.named_parameters()) for part in pipe]
        assert users == ([True, False, False] if sent else [True, False, True])
        assert pipe.replicated_params == ([] if sent else [{0: "words.weight", 2: "words.weight"}])
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pipe, plain))
        for count in (7, 5, 6) * 7:
            step(pipe, Tied, count, schedule)
            plain(ids(count)).square().mean().backward()
            assert furthest(gradients(model), gradients(plain)) <= TOLERANCE
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert furthest(model.state_dict(), plain.state_dict()) <= TOLERANCE
        assert model.head.weight is model.words.weight

    def test_specifications_that_cannot_be_are_refused(self):
        model, _ = made(Tied)
        for spec, error, words in [
            ("replicate", TypeError, "MultiUseParameterConfig"),
            ({"words.weight": 1}, TypeError, "MultiUseParameterConfig"),
            ({"word.weight": MultiUseParameterConfig.TRANSMIT}, ValueError, "no parameter 'word.weight'"),
        ]:
            with pytest.raises(error, match=words):
                pipeline(model, (ids(2),), multi_use_param_spec=spec)


def test_a_buffer_that_is_read_before_it_is_changed_elsewhere_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            x = self.linear(x) * self.scale
            pipe_split()
            x = torch.tanh(x)
            with torch.no_grad():
                self.scale.mul_(0.9)
            return x

    with pytest.raises(ValueError, match=r"buffer 'scale' is used by stages \[0, 1\] and changed by \[1\]"):
        pipeline(Late(), (rows(2),))


def test_a_value_that_a_later_stage_changes_in_place_goes_on_as_it_is_by_then():
    class Edits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.linear(x) + 1
            pipe_split()
            x[:, :2].mul_(0.5)  # by a view
            y = torch.tanh(x)
            pipe_split()
            return x * 2 + y

    model = Edits()
    plain = copy.deepcopy(model)
    for checkpoint in ("never", "always"):
        pipe = pipeline(model, (rows(2),), chunks=2, checkpoint=checkpoint)
        model.zero_grad()
        plain.zero_grad()
        step(pipe)
        plain(rows(6)).square().mean().backward()
        assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def test_what_is_whole_goes_to_every_micro_batch():
    class Mask(nn.Module):
        def forward(self, x, mask):
            x = x * 2
            pipe_split()
            return torch.tanh(x) @ mask

    pipe = pipeline(Mask(), (rows(2), torch.ones(WIDTH, 3)), chunks=3)
    mask = torch.randn(WIDTH, 3)
    torch.testing.assert_close(pipe(rows(7), Whole(mask)), Mask()(rows(7), mask), rtol=0, atol=TOLERANCE)


def test_stages_are_put_on_devices():
    model, plain = made(Skips)
    pipe = pipeline(model, *call_of(Skips, 2), chunks=2, devices=["cpu"] * 4)
    assert pipe.devices == (torch.device("cpu"),) * 4
    args, kwargs = call_of(Skips, 6)
    torch.testing.assert_close(pipe(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match=r"one device per stage \(4\), got 3"):
        pipeline(model, *call_of(Skips, 2), devices=["cpu"] * 3)


def test_what_stages_on_several_devices_share_travels():
    """The device ``meta`` has everything that a device has, except values."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Linear(WIDTH, WIDTH)
            self.shift = nn.Parameter(torch.zeros(WIDTH))
            self.register_buffer("offset", torch.ones(WIDTH))

        def forward(self, x):
            x = self.words(x) + self.shift + self.offset
            pipe_split()
            return F.linear(x, self.words.weight) + torch.arange(WIDTH, device=x.device)

    model = Shifted()
    pipe = pipeline(model, (rows(2),), devices=["cpu", "meta"], checkpoint="never")
    assert pipe.replicated_params == []
    assert pipe(rows(4)).device.type == "meta"
    assert model.words.weight.device.type == "cpu"
    with pytest.raises(ValueError, match="can be on one device only"):
        pipeline(Shifted(), (rows(2),), devices=["cpu", "meta"], multi_use_param_spec=MultiUseParameterConfig.REPLICATE)


def test_compiled_stages_are_used():
    model, plain = made(Skips)
    pipe = pipeline(model, *call_of(Skips, 2), chunks=2)
    seen = []

    def backend(graph, example):
        seen.append(graph)
        return graph.forward

    for part in pipe:
        part.compile(backend=backend)
    args, kwargs = call_of(Skips, 6)
    torch.testing.assert_close(pipe(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=TOLERANCE)
    assert len(seen) >= 4
    step(pipe, Skips)
    plain(*args, **kwargs).square().mean().backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_stages_are_compiled_however_many_there_are():
    """torch.compile gives up a function that it has compiled 8 times, and counted all stages as one function."""
    torch.manual_seed(0)
    model = PipeSequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(12)])
    pipe = pipeline(model, (rows(2),), checkpoint="never")
    seen = []

    def backend(graph, example):
        seen.append(graph)
        return graph.forward

    for part in pipe:
        part.compile(backend=backend)
    torch.testing.assert_close(pipe(rows(4)), model(rows(4)), rtol=0, atol=TOLERANCE)
    assert len(seen) == len(pipe) == 12


def test_stages_are_readable(capsys):
    pipe = pipeline(made(Skips)[0], *call_of(Skips, 2))
    pipe.print_readable()
    text = capsys.readouterr().out
    assert [f"class Stage{number}(" in text for number in range(5)] == [True] * 4 + [False]
    assert "self.scale" in text.split("class Stage1")[0]
    assert "sigmoid" in text.split("class Stage1")[1].split("class Stage2")[0]
