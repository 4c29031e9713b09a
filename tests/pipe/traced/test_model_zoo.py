"""A traced pipe has the results of the model: outputs, gradients and, after training, parameters and buffers."""

import copy
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from model_zoo import CASES
from torch.utils import _pytree

import pymoe
from pymoe.autograd import random_streams
from pymoe.nn import set_aux_loss_scale, update_expert_biases

TOLERANCE = 1e-12
STEPS = 20
CHUNKS = 3
ROWS = (7, 5, 8, 2)  # uneven micro-batches, and once fewer rows than chunks
SCHEDULES = {"gpipe": "always", "1f1b": "except_last", "interleaved-1f1b": "never", "zero-bubble": "except_last"}
"""Schedules, each with a kind of checkpointing."""


class Step(NamedTuple):
    """The results of a training step."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def tensors(model):
    """Return parameters and buffers, saved or not."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def assert_same(found, expected, what):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        mine = found[name]
        if tensor is None:
            assert mine is None, f"{what}: {name} should have none"
        else:
            assert mine is not None, f"{what}: {name} has none"
            assert mine.dtype == tensor.dtype, f"{what}: {name}"
            error = (mine - tensor).abs().max().item()
            assert error <= TOLERANCE, f"{what}: {name} differs by {error}"


def assert_same_output(found, expected):
    mine, structure = _pytree.tree_flatten(found)
    theirs, expected_structure = _pytree.tree_flatten(expected)
    assert structure == expected_structure
    assert type(found) is type(expected)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)
        else:
            assert a == b


def cut(batch, chunks):
    """Cut a mini-batch into micro-batches, each with its share of the rows."""
    leaves, structure = _pytree.tree_flatten(tuple(batch))
    rows = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    chunks = min(chunks, rows)
    split = [leaf.tensor_split(chunks) if isinstance(leaf, torch.Tensor) else [leaf] * chunks for leaf in leaves]
    for number in range(chunks):
        part = type(batch)(*_pytree.tree_unflatten([leaf[number] for leaf in split], structure))
        own = next(len(leaf[number]) for leaf in split if isinstance(leaf[number], torch.Tensor))
        yield part, own / rows


def plain_step(case, model, batch, seed):
    """Run a step of the plain model, leaving gradients: of the whole mini-batch if rows are independent, otherwise by
    micro-batches.
    """
    losses = []
    random_streams.install()
    torch.manual_seed(seed)
    source = random_streams.RandomSource()
    for index, (part, share) in enumerate(cut(batch, CHUNKS if case.rows_meet else 1)):
        set_aux_loss_scale(model, share)
        if case.parts is None:
            output = part(model)
        else:
            (output,) = part.args
            stages = case.parts(model)
            for number, stage in enumerate(stages):
                stream = source.stream(index * len(stages) + number)
                output = random_streams.with_stream(stream, stage, output)
        loss = case.loss(output, part.target)
        (loss * share).backward()
        losses.append(loss.detach())
    set_aux_loss_scale(model, 1.0)
    return torch.stack(losses)


@functools.cache
def expected(name):
    """Return the results of every training step of the unsplit model, and the final state."""
    case = CASES[name]
    model = case.build()
    optimizer = sgd(model)
    steps = []
    for number, batch in enumerate(case.batches(STEPS, ROWS)):
        optimizer.zero_grad()
        losses = plain_step(case, model, batch, number)
        steps.append(Step(losses, gradients(model)))
        optimizer.step()
        update_expert_biases(model)
    return steps, tensors(model)


@functools.cache
def captured(name):
    """Return the pipe, its model, and the model's earlier state."""
    case = CASES[name]
    model = case.build()
    before = copy.deepcopy(tensors(model))
    (example,) = case.batches(1, (3,), seed=7)
    spec = {module: pymoe.SplitPoint[place] for module, place in case.splits.items()}
    pipe = pymoe.pipeline(model, example.args, example.kwargs, split_spec=spec or None, chunks=CHUNKS, **case.options)
    return pipe, model, before


def fresh(name):
    """Return the pipe, with its model in the initial state."""
    pipe, model, before = captured(name)
    pipe.train()
    pipe.zero_grad()
    pipe.checkpoint = "except_last"
    with torch.no_grad():
        for tensor, old in zip(tensors(model).values(), before.values(), strict=True):
            tensor.copy_(old)
    return pipe, model


@pytest.mark.thinned(usual=3, deep=22)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_that_of_the_model(name, schedule):
    case = CASES[name]
    pipe, model = fresh(name)
    pipe.checkpoint = SCHEDULES[schedule]
    steps, trained = expected(name)
    optimizer = sgd(pipe)
    for number, batch in enumerate(case.batches(STEPS, ROWS)):
        optimizer.zero_grad()
        torch.manual_seed(number)
        losses = pipe.step(*batch.args, **batch.kwargs, target=batch.target, loss_fn=case.loss, schedule=schedule)
        assert len(losses) == len(list(cut(batch, CHUNKS)))
        if not case.rows_meet:
            losses = sum(loss * share for loss, (_, share) in zip(losses, cut(batch, CHUNKS), strict=True)).view(1)
        torch.testing.assert_close(losses, steps[number].losses, rtol=0, atol=TOLERANCE)
        assert_same(gradients(model), steps[number].gradients, f"gradients of step {number}")
        optimizer.step()
        update_expert_biases(model)
    assert_same(tensors(model), trained, "after training")


@pytest.mark.thinned(usual=3)
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_model(name):
    case = CASES[name]
    pipe, _ = fresh(name)
    plain = case.build()
    for training, batch in itertools.product((False, True), case.batches(2, (7, 2), seed=3)):
        pipe.train(training)
        plain.train(training)
        if training and case.rows_meet:
            continue
        with torch.no_grad():
            assert_same_output(batch(pipe), batch(plain))


@pytest.mark.thinned(usual=4, deep=19)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_outside_of_the_pipe_leaves_the_models_gradients(name, checkpoint):
    case = CASES[name]
    pipe, model = fresh(name)
    pipe.checkpoint = checkpoint
    plain = case.build()
    (batch,) = case.batches(1, (7,), seed=4)
    torch.manual_seed(0)
    case.loss(batch(pipe), batch.target).backward()
    plain_step(case, plain, batch, 0)
    assert_same(gradients(model), gradients(plain), "gradients")
    assert_same(tensors(model), tensors(plain), "what forward leaves")


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize("name", CASES)
def test_the_pipe_has_the_models_parameters_and_keys_and_leaves_it_as_it_is(name):
    case = CASES[name]
    pipe, model = fresh(name)
    plain = case.build()
    assert pipe.num_stages == case.stages
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.eval()
    plain.eval()
    (batch,) = case.batches(1, (4,), seed=5)
    assert_same_output(batch(model), batch(plain))
    for number in range(pipe.num_stages):
        assert any(True for _ in pipe.get_stage_module(number).parameters()), f"stage {number} is empty"
