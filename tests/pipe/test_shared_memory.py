"""Values that share memory, and in-place changes: a step has the model's gradients, or raises.

Tensors in the same memory share one version counter across all stages, so autograd notices changes of saved tensors.
"""

import copy
import itertools

import pytest
import torch
from pipe_models import Say
from torch import nn

from pymoe.pipe import Pipe
from pymoe.pipe.skip import pop, skippable, stash

# Emitted, for example, by pipes with one micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")

WIDTH = 4


class Exp(nn.Module):
    """A layer whose gradient needs its output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return (x * self.weight).exp()


class Two(nn.Module):
    """Returns two outputs in the same memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.linear(x)
        return h, h.view(len(h), 2, 2)


class SliceOfParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.table = nn.Parameter(torch.ones(16, WIDTH))

    def forward(self, x):
        return x * self.weight, self.table[: len(x)]


class WholeParameter(SliceOfParameter):
    def forward(self, x):
        return x * self.weight, self.table


def saved(what):
    """Return a layer that passes its input on, and stashes ``what(input)``."""

    @skippable(stash=["it"])
    class Saved(nn.Module):
        def forward(self, x):
            yield stash("it", what(x))
            return x

    return Saved


def popped(use):
    @skippable(pop=["it"])
    class Popped(nn.Module):
        def forward(self, x):
            it = yield pop("it")
            return use(x, it)

    return Popped


def say(function):
    return lambda: Say(function)


def linear():
    return nn.Linear(WIDTH, WIDTH)


twice = say(lambda x: x.mul_(2))
same = nn.Identity
view = say(lambda x: x.view(x.shape))
square = say(lambda x: x.square())
edit_first = say(lambda pair: (pair[0].mul_(3), pair[1]))
edit_second = say(lambda pair: (pair[0], pair[1].mul_(3)))
square_first = say(lambda pair: (pair[0].square(), pair[1]))
product = say(lambda pair: pair[0].flatten(1) * pair[1].flatten(1))
total = say(lambda pair: pair[0].flatten(1)[:1] + pair[1].flatten(1)[:1])
MODELS = {
    "a result that its maker has saved": [Exp, twice],
    "the same by way of a stage that hands it through": [Exp, same, twice],
    "the same by way of a view": [Exp, view, twice],
    "by way of a stage that saves nothing": [linear, view, twice, square],
    "what another stage has saved": [linear, square, linear, twice],
    "two outputs, one changed": [Two, edit_first, product],
    "two outputs, one changed later": [Two, same, edit_first, product],
    "two outputs, one saved, the other changed": [Two, square_first, edit_second, total],
    "a skip that another stage has saved": [linear, saved(lambda x: x), square, popped(lambda x, it: x + it.mul_(2))],
    "a view as a skip": [
        linear,
        saved(lambda x: x.view(-1, 2, 2)),
        square,
        popped(lambda x, it: x + it.mul_(2)[:, 0, :1]),
    ],
    "a skip changed by a stage in between": [
        linear,
        saved(lambda x: x.view(-1, 2, 2)),
        same,
        twice,
        popped(lambda x, it: x * it.flatten(1)),
    ],
    "the input": [twice, linear],
    "the input, handed through": [same, twice, linear],
    "a slice of a parameter": [SliceOfParameter, edit_second, total],
    "a slice of a parameter, handed through": [SliceOfParameter, same, edit_second, total],
    "a parameter": [WholeParameter, edit_second, total],
}
RIGHT = {  # models and checkpoint modes for which gradients must be right, so that an error is a failure
    "by way of a stage that saves nothing": ("never",),
    "what another stage has saved": ("never", "always"),
}


def refused(function):
    """Return the function's result, or the error that it raised."""
    try:
        return function(), None
    except RuntimeError as error:
        return None, str(error)


def gradients(model, call, x):
    """Return the gradients of the input and all parameters, and the parameters, which must not have changed."""
    x = x.clone().requires_grad_()
    call(x * 1)
    return [x.grad, *[p.grad for p in model.parameters()], *[p.detach().clone() for p in model.parameters()]]


@pytest.mark.thinned(usual=32)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_models_or_there_is_an_error(doubles, name, checkpoint, chunks):
    model = nn.Sequential(*[make() for make in MODELS[name]])
    x = torch.randn(6, WIDTH)
    plain = copy.deepcopy(model)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():  # autograd alone may refuse
        expected, error = refused(lambda: gradients(plain, lambda z: plain(z).sum().backward(), x))
    assert error is None or "leaf Variable" in error
    for how, schedule in itertools.product(["forward", "step"], ["1f1b", "zero-bubble"]):
        mine = copy.deepcopy(model)
        parameters = [p.detach().clone() for p in mine.parameters()]
        pipe = Pipe(mine, chunks, checkpoint)

        def call(z, how=how, schedule=schedule, pipe=pipe):
            if how == "forward":
                pipe(z).sum().backward()
            else:
                pipe.step(z, loss_fn=torch.sum, reduction="sum", schedule=schedule)

        found, error = refused(lambda mine=mine, call=call: gradients(mine, call, x))
        if error is None:
            assert expected is not None
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
        else:
            assert "in place" in error or "inplace" in error
            assert checkpoint not in RIGHT.get(name, ())
            assert all(map(torch.equal, parameters, mine.parameters()))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_outputs_in_one_memory_are_not_changed_in_place(doubles, checkpoint):
    model = nn.Sequential(Two())
    whole, parts = Pipe(model, 1, checkpoint)(torch.randn(2, WIDTH))
    for output in (whole, parts):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            output.mul_(3)
    (whole * parts.flatten(1)).sum().backward()
    assert model[0].linear.weight.grad is not None
    whole, parts = Pipe(model, 2, checkpoint)(torch.randn(2, WIDTH))  # joined, so in separate memory
    whole.mul_(3)
    (whole * parts.flatten(1)).sum().backward()


def test_an_output_that_is_in_the_memory_of_an_input_or_a_parameter_is_not_changed_in_place(doubles):
    z = torch.randn(2, WIDTH, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Pipe(nn.Sequential(nn.Identity()))(z).mul_(3)
    model = nn.Sequential(SliceOfParameter())
    _, table = Pipe(model)(z)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        table.add_(5)
    assert (model[0].table == 1).all()
    only, _ = Pipe(model)(z)
    only.mul_(3).sum().backward()  # has no other reference


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("how", ["forward", "step"])
def test_an_input_that_a_stage_has_changed_has_no_history_afterwards(doubles, checkpoint, how):
    """Its gradient bypassed the change; for example, it was twice the value that ``relu_`` had set to zero."""

    def run(after):
        x = torch.randn(4, WIDTH, requires_grad=True)
        z = x * 1
        pipe = Pipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), 1, checkpoint)
        if how == "step":
            pipe.step(z, loss_fn=torch.sum, reduction="sum")
            loss = 0.0
        else:
            loss = pipe(z).sum()
        assert torch.equal(z, x.relu()), "it is the caller's own memory"
        if how == "forward" or after:
            (loss + z.sum() if after else loss).backward()
        return x

    x = run(after=False)
    assert torch.equal(x.grad != 0, x > 0)
    with pytest.raises(RuntimeError, match="a stage has changed an input of the pipe in place"):
        run(after=True)


def test_a_leaf_is_not_changed_in_place(doubles):
    x = torch.randn(4, WIDTH, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Pipe(nn.Sequential(nn.ReLU(inplace=True)), 2)(x)
    assert torch.equal(x, before)


def test_an_input_that_changes_before_the_backward_pass_is_noticed(doubles):
    """Aliases of the input had separate version counters, and gradients were computed from the caller's new values."""
    z = torch.randn(4, WIDTH, requires_grad=True) * 1
    loss = Pipe(nn.Sequential(Say(torch.square)), 2, "never")(z).sum()
    with torch.no_grad():
        z.copy_(torch.zeros(4, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
