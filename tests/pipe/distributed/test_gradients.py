"""Pipelines over processes have the model's gradients, under torch's schedules."""

import copy

import pytest
import torch
import torch.distributed as dist
from pipe_models import WIDTH, batches, sgd
from torch import nn
from torch.nn import functional as F
from training import (
    EXACT,
    compare,
    every_schedule,
    linear_model,
    make,
    own_gradients,
    parallel,
    run,
    some_schedules,
    stages_of,
    steps,
)

import pymoe
from pymoe.nn import MoE
from pymoe.pipe.distributed import watching


def on_one_rank(rank, world):
    """Run a whole pipe on every rank, each rank in its own group."""
    groups = [dist.new_group([one]) for one in range(world)]
    return steps(0, 1, "ScheduleInterleaved1F1B", micro_batches=4, count=3, group=groups[rank])


def test_all_stages_can_be_on_one_rank(ranks):
    for worst in ranks(2).run(on_one_rank):
        assert max(worst.values()) <= EXACT


def accumulation(rank, world, name, rows, **options):
    """Return the gradients of several steps and the gradients of the unsplit model."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, **options)
    for x, y in batches(len(rows), rows):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


@every_schedule
def test_gradients_of_several_steps_add_up(ranks, schedule):
    assert max(ranks(2).run(accumulation, name=schedule, rows=[8, 8, 8])) <= EXACT


@every_schedule
def test_uneven_micro_batches_count_by_their_rows(ranks, schedule):
    assert max(ranks(2).run(accumulation, name=schedule, rows=[7])) <= EXACT
    assert max(ranks(2).run(accumulation, name=schedule, rows=[7, 9, 10])) <= EXACT


def sums(rank, world, name):
    """Test losses that are sums, with uneven micro-batches."""
    model = linear_model(world)
    loss = nn.MSELoss(reduction="sum")
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, loss_fn=loss, scale_grads=False)
    for x, y in batches(2, [4 * world - 1]):
        loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


@some_schedules
def test_losses_that_are_sums_are_summed(ranks, schedule):
    assert max(ranks(2).run(sums, name=schedule)) <= EXACT


def padded_batch(world):
    x, _ = next(batches(1, [4 * world - 1]))
    target = torch.arange(len(x)) % WIDTH
    target[1::3] = target[-2:] = -100
    return x, target


def tokens_of_the_whole(rank, world, name):
    """Test sums over targets that are not padding, divided by their number in the whole mini-batch."""
    model = linear_model(world)
    x, target = padded_batch(world)
    tokens = (target != -100).sum()

    def loss(output, target):
        return F.cross_entropy(output, target, reduction="sum") / tokens

    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, loss_fn=loss, scale_grads=False)
    F.cross_entropy(model(x), target).backward()
    run(schedule, stages, (x,), target=target)
    return compare(model, pipe, stages)


@some_schedules
def test_sums_over_tokens_are_divided_by_those_of_the_whole_mini_batch(ranks, schedule):
    assert max(ranks(2).run(tokens_of_the_whole, name=schedule)) <= EXACT


def refused_losses(rank, world):
    """Return the errors for losses that are not means over rows; each runs in a group of only this rank."""
    x, target = padded_batch(world)
    said = []
    for loss in (F.cross_entropy, lambda a, b: F.cross_entropy(a, b, reduction="sum"), lambda a, b: a.mean().sqrt()):
        groups = [dist.new_group([one]) for one in range(world)]
        pipe = pymoe.Pipe(linear_model(2), balance=[2, 2], checkpoint="never")
        schedule, stages = make("ScheduleInterleaved1F1B", pipe, 0, 1, 4, loss, groups[rank])
        try:
            run(schedule, stages, (x,), target=target)
        except ValueError as error:
            said.append(str(error))
        assert all(parameter.grad is None for parameter in pipe.parameters())
    return said


def test_losses_that_are_seen_to_be_no_means_over_rows_are_refused(ranks):
    for of_tokens, of_sum, of_root in ranks(2).run(refused_losses):
        assert "not known as a mean over rows" in of_tokens
        assert "scale_grads=False" in of_tokens
        assert "is a sum" in of_sum
        assert "is the Sqrt" in of_root


def batch_sizes(rank, world, name):
    """Return outputs of one schedule for batches of changing sizes and widths, such as rows of tokens."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for shape in ((16, WIDTH), (8, WIDTH), (33, WIDTH), (9, 3, WIDTH), (7, WIDTH)):
        x, y = torch.randn(2, *shape, generator=generator)
        expected = model(x)
        F.mse_loss(expected, y).backward()
        output, _ = run(schedule, stages, (x,), target=y)
        if output is not None:
            worst = max(worst, (output - expected).abs().max().item())
    return max(worst, compare(model, pipe, stages))


@every_schedule
def test_batch_sizes_may_change_from_step_to_step(ranks, schedule):
    assert max(ranks(2).run(batch_sizes, name=schedule)) <= EXACT


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied(rank, world, name, same_start=True):
    """Return differences of gradients, and all ranks' copies of the shared parameter after some steps."""

    def build(seed):
        torch.manual_seed(seed)
        embedding = nn.Embedding(10, WIDTH)
        middle = [nn.Linear(WIDTH, WIDTH) for _ in range(stages_of(name, world) - 2)]
        return nn.Sequential(embedding, *middle, Tied(embedding))

    model = build(0)
    pipe = pymoe.Pipe(build(0 if same_start else rank), checkpoint="never")
    if not same_start:
        model = copy.deepcopy(pipe)

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule, stages = make(name, pipe, rank, world, 2 * world, loss_fn)
    own = [p for stage in stages for p in stage.submod.parameters()]
    optimizers = sgd(model), torch.optim.SGD(dict.fromkeys(own), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    worst, copies = 0.0, []
    for rows in (12, 11, 13):
        tokens, target = torch.randint(0, 10, (2, rows, 3), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn(model(tokens), target).backward()
        run(schedule, stages, (tokens,), target=target)
        worst = max(worst, compare(model, pipe, stages))
        for optimizer in optimizers:
            optimizer.step()
    if any(stage.is_first or stage.is_last for stage in stages):
        copies = next(pipe.parameters()).detach().flatten().tolist()
    return {"worst": worst, "copy": copies}


@every_schedule
def test_shared_parameters_get_the_gradient_of_all_stages_and_stay_equal(ranks, schedule):
    found = ranks(3).run(tied, name=schedule)
    assert max(rank["worst"] for rank in found) <= EXACT
    copies = [rank["copy"] for rank in found if rank["copy"]]
    assert len(copies) == 2
    assert copies[0] == copies[1]


def test_copies_of_shared_parameters_become_those_of_the_first_stage(ranks):
    first, _, last = ranks(3).run(tied, name="ScheduleGPipe", same_start=False)
    assert first["copy"] == last["copy"]


def auxiliary_loss(rank, world, name):
    """Return gradients of a middle layer that injects a loss, with uneven micro-batches."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), *[MoE(8, 12, 4, 2, z_loss_coef=0.1) for _ in range(2 * world - 2)], nn.Linear(8, 8)]
    model = nn.Sequential(*layers).double()
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4 * world + 3, 8, generator=generator)
    F.mse_loss(model(x), y).backward()
    without = own_gradients(pipe, stages)
    run(schedule, stages, (x,), target=y)
    return {"worst": compare(model, pipe, stages), "parameters": len(without)}


@every_schedule
def test_auxiliary_losses_of_middle_stages_reach_their_parameters(ranks, schedule):
    for found in ranks(2).run(auxiliary_loss, name=schedule):
        assert found["worst"] <= EXACT


def loss_with_parameters(rank, world, name):
    """Return gradients of a loss that has parameters, and the losses."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

        def forward(self, output, target):
            return F.mse_loss(output * self.weight, target)

    model, loss, twin = linear_model(world), Loss(), Loss()
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, loss_fn=twin)
    (x, y), *_ = batches(1, [4 * world + 1])
    loss(model(x), y).backward()
    _, losses = run(schedule, stages, (x,), target=y)
    worst = compare(model, pipe, stages)
    if losses is not None:
        worst = max(worst, (twin.weight.grad - loss.weight.grad).abs().max().item())
        parts = zip(x.tensor_split(2 * world), y.tensor_split(2 * world), strict=True)
        expected = torch.stack([loss(model(a), b).detach() for a, b in parts])
        worst = max(worst, (torch.stack(losses) - expected).abs().max().item())
    return worst


@some_schedules
def test_a_loss_with_parameters_gets_gradients(ranks, schedule):
    assert max(ranks(2).run(loss_with_parameters, name=schedule)) <= EXACT


def compiled(rank, world, name):
    """Return gradients with compiled layers."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    for stage in stages:
        for layer in stage.submod:
            layer.compile(backend="aot_eager")
    for x, y in batches(2, [4 * world]):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
def test_layers_may_be_compiled(ranks, schedule):
    assert max(ranks(2).run(compiled, name=schedule)) <= EXACT


def replicas(rank, world, name):
    """Run a whole pipe on every rank, each with half of the batch; DistributedDataParallel averages their gradients."""
    groups = [dist.new_group([one]) for one in range(world)]
    model = linear_model(world)
    pipe = pymoe.Pipe(copy.deepcopy(model), balance=[2, 2], checkpoint="never")
    schedule, stages = make(name, pipe, 0, 1, 4, F.mse_loss, group=groups[rank])
    for stage in stages:
        stage.submod = nn.parallel.DistributedDataParallel(stage.submod)
    worst = 0.0
    for x, y in batches(3, [8 * world]):
        model.zero_grad()
        pipe.zero_grad()
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x.chunk(world)[rank],), target=y.chunk(world)[rank])
        worst = max(worst, compare(model, pipe, stages))
    return worst


def test_replicas_of_a_pipe_are_averaged_by_distributed_data_parallel(ranks):
    assert max(ranks(2).run(replicas, name="ScheduleInterleaved1F1B")) <= EXACT
    assert max(ranks(2).run(replicas, name="ScheduleInterleavedZeroBubble")) <= EXACT


def two_schedules(rank, world):
    """Use the same stages with schedules of different numbers of micro-batches in turn."""
    model = linear_model(world)
    pipe, first, stages = parallel(model, "ScheduleGPipe", rank, world, world, checkpoint="except_last")
    from torch.distributed.pipelining import Schedule1F1B

    second = Schedule1F1B(stages[0], 3 * world, loss_fn=F.mse_loss)
    for schedule, (x, y) in zip([first, second] * 2, batches(4, [6 * world, 6 * world + 1]), strict=True):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


def test_schedules_can_take_turns_with_the_same_stages(ranks):
    assert max(ranks(2).run(two_schedules)) <= EXACT


def shared_state(rank, world, training):
    """Run a step of a model in which two ranks share a batch norm."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm)
    pipe = pymoe.Pipe(model, balance=[2, 1])
    schedule, stages = make("ScheduleGPipe", pipe, rank, world, 2, lambda output, _: output.mean())
    norm.train(training)
    with watching(dist.group.WORLD):
        run(schedule, stages, (torch.randn(6, WIDTH),), target=torch.zeros(6))


def test_a_layer_that_ranks_share_must_not_write_to_its_state(ranks):
    """Each rank updated the statistics of its own copy, from half of the batches."""
    ranks(2).run(shared_state, training=False)
    said = r"stages 0, 1 share state to which a forward has written \('0.num_batches_tracked'\)"
    with pytest.raises(AssertionError, match=said):
        ranks(2).run(shared_state, training=True)
