"""Stages that share layers: which of them take turns, and which need not."""

import threading

import pytest
import torch
from torch import nn

from pymoe.nn import MoE
from pymoe.pipe.execution.held_state import turns_of
from pymoe.pipe.execution.held_values import HeldLayout


class Table(nn.Module):
    """A layer with a buffer that forwards read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3))


class Counted(Table):
    """A layer whose forwards write to its buffer."""

    def forward(self, x):
        self.table.add_(1)
        return x


def turns_of_two(layer):
    """Return the turns of two stages that have the layer."""
    first, second = turns_of(
        [HeldLayout([("", nn.Sequential(layer))]), HeldLayout([("", nn.Sequential(nn.Tanh(), layer))])]
    )
    assert first is second
    return first


def run(turns, *forwards):
    """Run a step of these forwards; return whether they were asked to come in order."""
    turns.is_ordered = turns.begin_step(())
    for forward in forwards:
        with turns.forward():
            forward()
    return turns.is_ordered


def is_free(turns):
    """Return whether another thread can run a forward of its stage meanwhile."""
    found = []

    def take():
        found.append(turns.lock._lock.acquire(blocking=False))
        if found[0]:
            turns.lock._lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("training", [True, False])
def test_a_table_that_stages_share_does_not_keep_them_from_each_other(training):
    turns = turns_of_two(Table().train(training))
    assert run(turns, int), "nothing is known about it before its first forward"
    found = []
    assert not run(turns, lambda: found.append(is_free(turns)))
    assert found == [True]


@pytest.mark.parametrize("layer", [Counted(), nn.BatchNorm1d(3)], ids=lambda layer: type(layer).__name__)
def test_stages_that_share_a_layer_that_is_written_to_take_turns(layer):
    turns, found = turns_of_two(layer), []

    def forward():
        layer(torch.ones(2, 3))
        found.append(is_free(turns))

    assert [run(turns, forward, forward) for _ in range(3)] == [True] * 3
    assert found == [False] * 6


def test_auxiliary_losses_that_stages_share_are_seen_by_one_at_a_time():
    """While a stage runs, the losses have the weight of its micro-batch."""
    turns, found = turns_of_two(MoE(3, 3, 2, 1)), []
    run(turns, int)
    run(turns, lambda: found.append(is_free(turns)))
    assert found == [False]


def test_whatever_is_changed_between_steps_stages_take_turns_again():
    layer = Table()
    turns = turns_of_two(layer)
    assert [run(turns, int) for _ in range(3)] == [True, False, False]
    layer.table.add_(1)
    assert [run(turns, int) for _ in range(2)] == [True, False]
    layer.anything = 1
    assert [run(turns, int) for _ in range(2)] == [True, False]


def test_layers_of_one_stage_take_no_turns():
    parts = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), nn.Sequential(nn.BatchNorm1d(3))]
    assert turns_of([HeldLayout([("", part)]) for part in parts]) == [None, None]


def test_a_parameter_that_stages_share_needs_no_turns():
    turns = turns_of_two(nn.Linear(3, 3))
    assert not run(turns, int, int)


def test_stages_that_share_nothing_with_each_other_have_turns_of_their_own():
    one, other = Table(), Table()
    first, second, third, fourth, last = turns_of([HeldLayout([("", x)]) for x in (one, other, one, other, Table())])
    assert (first, second, last) == (third, fourth, None)
    assert first.stages == (0, 2)
    assert second.stages == (1, 3)
