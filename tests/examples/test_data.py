"""Tests of the windows in examples/common.py, the bytes that a step reads."""

from __future__ import annotations

import pytest
import torch
from common import Batches, validation_windows


@pytest.mark.parametrize("length", [9 * 16, 1000, 1007])
def test_an_epoch_reads_every_window_once(length: int) -> None:
    data = torch.arange(length)
    batches = Batches(data, context=16, batch_size=1, seed=3)
    for epoch in range(4):
        first = epoch * batches.windows_per_epoch
        starts = [int(batches.batch(first + step)[0][0, 0]) for step in range(batches.windows_per_epoch)]
        offset = min(starts)
        assert 0 <= offset < 16
        assert sorted(starts) == [offset + 16 * index for index in range(batches.windows_per_epoch)]
        assert starts != sorted(starts)
        assert max(starts) + 16 < length


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    data = torch.arange(2000)
    forward, backward, other = (Batches(data, context=16, batch_size=4, seed=seed) for seed in (0, 0, 1))
    steps = [forward.batch(step) for step in range(70)]
    for step in reversed(range(70)):
        inputs, targets = backward.batch(step)
        assert inputs.equal(steps[step][0])
        assert targets.equal(inputs + 1)
    assert not other.batch(0)[0].equal(steps[0][0])


def test_validation_predicts_each_byte_once() -> None:
    inputs, targets = validation_windows(torch.arange(100), context=16)
    assert inputs.shape == targets.shape == (6, 16)
    assert targets.flatten().tolist() == list(range(1, 97))
    assert inputs.equal(targets - 1)
