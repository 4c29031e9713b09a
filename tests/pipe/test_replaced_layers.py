"""A pipe runs the model's current layers, even if layers were replaced after the pipe was built."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import pymoe
from pymoe.nn import MoE
from pymoe.pipe.skip import pop, skippable, stash

pytestmark = [pytest.mark.usefixtures("doubles"), pytest.mark.filterwarnings("ignore")]
WIDTH, CHUNKS = 5, 3


def layers():
    nested = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nested, nn.Linear(WIDTH, WIDTH)]


class Adapter(nn.Module):
    """A replacement as PEFT makes it: the frozen layer, plus a product of two small matrices."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Positive(nn.Module):
    def forward(self, weight):
        return weight.square()


@skippable(stash=["past"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("past", x)
        return x.sin()


@skippable(pop=["past"])
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("past"))


def inject_adapters(model):
    """Replace every linear layer in its parent, at any depth, as PEFT does."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            around, _, last = name.rpartition(".")
            setattr(model.get_submodule(around), last, Adapter(layer))


def quantise(model):
    import torch.ao.quantization as quantization

    for layer in model.train():
        layer.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model, inplace=True)
    model.float()


def swap(model):
    model[0], model[3] = model[3], model[0]


def put_forward(layer):
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)


def skips(model):
    model[2][1], model[3] = Stash(), Pop()


def both(*edits):
    def edit(model):
        for one in edits:
            one(model)

    return edit


def linear(out=WIDTH):
    return nn.Linear(WIDTH, out)


FOLLOWED = {
    "a new head": lambda model: setattr(model, "3", linear(2)),
    "replaced by index": lambda model: model.__setitem__(3, linear()),
    "replaced in _modules": lambda model: model._modules.update({"1": nn.ReLU()}),
    "replaced by register_module": lambda model: model.register_module("0", linear()),
    "replaced by set_submodule": lambda model: model.set_submodule("2.0", linear()),
    "replaced twice": both(lambda model: model.__setitem__(3, linear(3)), lambda model: model.__setitem__(3, linear())),
    "swapped": swap,
    "one layer in two places": lambda model: model.__setitem__(3, model[0]),
    "wrapped": lambda model: model.__setitem__(3, Wrapped(model[3])),
    "adapters": inject_adapters,
    "nested, replaced": lambda model: model[2].__setitem__(0, linear()),
    "nested, appended": lambda model: model[2].append(linear()),
    "nested, inserted": lambda model: model[2].insert(0, linear()),
    "nested, deleted": lambda model: model[2].__delitem__(1),
    "nested, the whole": lambda model: model.__setitem__(2, nn.Sequential(linear(), nn.Tanh())),
    "a batch norm": lambda model: model.__setitem__(1, nn.BatchNorm1d(WIDTH)),
    "a nested batch norm": lambda model: model[2].__setitem__(1, nn.BatchNorm1d(WIDTH)),
    "a skip": skips,
    "a mixture": lambda model: model.__setitem__(2, MoE(WIDTH, 4, 3, 2, aux_loss_coef=0.5)),
    "a nested mixture": lambda model: model[2].__setitem__(1, MoE(WIDTH, 4, 3, 2, aux_loss_coef=0.5)),
    "parametrized": lambda model: parametrize.register_parametrization(model[3], "weight", Positive()),
    "weight norm": lambda model: parametrizations.weight_norm(model[2][0]),
    "weight norm of hooks": lambda model: nn.utils.weight_norm(model[3]),
    "pruned": lambda model: prune.random_unstructured(model[3], "weight", 0.5),
    "another class": lambda model: setattr(model[3], "__class__", Doubled),
    "a forward in the object": lambda model: put_forward(model[3]),
    "quantised": quantise,
    "another parameter": lambda model: setattr(model[3], "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))),
}
NUMBER_OF_LAYERS = {
    "appended": (lambda model: model.append(linear()), "'4' (Linear)"),
    "inserted": (lambda model: model.insert(1, Wrapped(linear())), "'1' (Wrapped)"),
    "extended": (lambda model: model.extend([linear(), nn.ReLU()]), "'5' (ReLU)"),
    "deleted": (lambda model: model.__delitem__(2), "'2' (Sequential)"),
    "several deleted": (lambda model: model.__delitem__(slice(2, None)), "'3' (Linear)"),
    "popped and appended": (both(lambda model: model.pop(1), lambda model: model.append(nn.GELU())), "'3' (GELU)"),
    "reordered": (lambda model: model._modules.update({"0": model._modules.pop("0")}), "1, 2, 3, 0"),
}


class OfList(nn.ModuleList):
    """The same layers as a model, for pipes of given stages."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def of_sequential(**options):
    def make(model):
        return pymoe.Pipe(model, chunks=CHUNKS, **options)

    return nn.Sequential, make


def captured(model):
    spec = {"2": pymoe.SplitPoint.BEGINNING}
    return pymoe.pipeline(model, (torch.randn(2, WIDTH),), split_spec=spec, chunks=CHUNKS)


PIPES = {
    "a stage a layer": of_sequential(),
    "stages of several layers": of_sequential(balance=[1, 3], checkpoint="always"),
    "deferred batch norm": of_sequential(balance=[2, 2], deferred_batch_norm=True),
    "on devices": of_sequential(balance=[2, 2], devices=["cpu", "cpu"]),
    "stages": (nn.ModuleList, lambda model: pymoe.Pipe.from_stages(model, chunks=CHUNKS)),
    "stages of a list": (list, lambda model: pymoe.Pipe.from_stages(model, chunks=CHUNKS)),
    "captured": (nn.Sequential, captured),
}
EDITABLE = [name for name in PIPES if name != "stages of a list"]


def make(kind):
    torch.manual_seed(0)
    container, pipe = PIPES[kind]
    made = layers()
    model = made if container is list else container(made) if container is nn.ModuleList else container(*made)
    return model, pipe(model)


def outcome(pipe, x):
    """Return the outputs of a step and of a call, the gradients, and the buffers afterwards."""
    torch.manual_seed(1)
    x = x.to(next(pipe.parameters()).dtype)
    pipe.zero_grad()
    losses = pipe.step(x, loss_fn=lambda y: y.square().mean())
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    output = pipe(x)
    return losses, output, grads, {name: buffer.clone() for name, buffer in pipe.named_buffers()}


def by_hand(layers, x):
    """Return the same, computed from the layers themselves, micro-batch by micro-batch."""
    model = nn.Sequential(*layers)
    torch.manual_seed(1)
    x = x.to(next(model.parameters()).dtype)
    losses = [model(part).square().mean() for part in x.chunk(CHUNKS)]
    torch.stack(losses).mean().backward()
    return torch.stack(losses).detach(), torch.cat([model(part) for part in x.chunk(CHUNKS)])


@pytest.mark.thinned(usual=len(FOLLOWED) + 4)  # captures take seconds
@pytest.mark.parametrize("edit", FOLLOWED)
@pytest.mark.parametrize("kind", EDITABLE)
def test_a_pipe_runs_the_model_that_its_parameters_show(kind, edit):
    if kind in ("stages", "captured") and edit == "a skip":
        pytest.skip("skips are of sequential models")
    model, pipe = make(kind)
    x = torch.randn(2 * CHUNKS, WIDTH)
    outcome(pipe, x)  # makes the pipe find out about its layers
    plain = make(kind)[0]
    for edited in (model, plain):
        torch.manual_seed(2)
        FOLLOWED[edit](edited)
    assert dict(pipe.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    if kind == "captured" and edit == "quantised":
        with pytest.raises(pymoe.pipe.CaptureError, match="list the module around the line in `opaque=`"):
            pipe(x)
        return
    found = outcome(pipe, x)
    if kind != "captured" or "mixture" in edit:  # captures take seconds
        torch.testing.assert_close(found, outcome(PIPES[kind][1](plain), x), rtol=0, atol=1e-12)
    assert [found[2][name] is None for name, _ in pipe.named_parameters()] == [
        not parameter.requires_grad for parameter in pipe.parameters()
    ]
    if edit == "quantised":
        assert model[0].weight_fake_quant.activation_post_process.max_val.numel() == WIDTH
        return
    if "mixture" in edit or kind == "deferred batch norm":  # these layers notice that they are in a pipe
        return
    plain = make(kind)[0]
    torch.manual_seed(2)
    FOLLOWED[edit](plain)
    torch.testing.assert_close(found[:2], by_hand(plain, x), rtol=0, atol=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[2][name], parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("edit", NUMBER_OF_LAYERS)
@pytest.mark.parametrize("kind", EDITABLE)
def test_another_number_of_layers_is_refused_by_name_or_captured(kind, edit):
    model, pipe = make(kind)
    x = torch.randn(2 * CHUNKS, WIDTH)
    outcome(pipe, x)
    change, name = NUMBER_OF_LAYERS[edit]
    if kind == "stages" and edit == "several deleted":
        pytest.skip("a ModuleList of torch cannot do that")
    change(model)
    if kind == "captured":
        if edit == "several deleted":
            with pytest.raises(ValueError, match="no submodule '2'"):
                pipe(x)
            return
        torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=1e-12)
        return
    for run in (lambda: pipe(x), lambda: pipe.step(x, loss_fn=lambda y: y.mean()), pipe.info, lambda: pipe[0]):
        with pytest.raises(RuntimeError, match="make a new pipe of the model") as caught:
            run()
        assert name in str(caught.value)
    assert "Pipe(" in repr(pipe)


@pytest.mark.parametrize("kind", PIPES)
def test_a_layer_that_is_replaced_through_the_pipe_is_run(kind):
    _, pipe = make(kind)
    x = torch.randn(2 * CHUNKS, WIDTH)
    outcome(pipe, x)
    setattr(pipe, "3", linear(2))
    outputs = outcome(pipe, x)
    assert outputs[1].shape == (2 * CHUNKS, 2)
    assert outputs[2]["3.weight"].abs().sum() > 0
    assert pipe.get_stage_module(len(pipe) - 1).state_dict().keys()


def test_a_list_of_stages_is_read_once():
    model, pipe = make("stages of a list")
    before, x = model[3], torch.randn(2 * CHUNKS, WIDTH)
    model[3] = linear(2)
    assert pipe(x).shape == (2 * CHUNKS, WIDTH)
    assert any(before.weight is parameter for parameter in pipe.parameters())


@pytest.mark.parametrize("kind", ["stages of several layers", "captured"])
def test_a_layer_that_is_replaced_in_a_stage_alone_is_refused_by_name(kind):
    model, pipe = make(kind)
    x = torch.randn(2 * CHUNKS, WIDTH)
    outcome(pipe, x)
    head = linear(2)
    setattr(pipe[1], "3", head)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"in stage 1, got new '3' \(Linear\)"):
            pipe(x)
    model[3] = head
    assert pipe(x).shape == (2 * CHUNKS, 2)


@pytest.mark.parametrize("kind", EDITABLE)
def test_a_layer_that_comes_back_is_run_again(kind):
    model, pipe = make(kind)
    x = torch.randn(2 * CHUNKS, WIDTH)
    before, old = outcome(pipe, x), model[3]
    model[3] = linear(2)
    outcome(pipe, x)
    model[3] = old
    torch.testing.assert_close(outcome(pipe, x), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", EDITABLE)
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_runs_the_layers_that_it_was_given(kind, copied, tmp_path):
    _, pipe = make(kind)
    x = torch.randn(2 * CHUNKS, WIDTH)
    outcome(pipe, x)
    if copied == "deepcopy":
        other = copy.deepcopy(pipe)
    else:
        torch.save(pipe, tmp_path / "pipe")
        other = torch.load(tmp_path / "pipe", weights_only=False)
    setattr(other, "3", linear(2))
    assert other(x).shape == (2 * CHUNKS, 2)
    assert pipe(x).shape == (2 * CHUNKS, WIDTH)


def test_what_a_call_of_the_model_would_do_besides_its_layers_is_refused():
    model, pipe = make("a stage a layer")
    put_forward(model)
    for run in (lambda: pipe(torch.randn(4, WIDTH)), lambda: pymoe.Pipe(model)):
        with pytest.raises(TypeError, match="a forward of its own, put into the object"):
            run()

    class Called(nn.Sequential):
        def __call__(self, x):
            return 2 * super().__call__(x)

    with pytest.raises(TypeError, match="Called has a forward of its own"):
        pymoe.Pipe(Called(linear()))


def test_a_new_batch_norm_is_deferred_where_the_pipe_defers_them():
    model, pipe = make("deferred batch norm")
    model[1] = norm = nn.BatchNorm1d(WIDTH)
    x = torch.randn(2 * CHUNKS, WIDTH)
    pipe.step(x, loss_fn=lambda y: y.square().mean())
    assert norm.num_batches_tracked == 1


def test_skips_that_no_longer_match_are_refused():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), Stash(), Pop())
    pipe = pymoe.Pipe(model, chunks=CHUNKS)
    model[1] = nn.Tanh()
    for _ in range(2):
        with pytest.raises(TypeError, match="'2' declared 'past' as poppable but it was not stashed"):
            pipe(torch.randn(6, WIDTH))
