"""Skips in a pipe go straight from their stash to every pop, under every schedule."""

import gc
import weakref

import pytest
import torch
from pipe_models import CHECKPOINT, SCHEDULES, WIDTH, assert_same_gradients, batches
from torch import nn
from torch.nn import functional as F

from pymoe.pipe import Pipe
from pymoe.pipe.skip import Namespace, pop, skippable, stash
from pymoe.pipe.stages import Source

# Emitted, for example, by pipes with one micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")


def linear():
    return nn.Linear(WIDTH, WIDTH).double()


def stashing(make, name="skip"):
    @skippable(stash=[name])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash(name, make(x))
            return x * 1.5

    return Stash()


def popping(use, name="skip"):
    @skippable(pop=[name])
    class Pop(nn.Module):
        def forward(self, x):
            value = yield pop(name)
            return use(x, value)

    return Pop()


def to_the_model(build, schedule, checkpoint, balance=None, chunks=3):
    """Check that a step of the pipe leaves the model's gradients."""
    for x, y in batches(2, (7,)):
        torch.manual_seed(0)
        plain = build()
        torch.manual_seed(0)
        model = build()
        F.mse_loss(plain(x), y).backward()
        pipe = Pipe(model, chunks, checkpoint, balance=balance)
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        assert_same_gradients(model, plain)
        torch.testing.assert_close(pipe(x), plain(x), rtol=0, atol=1e-12)


USES = {
    "used": (lambda x: x.sin(), lambda x, skip: x + skip),
    "popped and not used": (lambda x: x.sin(), lambda x, skip: x),
    "integers": (lambda x: (x > 0).long(), lambda x, skip: x * skip),
    "booleans": (lambda x: x > 0, lambda x, skip: torch.where(skip, x, -x)),
    "None": (lambda x: None, lambda x, skip: x if skip is None else x * 0),
    "structures": (lambda x: {"a": x, "b": [x.cos(), 3]}, lambda x, skip: x * skip["b"][1] + skip["a"] * skip["b"][0]),
    "the input itself": (lambda x: x, lambda x, skip: x * skip),
    "without history": (lambda x: x.detach(), lambda x, skip: x * skip),
    "other rows": (lambda x: x[:1], lambda x, skip: x + skip.mean()),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in USES if name != "other rows"])
def test_skips_work(name, schedule):
    make, use = USES[name]
    for checkpoint in CHECKPOINT:
        to_the_model(
            lambda: nn.Sequential(linear(), stashing(make), linear(), popping(use), linear()), schedule, checkpoint
        )


def test_a_skip_may_have_other_rows():
    make, use = USES["other rows"]
    to_the_model(lambda: nn.Sequential(linear(), stashing(make), linear(), popping(use)), "1f1b", "always", chunks=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("balance", [None, [2, 5], [3, 4], [1, 3, 3], [7]])
def test_a_skip_may_have_several_pops_in_one_stage_or_in_many(schedule, balance):
    def build():
        pops = [popping(lambda x, skip, k=k: x + k * skip) for k in (2, 3, 5)]
        return nn.Sequential(linear(), stashing(torch.sin), pops[0], linear(), pops[1], linear(), pops[2])

    to_the_model(build, schedule, "except_last", balance)


def test_skips_of_one_name_are_told_apart_by_namespaces():
    def build():
        layers = []
        spaces = [Namespace() for _ in range(3)]
        for factor, space in enumerate(spaces, 2):
            layers += [stashing(lambda x, factor=factor: factor * x).isolate(space), linear()]
        for space in spaces[1:] + spaces[:1]:
            layers += [popping(lambda x, skip: x * skip).isolate(space), linear()]
        return nn.Sequential(*layers)

    to_the_model(build, "1f1b", "except_last")


def test_a_skip_passes_no_stage_between():
    model = nn.Sequential(linear(), stashing(torch.sin), linear(), linear(), popping(torch.add))
    pipe = Pipe(model, 2)
    assert [stage.inputs for stage in pipe.staged.pipeline.stages] == [
        (Source(-1, 0),),
        (Source(0, 0),),
        (Source(1, 0),),
        (Source(2, 0),),
        (Source(3, 0), Source(1, 1)),
    ]


def test_a_skip_is_freed_after_its_last_pop():
    """In a forward without gradients, the skip lives in the stages up to its last pop, but not in later ones."""
    made, alive = [], []

    def look(x):
        alive.append(made[-1]() is not None)
        return x

    class Look(nn.Module):
        def forward(self, x):
            return look(x)

    def make(x):
        y = x.clone()
        made.append(weakref.ref(y))
        return y

    pops = [popping(torch.add), popping(torch.add)]
    model = nn.Sequential(stashing(make), Look(), pops[0], Look(), pops[1], Look(), nn.Sequential(Look()))
    gc.disable()
    try:
        with torch.no_grad():
            Pipe(model, 1)(torch.randn(2, WIDTH))
    finally:
        gc.enable()
    assert alive == [True, True, False, False]


def test_mismatched_skips_are_refused_when_the_pipe_is_made():
    for layers, words in [
        ([stashing(torch.sin), nn.ReLU()], "no module declared 'skip' as poppable but stashed"),
        ([nn.ReLU(), popping(torch.add)], "declared 'skip' as poppable but it was not stashed"),
        ([popping(torch.add), stashing(torch.sin)], "declared 'skip' as poppable but it was not stashed"),
        ([stashing(torch.sin), stashing(torch.sin), popping(torch.add)], "redeclared 'skip' as stashable"),
    ]:
        with pytest.raises(TypeError, match=words):
            Pipe(nn.Sequential(*layers))


def test_wrong_commands_are_told_with_their_place():
    @skippable(stash=["skip"])
    class Forgets(nn.Module):
        def forward(self, x):
            return x

    pipe = Pipe(nn.Sequential(nn.ReLU(), Forgets(), popping(torch.add)), 2)
    with pytest.raises(RuntimeError, match="'skip' must be stashed but have not") as failed:
        pipe(torch.randn(4, 2))
    assert failed.value.__notes__ == ["in the forward pass of stage 1, micro-batch 0"]


def test_an_edit_in_place_that_other_pops_would_see_is_refused():
    model = nn.Sequential(
        linear(), stashing(lambda x: x), popping(lambda x, skip: x + skip.mul_(2)), popping(torch.add)
    )
    x, y = next(batches(1, (6,)))
    for checkpoint in CHECKPOINT:
        with pytest.raises(
            RuntimeError,
            match=r"goes to several stages, or is an output|modified by an inplace",
        ):
            Pipe(model, 2, checkpoint).step(x, target=y, loss_fn=F.mse_loss)
