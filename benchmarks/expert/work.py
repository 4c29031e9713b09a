"""Runs in the two processes: times forward and backward steps of all systems, in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.comparison import relative_error, verdict
from benchmarks.expert.torch_peer import TorchExpertParallel
from pymoe import ep
from pymoe.ep import exchange
from pymoe.nn import MoE

ALONE, PEER, PEER_MOVES = "one process", "torch", "torch, pymoe's products"
OURS: dict[str, dict[str, Any]] = {
    "pymoe, EP 1": {},
    "pymoe, EP 2": {},
    "pymoe, EP 2, 2 chunks": {"chunks": 2},
    "pymoe, EP 2, 4 chunks": {"chunks": 4},
    "pymoe, EP 2, deduplicated": {"deduplicate": True},
    "pymoe, EP 2, padded": {"transport": "padded"},
}
ROOM = 1.5
"""The capacity of a rank with padded buffers, as a multiple of the rows it receives under an even load."""
SYSTEMS = (ALONE, *OURS, PEER, PEER_MOVES)
ON_ONE_RANK = (ALONE, "pymoe, EP 1")


@dataclass(frozen=True)
class Cell:
    """A layer to measure, and the number of tokens on both ranks together."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, F {self.ffn}, E {self.experts}, K {self.top_k}"

    def layer(self) -> MoE:
        """Return the whole layer, the same in every process."""
        torch.manual_seed(0)
        return MoE(self.hidden, self.ffn, self.experts, self.top_k, dtype=torch.float32)

    def rows(self) -> Tensor:
        """Return the rows of all tokens."""
        return torch.randn(self.tokens, self.hidden, generator=torch.Generator().manual_seed(1))


class Bytes:
    """Counts the bytes that this process sends to the other one, separately for rows and for everything else."""

    def __init__(self) -> None:
        self.sent = 0
        self._real = dist.all_to_all_single
        dist.all_to_all_single = self._counted

    def _counted(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int], **options: Any) -> Any:
        if len(sent) > 1:
            row = rows.shape[1] * rows.element_size()
            self.sent += row * (sum(sent) - sent[dist.get_rank()])
        return self._real(out, rows, received, sent, **options)


class Waits:
    """Counts the seconds that this process waits for others in the layer's exchanges of rows and of counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in ((exchange.AllToAll, "wait"), (exchange.CountExchange, "read")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def rank_main(rank: int, folder: str, cells: list[Cell], rounds: int) -> None:
    """Measure all cells; rank 0 writes the results of both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    waits, traffic = Waits(), Bytes()
    found = [measure(rank, cell, rounds, waits, traffic) for cell in cells]
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    leave()


def leave() -> None:
    """End this process, after the other one is done, without shutting down the interpreter.

    Shutting down sometimes aborts while the threads of the run's many process groups are alive.
    """
    dist.barrier()
    os._exit(0)


def measure(rank: int, cell: Cell, rounds: int, waits: Waits, traffic: Bytes) -> dict[str, Any]:
    """Measure one cell; return for each system its times, the bytes that it sends, and the verdict on its results.

    The times of a round are wall seconds, processor seconds of all ranks, seconds spent waiting in exchanges, and
    processor seconds of gloo's threads, which are included in the processor seconds.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    alone = dist.new_group([rank], use_local_synchronization=True)
    layers: dict[str, nn.Module] = {ALONE: cell.layer()}
    for name, options in OURS.items():
        if options.get("transport") == "padded":
            options = options | {"room": int(ROOM * cell.tokens // 2 * cell.top_k)}
        layers[name] = ep.shard(cell.layer(), alone if name in ON_ONE_RANK else everyone, **options)
    layers |= {
        name: TorchExpertParallel(cell.layer(), everyone, kind)
        for name, kind in ((PEER, "torch"), (PEER_MOVES, "pymoe"))
    }
    all_rows = cell.rows()
    own_rows = all_rows.chunk(2)[rank]
    times: dict[str, list[list[float]]] = {name: [] for name in SYSTEMS}
    results: dict[str, tuple[Tensor, Tensor]] = {}
    sent: dict[str, int] = {}
    for number in range(rounds + 1):  # the first round warms up
        for name in SYSTEMS[:: -1 if number % 2 else 1]:
            works = name not in ON_ONE_RANK or rank == 0
            rows = all_rows if name in ON_ONE_RANK else own_rows
            traffic.sent = 0
            seconds, result = step(layers[name], rows, waits) if works else (None, None)
            sent[name] = traffic.sent
            both: list[Any] = [None, None]
            dist.all_gather_object(both, seconds)
            if result is not None:
                results[name] = result
            if number:
                there = [one for one in both if one is not None]
                wall, processors, waited, transport = zip(*there, strict=True)
                times[name].append([max(wall), sum(processors), max(waited), sum(transport)])
    return {"cell": str(cell), "times": times, "sent": sent, "verdicts": verdicts(rank, results)}


def step(layer: nn.Module, rows: Tensor, waits: Waits) -> tuple[tuple[float, ...], tuple[Tensor, Tensor]]:
    """Run forward and backward; return this process's seconds (see :func:`measure`), the output and the input
    gradient.
    """
    x = rows.detach().clone().requires_grad_()
    direction = torch.ones_like(x)
    for parameter in layer.parameters():
        parameter.grad = None
    if not isinstance(layer, MoE) or isinstance(layer, ep.ShardedMoE):
        dist.barrier(getattr(getattr(layer, "sharding", None), "group", None))
    waits.seconds = 0.0
    wall, processor, thread = time.perf_counter(), time.process_time(), time.thread_time()
    y = layer(x)
    y.backward(direction)
    processor = time.process_time() - processor
    transport = processor - (time.thread_time() - thread)  # only gloo's threads compute besides this one
    spent = (time.perf_counter() - wall, processor, waits.seconds, transport)
    assert x.grad is not None
    return spent, (y.detach(), x.grad)


def verdicts(rank: int, results: dict[str, tuple[Tensor, Tensor]]) -> dict[str, str]:
    """Return the verdicts on outputs and input gradients of rank 0's tokens, compared with the results of EP 1."""
    if rank:
        return {}
    count = results["pymoe, EP 2"][0].shape[0]
    expected = [tensor[:count] for tensor in results["pymoe, EP 1"]]
    said = {}
    for name, found in results.items():
        pairs = [(tensor[:count], other) for tensor, other in zip(found, expected, strict=True)]
        said[name] = verdict(max(relative_error(a, b) for a, b in pairs), 1e-5)
    return said
