"""Measures how much of the time of a slow wire is overlapped with computation, using a simulated wire.

The simulated wire carries the exchanges of a process one after another, at a fixed number of rows per second. It uses
no processor time: an exchange is done at once, and its rows are handed over when the wire would have finished. Experts
sleep for a given time.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.expert.work import leave
from pymoe import ep
from pymoe.ep.exchange import AllToAll
from pymoe.nn import MoE

TOKENS, HIDDEN, EXPERTS, TOP_K = 512, 64, 8, 2


class Wire:
    """Delays the exchanges of this process as a wire would."""

    def __init__(self, seconds_of_all: float) -> None:
        self._cost, self._free = seconds_of_all / (TOKENS * TOP_K), 0.0
        self._due: dict[int, float] = {}
        start, finish = AllToAll._start, AllToAll.wait

        def started(exchange: Any, chunk: int, out: Any, rows: Any, received: Any, sent: Any) -> None:
            start(exchange, chunk, out, rows, received, sent)
            exchange._under_way[chunk][0].wait()
            self._free = max(self._free, time.perf_counter()) + rows.shape[0] * self._cost
            self._due[id(exchange), chunk] = self._free  # type: ignore[index]

        def finished(exchange: Any, chunk: int) -> Any:
            time.sleep(max(0.0, self._due.pop((id(exchange), chunk)) - time.perf_counter()))  # type: ignore[call-overload]
            return finish(exchange, chunk)

        AllToAll._start, AllToAll.wait = started, finished  # type: ignore[method-assign, assignment]


class Sleep(torch.autograd.Function):
    """Sleeps for the given seconds in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, seconds: float) -> torch.Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


def best(wire: float, compute: float, chunks: int) -> float:
    """Return the least seconds in which all chunks can be sent, computed and sent back in this order."""
    arrivals = [wire * (chunk + 1) / chunks for chunk in range(chunks)]
    clock, free = 0.0, wire
    for arrival in arrivals:
        clock = max(clock, arrival) + compute / chunks
        free = max(free, clock) + wire / chunks
    return free


def rank_main(rank: int, folder: str, chunks: tuple[int, ...], wire: float, compute: float, rounds: int) -> None:
    """Measure each number of chunks; rank 0 writes the slower rank's median seconds of forward and of backward."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_wire", rank=rank, world_size=2)
    Wire(wire)
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for count in chunks:
        torch.manual_seed(0)
        layer: Any = ep.shard(MoE(HIDDEN, 64, EXPERTS, TOP_K), group, chunks=count)
        real = layer.experts._apply_to_chunk
        layer.experts._apply_to_chunk = lambda *args, real=real, part=compute / count: Sleep.apply(real(*args), part)
        times = [timed(layer, TOKENS) for _ in range(rounds + 1)][1:]
        both: list[Any] = [None, None]
        dist.all_gather_object(both, [statistics.median(column) for column in zip(*times, strict=True)])
        found[count] = [max(one) for one in zip(*both, strict=True)]
    if rank == 0:
        (Path(folder) / "wire.json").write_text(json.dumps(found))
    leave()


def timed(layer: torch.nn.Module, tokens: int) -> tuple[float, float]:
    """Return seconds of a forward and of a backward pass."""
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    dist.barrier()
    start = time.perf_counter()
    y = layer(x)
    middle = time.perf_counter()
    dist.barrier()
    again = time.perf_counter()
    y.sum().backward()
    return middle - start, time.perf_counter() - again
