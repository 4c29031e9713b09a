"""A pipeline of three ranks without a model: messages, and a watch. Its functions run in processes of their own."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pymoe.pipe.distributed import liveness, watchdog
from pymoe.pipe.distributed.liveness import RankError
from pymoe.pipe.distributed.watchdog import FailureDetector, watching

RANKS, MICRO_BATCHES = 3, 4


class Bug(Exception):
    """What a rank raises."""


@dataclass
class Plan:
    """What ranks do."""

    bug: tuple[int, str, int, int] | None = None
    """Rank, phase, micro-batch and step of an error."""
    steps: int = 100_000
    after_bug: str = "ends"
    """What the rank does that has raised: "ends", "lingers", or "goes on" with the next step."""
    is_in_block: bool = True
    """Whether steps are in ``with`` blocks."""
    hosts_differ: bool = False
    """Whether every rank believes to be on a host of its own."""
    patience: float = 30.0
    slow: dict[int, float] | None = None
    """Seconds that ranks sleep at the end of a step."""


def train(rank: int, address: str, results: Any, plan: Plan) -> None:
    """Steps, and reports of them: "step"; at last "done", "raised", "told" or "other"."""
    torch.set_num_threads(1)
    watchdog.GRACE_S = 60.0  # a busy machine takes longer than a pipeline would wait
    if plan.hosts_differ:
        liveness.this_host = lambda: f"host {rank}"
    # Waits would take minutes.
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    watch = watching(patience=plan.patience)
    for step in range(plan.steps):
        try:
            if plan.is_in_block:
                with watch:
                    one_step(watch, rank, step, plan)
            else:
                try:
                    watch.begin()
                    one_step(watch, rank, step, plan)
                    watch.end()
                except RuntimeError as error:  # of messages; bugs are none
                    instead = watch.fail(error)
                    assert instead is not None
                    raise instead from error
        except RankError as error:
            results.send(("told", (error.rank, error.phase, error.stage, error.micro_batch, str(error))))
            break
        except Bug as error:
            results.send(("raised", str(error)))
            if not plan.is_in_block:
                sys.excepthook(*sys.exc_info())  # as when it ends an interpreter
                break
            if plan.after_bug == "lingers":
                time.sleep(1000)
            if plan.after_bug == "ends":
                break
        except BaseException as error:
            results.send(("other", repr(error)))
            break
        else:
            if step < 3:
                results.send(("step", step))
    else:
        results.send(("done", plan.steps))


def one_step(watch: FailureDetector, rank: int, step: int, plan: Plan) -> None:
    """Micro-batches forward and backward."""

    def work(phase: str, micro_batch: int) -> None:
        watch.at(phase, rank, micro_batch)
        if plan.bug == (rank, phase, micro_batch, step):
            raise Bug("the answer is not 42")

    for micro_batch in range(MICRO_BATCHES):
        if rank > 0:
            dist.recv(torch.zeros(3), rank - 1, tag=micro_batch)
        work("forward", micro_batch)
        if rank < RANKS - 1:
            dist.send(torch.zeros(3), rank + 1, tag=micro_batch)
        else:
            work("loss", micro_batch)
    for micro_batch in range(MICRO_BATCHES):
        if rank < RANKS - 1:
            dist.recv(torch.zeros(3), rank + 1, tag=micro_batch)
        work("backward", micro_batch)
        if rank > 0:
            dist.send(torch.zeros(3), rank - 1, tag=micro_batch)
    if plan.slow:
        time.sleep(plan.slow.get(rank, 0.0))
