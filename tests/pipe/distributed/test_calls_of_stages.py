"""Counts calls and objects of stages on several processes under torch's schedules: layers, hooks, graphs, buffers."""

import copy

import pytest
import torch
from pipe_models import WIDTH, batches
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from training import (
    CPU,
    EXACT,
    compare,
    every_schedule,
    largest_difference,
    linear_model,
    own_gradients,
    parallel,
    run,
    some_schedules,
    stages_of,
)

import pymoe

ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = self.tokens = 0

    def forward(self, x):
        self.calls += 1
        self.tokens += len(x)
        return x


def forwards(rank, world, name):
    """Return the calls and rows that each layer has seen in two steps, and the batches that a batch norm has
    counted.
    """
    model = nn.Sequential(*[nn.Sequential(nn.BatchNorm1d(WIDTH), Counting()) for _ in range(2 * world)])
    _, schedule, stages = parallel(model, name, rank, world, 2 * world)
    for x, y in batches(2, [12]):
        run(schedule, stages, (x,), target=y)
    found = [part for stage in stages for part in stage.submod.modules()]
    return [
        [part.calls, part.tokens] if isinstance(part, Counting) else int(part.num_batches_tracked)
        for part in found
        if isinstance(part, (Counting, nn.BatchNorm1d))
    ]


@pytest.mark.slow
@every_schedule
def test_no_forward_is_run_but_those_of_the_micro_batches(ranks, schedule):
    for found in ranks(2).run(forwards, name=schedule):
        assert found == [8, [8, 24]] * (len(found) // 2)


backwards = [0]


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        backwards[0] += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return Noted.apply(x, self.weight)


def function_backwards(rank, world, name):
    """Return how often a Function's backward has run, and the numbers of its layers and micro-batches."""
    model = nn.Sequential(*[Scale() for _ in range(2 * world)])
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    (x, y), *_ = batches(1, [4 * world])
    F.mse_loss(model(x), y).backward()
    backwards[0] = 0
    run(schedule, stages, (x,), target=y)
    layers = sum(len(stage.submod) for stage in stages)
    return {"calls": backwards[0], "expected": layers * 2 * world, "worst": compare(model, pipe, stages)}


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_the_backward_of_a_function_runs_once_in_zero_bubble_schedules(ranks, schedule):
    for found in ranks(2).run(function_backwards, name=schedule):
        assert found["calls"] == found["expected"]
        assert found["worst"] <= EXACT


def hooks(rank, world, name):
    """Return the number of calls of parameter hooks in three steps, and of hooks of a stage's inputs."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    calls, seen = {"hook": [], "after": [], "input": []}, []
    parameter = next(stages[0].submod.parameters())
    parameter.register_hook(lambda grad: seen.append(grad.clone()) or calls["hook"].append(1))
    parameter.register_post_accumulate_grad_hook(lambda p: calls["after"].append(1))

    def watch(module, args):
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: calls["input"].append(1))

    stages[-1].submod[0].register_forward_pre_hook(watch)
    counts = []
    for x, y in batches(3, [4 * world]):
        pipe.zero_grad()
        model.zero_grad()
        run(schedule, stages, (x,), target=y)
        F.mse_loss(model(x), y).backward()
        counts.append([len(calls[kind]) for kind in calls])
        for kind in calls:
            calls[kind].clear()
    return {"counts": counts, "sum": torch.equal(seen[-1], parameter.grad), "is_first": stages[-1].is_first}


@every_schedule
def test_hooks_are_called_once_a_step_for_parameters_and_once_a_micro_batch_for_values(ranks, schedule):
    for found in ranks(2).run(hooks, name=schedule):
        assert found["counts"] == [[1, 1, 0 if found["is_first"] else 4]] * 3
        assert found["sum"]


class Alive:
    """Counts the living graphs and outputs of a layer."""

    def __init__(self):
        self.outputs, self.graphs, self.most = [], [], [0, 0]

    def look(self):
        self.outputs = [output for output in self.outputs if not output.expired()]
        self.graphs = [graph for graph in self.graphs if not graph.expired()]
        return len(self.outputs), len(self.graphs)

    def __call__(self, module, args, output):
        self.outputs.append(StorageWeakRef(output.untyped_storage()))
        self.graphs.append(StorageWeakRef(module.saved.untyped_storage()))
        module.saved = None
        self.most = [max(pair) for pair in zip(self.most, self.look(), strict=True)]


class Saving(nn.Module):
    """A layer whose graph holds a tensor that has no other reference."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.saved = None

    def forward(self, x):
        self.saved = torch.full_like(x, 2.0)
        return self.linear(x) * self.saved


def activations(rank, world, name, micro_batches):
    """Return the largest numbers of living graphs and outputs of the rank's last layer, and the numbers left after a
    step.
    """
    model = nn.Sequential(*[Saving() for _ in range(2 * world)])
    _, schedule, stages = parallel(model, name, rank, world, micro_batches)
    alive = Alive()
    stages[0].submod[-1].register_forward_hook(alive)
    for x, y in batches(2, [4 * micro_batches]):
        run(schedule, stages, (x,), target=y, return_outputs=False)
    return {"most": alive.most, "left": alive.look()}


@pytest.mark.parametrize(("schedule", "most"), [("Schedule1F1B", 2), ("ScheduleGPipe", 8)])
def test_activations_are_let_go_of_after_their_backward(ranks, schedule, most):
    first, last = ranks(2).run(activations, name=schedule, micro_batches=8)
    assert first["most"][1] == most
    assert first["most"][0] <= most + 3  # some on their way
    assert last["most"][1] == (1 if schedule == "Schedule1F1B" else 8)
    assert first["left"] == last["left"] == [0, 0]


def random_numbers(rank, world, name, checkpoint):
    """Compare gradients with the gradients of an equally seeded pipe in one process; return the generators' states,
    too.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)) for _ in range(2 * world)]
    model = nn.Sequential(*layers)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, checkpoint=checkpoint)
    here = pymoe.Pipe(model, 2 * world, checkpoint, balance=[len(model) // len(pipe)] * len(pipe))
    worst = 0.0
    torch.manual_seed(7)
    states = [torch.get_rng_state(), torch.get_rng_state()]
    for x, y in batches(3, [4 * world + 1]):
        torch.set_rng_state(states[0])
        here.step(x, target=y, loss_fn=F.mse_loss)
        states[0] = torch.get_rng_state()
        torch.set_rng_state(states[1])
        run(schedule, stages, (x,), target=y)
        states[1] = torch.get_rng_state()
        worst = max(worst, compare(model, pipe, stages))
    return {"worst": worst, "alike": torch.equal(*states)}


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@some_schedules
def test_random_numbers_are_those_of_a_pipe_in_one_process(ranks, schedule, checkpoint):
    for found in ranks(2).run(random_numbers, name=schedule, checkpoint=checkpoint):
        assert found["worst"] <= EXACT
        assert found["alike"]


def random_forwards(rank, world, name, drawing):
    """Return the largest differences of the outputs of forward-only steps from those of an equally seeded pipe in one
    process, whether the generator ends in the same state, and whether it has advanced.
    """
    torch.manual_seed(0)
    count = stages_of(name, world)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4 if n == drawing else 0.0)) for n in range(count)]
    model = nn.Sequential(*layers)
    for number, layer in enumerate(layers):
        layer.train(number == drawing)
    here = pymoe.Pipe(copy.deepcopy(model), 2 * world, "never", balance=[1] * count)
    _, schedule, stages = parallel(model, name, rank, world, 2 * world, loss_fn=None)
    torch.manual_seed(7)
    states = [torch.get_rng_state()] * 2
    worst = 0.0
    with torch.no_grad():
        for x, _ in batches(3, [4 * world]):
            torch.set_rng_state(states[0])
            expected = here(x)
            states[0] = torch.get_rng_state()
            torch.set_rng_state(states[1])
            output, _ = run(schedule, stages, (x,))
            states[1] = torch.get_rng_state()
            if output is not None:
                worst = max(worst, (output - expected).abs().max().item())
    begin = torch.Generator().manual_seed(7).get_state()
    return {"worst": worst, "alike": torch.equal(*states), "advanced": not torch.equal(states[1], begin)}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_forward_only_steps_draw_as_a_pipe_in_one_process(ranks, schedule, world):
    """The first rank did not learn that a later stage had drawn random numbers: every step had the same dropout masks,
    and generators of equally seeded ranks differed afterwards.
    """
    for drawing in range(-1, stages_of(schedule, world)):
        for found in ranks(world).run(random_forwards, name=schedule, drawing=drawing):
            assert found == {"worst": 0.0, "alike": True, "advanced": drawing >= 0}


def evaluation(rank, world, name):
    """Return outputs of evaluation between training steps, and whether evaluation leaves gradients unchanged."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    worst, first, last = 0.0, rank == 0, any(stage.is_last for stage in stages)
    for x, y in batches(3, [4 * world, 4 * world + 3]):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
        before = {n: g.clone() for n, g in own_gradients(pipe, stages).items()}
        with torch.no_grad():
            expected = model(x)
        output = schedule.eval(*((x,) if first else ()), target=y if last else None)
        if output is not None:
            worst = max(worst, (output - expected).abs().max().item(), float(output.requires_grad))
        worst = max(worst, largest_difference(own_gradients(pipe, stages), before))
    return max(worst, compare(model, pipe, stages))


@every_schedule
def test_evaluation_between_steps_returns_outputs_and_adds_no_gradients(ranks, schedule):
    assert max(ranks(2).run(evaluation, name=schedule)) <= EXACT


def checkpointing(rank, world, name, checkpoint):
    """Return how often layers run in a step, and the gradients."""
    calls: list[int] = []

    def counting(number):  # outside of the layer, whose state recomputations restore
        layer = nn.Linear(WIDTH, WIDTH)
        layer.register_forward_hook(lambda *_: calls.append(number))
        return layer

    model = nn.Sequential(*[nn.Sequential(counting(number)) for number in range(2 * world)])
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, checkpoint=checkpoint)
    (x, y), *_ = batches(1, [4 * world])
    F.mse_loss(model(x), y).backward()
    calls.clear()
    run(schedule, stages, (x,), target=y)
    return {"calls": calls.count(calls[0]), "worst": compare(model, pipe, stages)}


@pytest.mark.parametrize(("checkpoint", "calls"), [("never", 4), ("except_last", 7), ("always", 8)])
@some_schedules
def test_the_checkpointing_of_the_pipe_holds_on_ranks(ranks, schedule, checkpoint, calls):
    for found in ranks(2).run(checkpointing, name=schedule, checkpoint=checkpoint):
        assert found["calls"] == calls
        assert found["worst"] <= EXACT


def buffers(rank, world):
    """Return the keys of state_dict before and after a step."""
    model = linear_model(world)
    model[0].register_buffer("kept", torch.ones(2))
    model[-1].register_buffer("not_kept", torch.ones(2), persistent=False)
    pipe, schedule, stages = parallel(model, "ScheduleGPipe", rank, world, world)
    (x, y), *_ = batches(1, [4 * world])
    run(schedule, stages, (x,), target=y)
    return [sorted(pipe.state_dict()), sorted(model.state_dict())]


def test_buffers_stay_as_persistent_as_they_were(ranks):
    for mine, plain in ranks(2).run(buffers):
        assert mine == plain


def wrong_stage(rank, world):
    """Return the error for a stage that does not exist."""
    pipe = pymoe.Pipe(linear_model(world), balance=[world, world])
    said = []
    for index in (-1, 2, True, "0"):
        try:
            pipe.build_stage(index, CPU)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_stage_that_is_not_there_is_refused(ranks):
    for said in ranks(2).run(wrong_stage):
        assert len(said) == 4
        assert all("stages 0 to 1" in text for text in said)
