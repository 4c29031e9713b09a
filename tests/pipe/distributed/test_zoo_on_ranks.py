"""Every model of the zoo trains on several processes as it does on one: losses, gradients, parameters and buffers."""

import pathlib
import sys

import pytest
import torch
from torch.utils import _pytree
from training import EXACT, largest_difference, make, own_gradients, run

import pymoe
from pymoe.nn import update_expert_biases

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "traced"))

from model_zoo import CASES
from test_model_zoo import CHUNKS, STEPS, gradients, plain_step, sgd, tensors

ROWS = (7, 5, 8)

# Their norms compute in float32. Ranks weight a micro-batch's gradients after its backward pass, when the number of
# rows is known. So float32 rounds differently than with a loss that is weighted before.
SINGLE = {"Llama": 1e-6, "Mixtral": 1e-6}


def train(rank, world, name):
    """Return the largest differences from the model on one process: losses, gradients, and final state."""
    case = CASES[name]
    model, plain = case.build(), case.build()
    schedule_name, splits = "Schedule1F1B", case.splits
    if case.stages == 2 * world:
        schedule_name = "ScheduleInterleaved1F1B"
    else:
        splits = dict(list(splits.items())[: world - 1 - case.marks])
    (example,) = case.batches(1, (3,), seed=7)
    spec = {module: pymoe.SplitPoint[place] for module, place in splits.items()}
    pipe = pymoe.pipeline(model, example.args, example.kwargs, split_spec=spec or None, **case.options)
    target = None

    def loss_of(output, rows):
        return case.loss(output, _pytree.tree_map(lambda tensor: tensor[rows], target))

    schedule, stages = make(schedule_name, pipe, rank, world, CHUNKS, loss_of)
    own = {id(p) for stage in stages for p in stage.submod.parameters()}
    optimizers = torch.optim.SGD([p for p in model.parameters() if id(p) in own], lr=0.05, momentum=0.9), sgd(plain)
    worst = {"losses": 0.0, "gradients": 0.0, "state": 0.0}
    for number, batch in enumerate(case.batches(STEPS, ROWS)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain_step(case, plain, batch, number)
        torch.manual_seed(number)
        target = batch.target
        leaves = _pytree.tree_leaves((batch.args, batch.kwargs))
        count = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        _, losses = run(schedule, stages, batch.args, batch.kwargs, target=torch.arange(count), return_outputs=False)
        if losses is not None and len(losses) == len(expected):
            worst["losses"] = max(worst["losses"], (torch.stack(losses) - expected).abs().max().item())
        worst["gradients"] = max(worst["gradients"], largest_difference(own_gradients(pipe, stages), gradients(plain)))
        for optimizer, one in zip(optimizers, (model, plain), strict=True):
            optimizer.step()
            update_expert_biases(one)
    mine = {id(t) for stage in stages for t in (*stage.submod.parameters(), *stage.submod.buffers())}
    found = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers()) if id(t) in mine}
    worst["state"] = largest_difference(found, tensors(plain))
    return worst


@pytest.mark.slow
@pytest.mark.thinned(deep=6)
@pytest.mark.parametrize("name", CASES)
def test_training_on_ranks_equals_that_of_the_model(ranks, name):
    world = 3 if CASES[name].marks or CASES[name].parts else 2
    for worst in ranks(world).run(train, name=name):
        assert max(worst.values()) <= SINGLE.get(name, EXACT), worst
