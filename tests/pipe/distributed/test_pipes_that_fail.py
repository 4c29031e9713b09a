"""Pipes on three ranks whose layers or loss fail: the other ranks raise an error that names rank, place and reason."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import are_told, ranks
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

from pymoe.pipe import Pipe
from pymoe.pipe.distributed import RankError, watchdog, watching

RANKS, MICRO_BATCHES, ROWS = 3, 4, 8
BAD = 100.0  # a value for which a layer fails


class Bug(Exception):
    """Raised by a layer or the loss."""


@dataclass
class Bad:
    """A planted bug, which occurs in the third micro-batch of the third step."""

    phase: str = ""
    """"forward", "backward" or "loss"; "killed": the process ends in the forward."""
    faulty_rank: int = 0
    is_in_block: bool = True


class _Stumble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        ctx.is_bad = is_bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.is_bad:
            raise Bug("the answer is not 42")
        return grad, None


class Layer(nn.Module):
    """A linear layer that fails at the given place, for marked rows."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.phase = phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, 4) to (rows, 4); the last column is the mark."""
        is_bad = bool((x[:, 3] == BAD).any())
        if is_bad and self.phase == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_bad and self.phase == "forward":
            raise Bug("the answer is not 42")
        y = torch.cat([self.linear(x[:, :3]), x[:, 3:]], 1)
        return _Stumble.apply(y, is_bad and self.phase == "backward")


def train(rank: int, address: str, results: Any, **options: Any) -> None:
    """Run steps without end; report "step" for the first three, and "raised", "told" or "other" at the end."""
    bad = Bad(**options)
    torch.set_num_threads(1)
    watchdog.GRACE_S = 60.0  # a busy machine takes longer than a pipeline would wait
    # Waits would take minutes, except for the failure detector.
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    layers = [Layer(bad.phase if stage == bad.faulty_rank else "") for stage in range(RANKS)]
    pipe = Pipe(nn.Sequential(*layers), balance=[1] * RANKS, checkpoint="never")
    step = 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if bad.phase == "loss" and bool((output[:, 3] == BAD).any()):
            raise Bug("the answer is not 42")
        return F.mse_loss(output, target)

    schedule = Schedule1F1B(pipe.build_stage(rank, "cpu"), MICRO_BATCHES, loss_fn=loss_fn)
    try:
        while True:
            x = torch.zeros(ROWS, 4)
            if bad.phase and step == 3:
                x[2 * ROWS // MICRO_BATCHES, 3] = BAD
            inputs, targets = (x,) if rank == 0 else (), {"target": x} if rank == RANKS - 1 else {}
            if bad.is_in_block:
                with watching():
                    schedule.step(*inputs, **targets)
            else:
                schedule.step(*inputs, **targets)
            if step < 3:
                results.send(("step", step))
            step += 1
    except RankError as error:
        results.send(("told", (error.rank, error.phase, error.stage, error.micro_batch, str(error))))
    except Bug as error:
        results.send(("raised", (str(error), "".join(getattr(error, "__notes__", [])))))
        if not bad.is_in_block:
            sys.excepthook(*sys.exc_info())  # as when an exception ends the interpreter
        else:
            time.sleep(1000)  # a program that continues after the error
    except BaseException as error:
        results.send(("other", repr(error)))


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize(("phase", "rank"), [("forward", 1), ("backward", 2), ("backward", 0), ("loss", 2)])
@pytest.mark.parametrize("is_in_block", [True, False])
def test_an_error_of_a_layer_or_of_the_loss_ends_the_other_ranks(phase, rank, is_in_block):
    with ranks(train, RANKS, phase=phase, faulty_rank=rank, is_in_block=is_in_block) as started:
        ends = started.ends(RANKS)
    what, (message, notes) = ends.pop(rank)
    assert (what, message) == ("raised", "the answer is not 42")
    if phase != "loss":
        assert f"rank {rank}, stage {rank}, {phase} of micro-batch 2" in notes
    for told in are_told(ends, rank):
        assert told[:4] == (rank, phase, rank, 2)
        assert "Bug: the answer is not 42" in told[4]


@pytest.mark.parametrize("victim", range(RANKS))
def test_where_a_rank_was_killed_is_told(victim):
    """The store's last heartbeat was up to 0.2 s old, and said "between its steps"."""
    with ranks(train, RANKS, phase="killed", faulty_rank=victim) as started:
        ends = started.ends(RANKS - 1)
    for told in are_told(ends, victim):
        assert told[:4] == (victim, "forward", victim, 2)
        assert f"rank {victim}, last seen in the forward of micro-batch 2 in stage {victim}, has ended" in told[4]


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_killed_rank_ends_the_others(victim):
    with ranks(train, RANKS) as started:
        started.wait_for("step", RANKS)
        started.signal(victim, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    for told in are_told(ends, victim):
        assert told[4].startswith(f"the process of rank {victim}, last seen ")
