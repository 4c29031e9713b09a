"""Expert parallelism compared with data parallelism and FSDP: bytes and seconds per layer and step, and crossings.

A step of expert parallelism moves rows, so its cost grows with the tokens; the alternatives move weights or gradients,
the same for any number of tokens. Up to some number of tokens per rank and step, expert parallelism is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pymoe.ep.simulate.balance import Balance
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.step import Cut, Layer
from pymoe.ep.simulate.traffic import EXCHANGES

MOST_TOKENS = 1 << 30
"""Largest number of tokens per rank and step at which a crossing is looked for."""
ROUNDING = 1 + 1e-9
"""Factor within which two times count as equal."""


@dataclass(frozen=True)
class Alternative:
    """Another way to train the layer on the same ranks, and the number of tokens up to which EP is cheaper."""

    name: str
    bytes: float
    """Bytes that a rank sends per layer and step, for any number of tokens."""
    seconds: float
    """Seconds of a layer and step, forward and backward, with the tokens of the simulation."""
    fewer_bytes_below: float | None
    """Tokens per rank and step up to which expert parallelism sends fewer bytes; None: for any number."""
    faster_below: float | None
    """Tokens per rank and step up to which expert parallelism is faster; None: for any number."""


def data_parallel_bytes(block: Block, ranks: int) -> float:
    """Return 2 (R - 1) / R E 3 H F b: a ring all-reduce of the gradients of all experts."""
    return 2 * (ranks - 1) / ranks * block.experts * block.expert_parameters * block.itemsize


def fully_sharded_bytes(block: Block, ranks: int) -> float:
    """Return 3 (R - 1) / R E 3 H F b: all-gathers of the weights in both passes, a reduce-scatter of the gradients."""
    return 1.5 * data_parallel_bytes(block, ranks)


def expert_parallel_bytes(block: Block, rows: float) -> float:
    """Return 4 rows H b: dispatch and combine, forward and backward, of the rows that leave a rank in an exchange."""
    return EXCHANGES * rows * block.row_bytes


def clones_bytes(layer: Layer, balance: Balance) -> float:
    """Return 2 C / R 3 H F b: the weights of all C clones of a step and their gradients, the mean over ranks."""
    return 2 * balance.clones / layer.ranks * layer.block.expert_parameters * layer.block.itemsize


def alternatives(
    layer: Layer, balance: Balance, cuts: Sequence[Sequence[Cut]], tokens: float, rows: float
) -> tuple[Alternative, Alternative]:
    """Return data parallelism and FSDP.

    Data parallelism reduces gradients while the backward runs. FSDP gathers weights while the previous pass runs, and
    reduces gradients during the backward: a pass takes the longer of its work and its wire. For expert parallelism, the
    best number of chunks and the better way in which rows travel count, for each number of tokens.

    Args:
        layer: block, ranks, machine and network.
        balance: the load under expert parallelism.
        cuts: its layers and steps, for every number of chunks and way in which rows travel.
        tokens: T, per rank and step.
        rows: rows per token that leave its rank; their bytes are counted.
    """
    a_token = expert_parallel_bytes(layer.block, rows)

    def with_experts(number: float) -> float:
        return min(layer.step_seconds(way, number) for way in cuts)

    def alternative(name: str, moved: float, seconds: Callable[[float], float]) -> Alternative:
        crossing = crossing_of(with_experts, seconds)
        fewer = max(0.0, moved - clones_bytes(layer, balance)) / a_token if a_token else None
        return Alternative(name, moved, seconds(tokens), fewer, crossing)

    reduced, sharded = (count(layer.block, layer.ranks) for count in (data_parallel_bytes, fully_sharded_bytes))

    def data_parallel(number: float) -> float:
        forward, backward = (layer.alone_seconds(number, backward=back) for back in (False, True))
        return forward + max(backward, _wire(layer, reduced))

    def fully_sharded(number: float) -> float:
        forward, backward = (layer.alone_seconds(number, backward=back) for back in (False, True))
        return max(forward, _wire(layer, sharded / 3)) + max(backward, 2 * _wire(layer, sharded / 3))

    return alternative("DP", reduced, data_parallel), alternative("FSDP", sharded, fully_sharded)


def crossing_of(first: Callable[[float], float], second: Callable[[float], float]) -> float | None:
    """Return the tokens up to which ``first`` takes no longer than ``second``; None if there is no end.

    The result is 0 if ``first`` takes longer for one token; the search ends at ``MOST_TOKENS``. The search doubles the
    tokens from one on and then halves the interval. If there are several crossings, it finds one between neighbouring
    powers of two, in the first such interval.
    """
    low, high = 0.0, 1.0
    while first(high) <= second(high) * ROUNDING:
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return None
    if low == 0:
        return 0.0
    while high - low > max(0.5, 1e-3 * low):
        middle = (low + high) / 2
        low, high = (middle, high) if first(middle) <= second(middle) * ROUNDING else (low, middle)
    return low


def _wire(layer: Layer, moved: float) -> float:
    """Return the seconds of a collective around the ring."""
    return 0.0 if layer.ranks == 1 else layer.network.latency + moved / layer.network.ring_bandwidth(layer.ranks)
