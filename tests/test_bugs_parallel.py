"""Bugs of parallel calls that were met and mended, each with its story."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pymoe.runtime import (
    parallel_workers,
    run_in_background,
)

LONG = 60  # seconds: a guard against hanging


def cast_to_nothing(weight: nn.Linear) -> float:
    """What a zeroed layer answers under autocast: something else than 0 if an old cast of it is found."""
    with torch.no_grad():
        for parameter in weight.parameters():
            parameter.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return float(weight(torch.ones(2, 8)).detach().abs().max())


@pytest.mark.parametrize("helps", [False, True], ids=["on a worker", "on the thread that waits"])
def test_a_background_call_that_outlives_its_autocast_block_leaves_no_casts_behind(helps: bool) -> None:
    """Calls had autocast's flags set without being in a block, so nobody cleared the cache of casts at their end.

    The cache belongs to the process: layers went on with the weights of the step before.
    """
    layer, x, release = nn.Linear(8, 8), torch.randn(6, 8), threading.Event()
    with parallel_workers(1):
        if helps:
            blocker = run_in_background(release.wait, LONG)
            while not blocker.running():
                pass
        with torch.autocast("cpu", dtype=torch.bfloat16):
            future = run_in_background(lambda: (helps or release.wait(LONG), layer(x))[1])
        if not helps:
            release.set()
        assert future.result().dtype == torch.bfloat16
        release.set()
    assert cast_to_nothing(layer) == 0


def test_a_call_in_no_autocast_block_that_is_run_within_one_enters_blocks_of_its_own() -> None:
    """Such a call's own blocks were inner ones of the thread that helped, and ended without clearing the cache."""
    layer, x, release = nn.Linear(8, 8), torch.randn(6, 8), threading.Event()

    def call() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x)
        return cast_to_nothing(layer)

    with parallel_workers(1):
        blocker = run_in_background(release.wait, LONG)
        while not blocker.running():
            pass
        future = run_in_background(call)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert future.result() == 0
            assert torch.autocast_increment_nesting() == 2
            assert torch.autocast_decrement_nesting() == 1
        release.set()
