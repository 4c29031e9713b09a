"""Stages that share layers: who takes turns, and who need not."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pymoe.nn import MoE
from pymoe.pipe.execution.shared_layers import serialize_shared_layers


class Table(nn.Module):
    """A layer with a buffer that forwards read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3))


class Counted(Table):
    """One whose forwards write to it."""

    def forward(self, x):
        self.table.add_(1)
        return x


def two_stages(layer, run):
    """Functions of two stages that have the layer, each of which calls ``run``."""
    parts = [nn.Sequential(layer), nn.Sequential(nn.Linear(3, 3), layer)]
    return serialize_shared_layers([run, run], parts)


def at_the_same_time(functions):
    with ThreadPoolExecutor(2) as pool:
        return [
            future.result() for future in [pool.submit(function, number) for number, function in enumerate(functions)]
        ]


@pytest.mark.parametrize("training", [True, False])
def test_a_table_that_stages_share_does_not_keep_them_from_each_other(training):
    meeting = threading.Barrier(2)
    do_meet = []
    layer = Table().train(training)
    functions = two_stages(layer, lambda value: [value] if not do_meet else [meeting.wait(300)])
    assert [function(0) for function in functions] == [[0], [0]]
    do_meet.append(True)
    assert sorted(at_the_same_time(functions)) == [[0], [1]]


@pytest.mark.parametrize(
    "layer", [Counted(), nn.BatchNorm1d(3), MoE(3, 3, 2, 1)], ids=lambda layer: type(layer).__name__
)
def test_stages_that_share_a_layer_that_is_written_to_take_turns(layer):
    inside, most = [], []

    def run(value):
        inside.append(value)
        layer(torch.ones(2, 3))
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()
        return [value]

    functions = two_stages(layer, run)
    for _ in range(3):
        at_the_same_time(functions)
    assert most == [1] * 6


def test_layers_of_one_stage_take_no_turns():
    functions = [lambda value: [value], lambda value: [value]]
    parts = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), nn.Sequential(nn.BatchNorm1d(3))]
    assert serialize_shared_layers(functions, parts) == functions


def test_a_parameter_that_stages_share_needs_no_turns():
    layer = nn.Linear(3, 3)
    functions = [lambda value: [value], lambda value: [value]]
    assert serialize_shared_layers(functions, [nn.Sequential(layer), nn.Sequential(layer)]) == functions
