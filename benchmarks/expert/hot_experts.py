"""Measures a skewed load on two processes: with experts as they are, with clones, and with experts moved."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.expert.work import Cell, leave
from pymoe import ep
from pymoe.ep.placement import place

AS_IT_IS = "as it is"
WAYS = {AS_IT_IS: 0, "1 clone a rank": 1, "2 clones a rank": 2, "placed": 0}
SKEW = 0.3
"""The logit of the i-th expert is lowered by SKEW * log(i), which sends 80 % of the rows to the experts of the
first rank.
"""


def rank_main(rank: int, folder: str, cell: Cell, rounds: int) -> None:
    """Measure all ways in turn; rank 0 writes the rounds and both ranks' rows for each way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_hot", rank=rank, world_size=2)
    everyone = dist.group.WORLD
    assert everyone is not None
    rows = cell.rows().chunk(2)[rank]
    rows[:, 0] = 1.0
    layers: dict[str, Any] = {}
    for name, clones in WAYS.items():
        layer = cell.layer()
        with torch.no_grad():
            layer.router.weight[:, 0] = -SKEW * torch.arange(1.0, cell.experts + 1).log()
        layers[name] = ep.shard(layer, everyone, clones=clones)
    with torch.no_grad():
        layers["placed"](rows)
    ep.redistribute(layers["placed"], place(torch.tensor(layers["placed"].last_loads).sum(0), 2))
    times: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for number in range(rounds + 1):  # the first round warms up
        for name in list(WAYS)[:: -1 if number % 2 else 1]:
            seconds, results[name] = step(layers[name], rows)
            both: list[Any] = [None, None]
            dist.all_gather_object(both, seconds)
            if number:
                wall, processors = zip(*both, strict=True)
                times[name].append([max(wall), max(processors), sum(processors)])
    expected = results[AS_IT_IS]
    found = {
        name: {
            "times": times[name],
            "rows": layers[name].last_rows,
            "exact": all(torch.equal(a, b) for a, b in zip(results[name], expected, strict=True)),
        }
        for name in WAYS
    }
    if rank == 0:
        (Path(folder) / "hot.json").write_text(json.dumps(found))
    leave()


def step(layer: Any, rows: Tensor) -> tuple[tuple[float, float], tuple[Tensor, Tensor]]:
    """Run forward and backward; return wall seconds, this process's processor seconds, the output and the input
    gradient.
    """
    x = rows.detach().clone().requires_grad_()
    direction = torch.ones_like(x)
    for parameter in layer.parameters():
        parameter.grad = None
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    y = layer(x)
    y.backward(direction)
    spent = time.perf_counter() - wall, time.process_time() - processor
    assert x.grad is not None
    return spent, (y.detach(), x.grad)
