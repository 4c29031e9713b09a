"""Values of any kind reach the stages that take them, on any rank."""

import copy

import pytest
import torch
from pipe_models import WIDTH, batches, row_model
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional as F
from training import EXACT, compare, every_schedule, make, parallel, run, stages_of

import pymoe
from pymoe.pipe.skip import pop, skippable, stash
from pymoe.pipe.stages import INPUT, Pipeline, Source, Stage, StagedModel


def skips(rank, world, name):
    """Send values to several stages, skipping others."""
    model = row_model()
    count = stages_of(name, world)
    pipe = pymoe.Pipe(
        copy.deepcopy(model), balance=[8 // count + (n < 8 % count) for n in range(count)], checkpoint="never"
    )
    schedule, stages = make(name, pipe, rank, world, 2 * world, F.mse_loss)
    (x, y), *_ = batches(1, [4 * world])
    F.mse_loss(model(x), y).backward()
    run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


@pytest.mark.parametrize("world", [2, 3])
@every_schedule
def test_a_value_may_go_to_several_stages_and_past_others(ranks, schedule, world):
    assert max(ranks(world).run(skips, name=schedule)) <= EXACT


class ByHand(StagedModel):
    """A model built by hand from ``parts``, ``functions`` of them, ``edges`` (the sources of each function's
    arguments), the number of their ``outputs``, the ``names`` of its arguments and the ``sources`` of its result.
    """

    def __init__(self, module):
        self.module = module
        self.parts = tuple(module.parts)
        self.devices = (None,) * len(self.parts)
        stages = [
            Stage(function, tuple(Source(*source) for source in inputs), outputs, (part,))
            for function, inputs, outputs, part in zip(
                module.functions(), module.edges, module.outputs, self.parts, strict=True
            )
        ]
        self._pipeline = Pipeline(tuple(stages), len(module.names), tuple(Source(*s) for s in module.sources))

    @property
    def pipeline(self):
        return self._pipeline

    def flatten_inputs(self, args, kwargs):
        given = dict(zip(self.module.names, args, strict=False)) | dict(kwargs)
        return [given[name] for name in self.module.names]

    def unflatten_outputs(self, values):
        return self.module.result(*values)


class Middle(nn.Module):
    """Has arguments that later stages take, a value for two stages that are not adjacent, and an output of the first
    stage.
    """

    names = ("x", "mask", "power", "bias")
    edges = (
        ((INPUT, 0),),
        ((0, 0), (INPUT, 1)),
        ((1, 0), (0, 0), (INPUT, 2), (INPUT, 3)),
    )
    outputs = (2, 1, 1)
    sources = ((2, 0), (0, 1))

    def __init__(self, width=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def functions(self):
        first, second, third = self.parts
        return (
            lambda x: [torch.tanh(first(x)), x.square().sum(1)],
            lambda h, mask: [second(h) * mask],
            lambda y, h, power, bias: [third(y) + h**power + bias],
        )

    def result(self, y, norms):
        return {"y": y, "norms": norms}

    def forward(self, x, mask, power, bias):
        functions = self.functions()
        h, norms = functions[0](x)
        (y,) = functions[1](h, mask)
        (y,) = functions[2](y, h, power, bias)
        return self.result(y, norms)


class Objects(nn.Module):
    """Passes all kinds of objects between two stages; they differ between micro-batches."""

    names = ("x",)
    edges = (((INPUT, 0),), ((0, 0), (0, 1), (0, 2)))
    outputs = (3, 1)
    sources = ((1, 0),)

    def __init__(self, width=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def functions(self):
        first, second = self.parts

        def begin(x):
            h = first(x)
            kept = x[:, 0] > 0  # the number of rows depends on the data
            some = {"rows": len(x), "kept": kept, "parts": [h[kept], (h.t(), None, h.expand(2, *h.shape))]}
            return [some, torch.Size(x.shape), x.to(torch.bfloat16)]

        def end(some, shape, rounded):
            part, (turned, nothing, twice) = some["parts"]
            assert nothing is None
            assert shape == rounded.shape
            assert part.shape[0] == int(some["kept"].sum())
            assert rounded.dtype == torch.bfloat16
            y = second(turned.t()) + twice.sum(0) + part.sum() / some["rows"]
            return [y + 0.0 * rounded.sum()]

        return begin, end

    def result(self, y):
        return y

    def forward(self, x):
        functions = self.functions()
        return functions[1](*functions[0](x))[0]


def by_hand_steps(rank, world, name, model, arguments):
    """Return the largest differences of the output and of parameters' and arguments' gradients in some steps."""
    model = {"Middle": Middle, "Objects": Objects}[model]()
    pipe = pymoe.Pipe.of(ByHand(copy.deepcopy(model)), checkpoint="never")

    def loss_fn(output, target):
        y = output if isinstance(output, torch.Tensor) else output["y"] * (1 + output["norms"].unsqueeze(1))
        return F.mse_loss(y, target)

    schedule, stages = make(name, pipe, rank, world, world, loss_fn)
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for rows in (2 * world, 2 * world, 3 * world):

        def tensor(rows=rows):
            return torch.randn(rows, 4, generator=generator).requires_grad_()

        named = {"mask": tensor(), "power": 3, "bias": tensor()} if arguments else {}
        x, y = tensor(), torch.randn(rows, 4, generator=generator)
        tensors = [x, *[value for value in named.values() if isinstance(value, torch.Tensor)]]
        twins = {id(t): t.detach().clone().requires_grad_() for t in tensors}
        cut = {key: twins.get(id(value), value) for key, value in named.items()}
        model.zero_grad()
        pipe.zero_grad()
        outputs = []
        for number in range(world):
            part = slice(number * rows // world, (number + 1) * rows // world)
            some = {key: v[part] if isinstance(v, torch.Tensor) else v for key, v in named.items()}
            outputs.append(model(x[part], **some))
            (loss_fn(outputs[-1], y[part]) / world).backward()
        found, _ = run(schedule, stages, (twins[id(x)],), cut, target=y)
        worst = max(worst, compare(model, pipe, stages))
        if found is not None:
            for key in ("y", "norms") if isinstance(found, dict) else (None,):
                mine = found if key is None else found[key]
                expected = torch.cat([output if key is None else output[key] for output in outputs])
                worst = max(worst, (mine - expected).abs().max().item())
        if rank == 0:
            for one in tensors:
                worst = max(worst, (one.grad - twins[id(one)].grad).abs().max().item())
    return worst


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_in_the_middle_take_arguments_that_the_first_rank_was_given(ranks, schedule):
    worst = ranks(3).run(by_hand_steps, name=schedule, model="Middle", arguments=True)
    assert max(worst) <= EXACT


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_anything_can_go_from_rank_to_rank(ranks, schedule):
    worst = ranks(2).run(by_hand_steps, name=schedule, model="Objects", arguments=False)
    assert max(worst) <= EXACT


class Own(nn.Module):
    """Returns a buffer, which its next forward changes, and a value that a parallel stage edits."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return x, self.seen


class TakeBoth(nn.Module):
    def forward(self, both):
        return both[0] + both[1]


def buffers_on_their_way(rank, world, micro_batches):
    """Return outputs where a stage sends a buffer that its next forward changes."""
    model = nn.Sequential(Own(), *[nn.Identity() for _ in range(2 * world - 2)], TakeBoth())
    _, schedule, stages = parallel(model, "ScheduleGPipe", rank, world, micro_batches, loss_fn=None)
    worst = 0.0
    for x, _ in batches(3, [2 * micro_batches]):
        expected = torch.cat([model(part) for part in x.tensor_split(micro_batches)])
        output, _ = run(schedule, stages, (x,))
        if output is not None:
            worst = max(worst, (output - expected).abs().max().item())
    return worst


def test_a_buffer_that_is_sent_may_be_changed_by_the_next_forward(ranks):
    assert max(ranks(2).run(buffers_on_their_way, micro_batches=6)) <= EXACT


class Sharing(nn.Linear):
    """Returns values that share memory."""

    def __init__(self, kind):
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x):
        h = super().forward(x)
        return {"same": (h, h), "view": (h, h.view(-1)), "apart": (h, h * 1), "counts": (h.detach(), h.detach())}[
            self.kind
        ]


class Editing(nn.Linear):
    """Changes the first of its values in place, and reads both values."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, values):
        one, other = values
        one.mul_(self.weight[0] if one.requires_grad else 3.0)
        return super().forward(one) + other.reshape(one.shape).square()


def edits(rank, world, kind):
    torch.manual_seed(0)
    model = nn.Sequential(Sharing(kind), Editing())
    pipe = pymoe.Pipe(copy.deepcopy(model), checkpoint="never")
    schedule, stages = make("ScheduleGPipe", pipe, rank, world, 2, F.mse_loss)
    (x, y), *_ = batches(1, [4])
    F.mse_loss(torch.cat([model(part) for part in x.chunk(2)]), y).backward()
    run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("kind", ["same", "view"])
def test_an_edit_of_a_value_that_shares_memory_is_refused_as_in_one_process(ranks, kind):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="shares its memory with another"):
        pymoe.Pipe(nn.Sequential(Sharing(kind), Editing()), 2, "never").step(
            torch.randn(4, WIDTH), loss_fn=torch.sum, reduction="sum"
        )
    with pytest.raises(AssertionError, match="shares its memory with another"):
        ranks(2).run(edits, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["apart", "counts"])
def test_an_edit_of_a_value_is_seen_where_the_model_sees_it(ranks, kind):
    assert max(ranks(2).run(edits, kind=kind)) <= EXACT


class Twice(nn.Module):
    """Returns its input, which is also stashed."""

    def forward(self, x):
        yield stash("past", x)
        return x


class InPlace(nn.Linear):
    def forward(self, x):
        x.mul_(2.0)
        return super().forward(x)


class Later(nn.Module):
    def forward(self, x):
        return x + (yield pop("past")).square()


def edits_past_others(rank, world, grads):
    """Send a value to the next stage, which changes it in place, and also to a later stage."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH).requires_grad_(grads)
    made = skippable(stash=["past"])(Twice)(), InPlace(WIDTH, WIDTH), skippable(pop=["past"])(Later)()
    pipe = pymoe.Pipe(nn.Sequential(nn.Sequential(first, made[0]), *made[1:]), checkpoint="never")
    stages = [pipe.build_stage(rank, "cpu")]
    schedule = ScheduleGPipe(stages[0], 2, loss_fn=F.mse_loss)
    (x, y), *_ = batches(1, [4])
    run(schedule, stages, (x,), target=y)


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("grads", [True, False])
def test_an_edit_that_a_later_stage_on_another_rank_would_not_see_is_refused(ranks, grads):
    with pytest.raises(AssertionError, match="a tensor that goes to several stages, or is an output"):
        ranks(3).run(edits_past_others, grads=grads)
