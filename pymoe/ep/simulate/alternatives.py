"""Expert parallelism beside data parallelism and FSDP: bytes and seconds a layer and step, and where they cross.

A step of expert parallelism moves rows, so its cost grows with the tokens; the others move weights or gradients, the
same for any number of tokens. Up to some number of tokens a rank and step, expert parallelism is the cheaper one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pymoe.ep.simulate.balance import Balance
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.step import Cut, Layer
from pymoe.ep.simulate.traffic import EXCHANGES

MOST_TOKENS = 1 << 30
"""Beyond so many tokens a rank and step no crossing is looked for."""
ROUNDING = 1 + 1e-9
"""Times that differ by less are equal."""


@dataclass(frozen=True)
class Alternative:
    """Another way to train the layer on the same ranks, and up to where expert parallelism is cheaper."""

    name: str
    bytes: float
    """That a rank sends, a layer and step, whatever the tokens."""
    seconds: float
    """Of a layer and step, forward and backward, with the tokens of the simulation."""
    fewer_bytes_below: float | None
    """Tokens a rank and step up to which expert parallelism sends fewer bytes; None: however many they are."""
    faster_below: float | None
    """Tokens a rank and step up to which expert parallelism is faster; None: however many they are."""


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

    Data parallelism reduces gradients while the backward runs; FSDP gathers weights while the pass before runs, and
    reduces gradients beside the backward: a pass takes the longer of its work and its wire. Of expert parallelism, for
    each number of tokens the best number of chunks counts, and the better way in which rows travel.

    Args:
        layer: block, ranks, machine and network.
        balance: the load under expert parallelism.
        cuts: its layers and steps, for every number of chunks and way in which rows travel.
        tokens: T, a rank and step.
        rows: a token, that leave its rank; of which bytes are counted.
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
    """Return the tokens up to which ``first`` takes no longer than ``second``; None: for ``MOST_TOKENS`` it does not.

    0 if it takes longer for one token. Doubles from one token on and then halves the interval, so of several crossings
    it finds one between neighbouring powers of two, the first such.
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
    """Seconds of a collective around the ring."""
    return 0.0 if layer.ranks == 1 else layer.network.latency + moved / layer.network.ring_bandwidth(layer.ranks)
