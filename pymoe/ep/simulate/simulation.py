"""A simulation from its inputs to its figures: one mixture layer, one step, one group of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pymoe.ep.simulate.alternatives import Alternative, alternatives, clones_bytes, expert_parallel_bytes
from pymoe.ep.simulate.balance import BALANCES, Balance, balance, plans, spreads
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.checks import at_least, choice, not_negative
from pymoe.ep.simulate.gates import Load
from pymoe.ep.simulate.machine import Machine, Network
from pymoe.ep.simulate.memory import (
    Memory,
    data_parallel,
    expert_parallel,
    fully_sharded,
    optimizer_bytes_of,
)
from pymoe.ep.simulate.step import Cut, Layer
from pymoe.ep.simulate.timeline import PROCESSOR, WIRE, Timeline
from pymoe.ep.simulate.traffic import expected_imbalance, expected_rows

FORMAT = 1
"""Version of the dictionary that :meth:`Simulation.as_dict` returns."""


@dataclass(frozen=True)
class Traffic:
    """Traffic that a rank sends per layer and step, the mean over ranks."""

    deduplicated: bool
    rows: float
    """Rows that one rank sends per exchange, divided by its number of tokens."""
    expected: float | None
    """Same number by the formula for a uniform router; None for other loads and for placed or cloned experts."""
    bytes: float
    """Bytes of the four exchanges."""
    saved: float
    """Bytes that travelling once per rank saves; 0 if each choice is a row."""


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass; seconds are means over the layers and steps of the load."""

    seconds: float
    best: float
    """Least seconds of any run of these parts in this order; see :func:`pymoe.ep.simulate.best_possible`."""
    wire: float
    """Seconds in which the wire is busy."""
    processor: float
    """Seconds in which the processor of the fullest rank is busy."""
    timeline: Timeline
    """Timeline of the layer and step whose time is nearest the mean."""


@dataclass(frozen=True)
class Passes:
    """A forward and a backward pass."""

    deduplicated: bool
    chunks: int
    """Number of parts in which rows travel."""
    rows: float
    """Rows that leave a rank in the exchanges of one direction, divided by its number of tokens."""
    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True)
class Simulation:
    """Result of :func:`simulate`; all times in seconds, all sizes in bytes."""

    layer: Layer
    load: Load
    tokens: int
    """T, the number of tokens per rank and step."""
    balance: Balance
    """Balance to which traffic, times and memory refer."""
    balances: tuple[Balance, ...]
    expected_imbalance: float | None
    """Imbalance by the formula for a uniform router; None if the load is not uniform."""
    traffic: tuple[Traffic, Traffic]
    """Traffic with one row per choice, and with one row per token and destination."""
    passes: tuple[Passes, ...]
    """Passes for every number of chunks, first with one row per choice and then per token and destination."""
    memory: dict[str, Memory]
    """Memory of a rank under ``"EP"``, ``"DP"`` and ``"FSDP"``."""
    alternatives: tuple[Alternative, ...]
    worth: int
    """Least number of rows for which an expert is cloned."""

    @property
    def clones_bytes(self) -> float:
        """Bytes of clones' weights and gradients that a rank sends per layer and step, the mean over ranks."""
        return clones_bytes(self.layer, self.balance)

    @property
    def best(self) -> Passes:
        """Passes that end first."""
        return min(self.passes, key=lambda one: one.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return inputs and figures as a dictionary for JSON; the load is represented by its title."""
        return {
            "format": FORMAT,
            "block": asdict(self.layer.block),
            "ranks": self.layer.ranks,
            "tokens": self.tokens,
            "machine": asdict(self.layer.machine),
            "network": asdict(self.layer.network),
            "load": self.load.title,
            "balance": self.balance.name,
            "worth": self.worth,
            "expected_imbalance": self.expected_imbalance,
            "balances": [asdict(one) for one in self.balances],
            "traffic": [asdict(one) for one in self.traffic],
            "passes": [
                {
                    "deduplicated": one.deduplicated,
                    "chunks": one.chunks,
                    "rows": one.rows,
                    "seconds": one.seconds,
                    **{name: _pass_dict(getattr(one, name)) for name in ("forward", "backward")},
                }
                for one in self.passes
            ],
            "memory": {name: {**asdict(one), "total": one.total} for name, one in self.memory.items()},
            "clones_bytes": self.clones_bytes,
            "alternatives": [asdict(one) for one in self.alternatives],
        }


def simulate(
    block: Block,
    ranks: int,
    tokens: int,
    load: Load,
    machine: Machine,
    network: Network,
    *,
    chunks: Sequence[int] = (1, 2, 4),
    spread: str = "as it is",
    worth: int | None = None,
    optimizer_bytes: float | None = None,
    recompute: bool = False,
) -> Simulation:
    """Simulate expert parallelism: bytes, times, balance, memory, and the costs of other kinds of parallelism.

    Every formula is on the page :doc:`/concepts/expert_parallel_costs`.

    Args:
        block: the mixture layers of a model.
        ranks: R, the number of ranks that share the experts of a layer; at least 1.
        tokens: T, per rank and step; the rows of ``load`` are scaled to them.
        load: the choices of the tokens, with the block's E and K.
        machine: one rank.
        network: the links between the ranks.
        chunks: the numbers of parts in which rows travel, each the same share of every rank's experts. A token that
            travels once to a rank does so in every part in which it has experts there.
        spread: the way to spread experts for traffic, times and memory; one of
            :data:`~pymoe.ep.simulate.balance.BALANCES`, all of which are compared in ``balances``.
        worth: the least number of rows of a clone; None: the number from which a clone saves more time than it costs.
        optimizer_bytes: bytes per parameter for states and master weight; None: the bytes of AdamW.
        recompute: the forward of each layer runs again in the backward (activation checkpointing). It changes only
            the memory.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range, or the load does not fit the block or the ranks.
    """
    at_least("simulate", "ranks", ranks, 1)
    at_least("simulate", "tokens", tokens, 1)
    choice("simulate", "spread", spread, BALANCES)
    if not chunks:
        raise ValueError("simulate: chunks must name at least one number, got none")
    for number in chunks:
        at_least("simulate", "chunks", number, 1)
    if optimizer_bytes is not None:
        not_negative("simulate", "optimizer_bytes", optimizer_bytes)
    if (load.experts, load.top_k) != (block.experts, block.choices):
        raise ValueError(
            f"simulate: load must have E {block.experts} and K {block.choices}, got E {load.experts} and K {load.top_k}"
        )
    if load.tokens < ranks:
        raise ValueError(f"simulate: load must have a token for each of {ranks} ranks, got {load.tokens}")
    layer = Layer(block, ranks, machine, network)
    least = worth_of(layer) if worth is None else worth
    at_least("simulate", "worth", least, 1)
    counted = max(1, round(least * load.tokens / (tokens * ranks)))  # for the tokens of the load
    ways = plans(counted)
    every = tuple(balance(name, plan, load, ranks, tokens) for name, plan in ways.items())
    chosen = every[BALANCES.index(spread)]
    found = tuple(spreads(spread, ways[spread], load, ranks, tokens))
    cuts = {
        (deduplicate, number): [layer.cut(one, tokens, number, deduplicate=deduplicate) for one in found]
        for deduplicate in (False, True)
        for number in chunks
    }
    passes = tuple(_passes(layer, way, tokens, *key) for key, way in cuts.items())
    best = min(passes, key=lambda one: one.seconds)
    states = optimizer_bytes_of(block) if optimizer_bytes is None else optimizer_bytes
    return Simulation(
        layer=layer,
        load=load,
        tokens=tokens,
        balance=chosen,
        balances=every,
        expected_imbalance=expected_imbalance(block, ranks, load.tokens / ranks) if load.uniform else None,
        traffic=_traffic(layer, load, chosen, tokens),
        passes=passes,
        memory={
            "EP": expert_parallel(block, chosen, tokens, states, deduplicate=best.deduplicated, recompute=recompute),
            "DP": data_parallel(block, tokens, states, recompute=recompute),
            "FSDP": fully_sharded(block, ranks, tokens, states, recompute=recompute),
        },
        alternatives=alternatives(layer, chosen, tuple(cuts.values()), tokens, best.rows),
        worth=least,
    )


def worth_of(layer: Layer) -> int:
    """Return the rows from which a clone saves more time than it costs: b flop/s / (3 bandwidth), at least 1.

    Its weights travel there and its gradient travels back, 2 * 3 H F b bytes over the slowest link; each row that the
    fullest rank no longer computes saves 18 H F operations, forward and backward.
    """
    moved = 2 * layer.block.expert_parameters * layer.block.itemsize
    a_row = 6 * layer.block.expert_parameters / layer.machine.flops
    return max(1, round(moved / layer.network.ring_bandwidth(layer.ranks) / a_row))


def _traffic(layer: Layer, load: Load, chosen: Balance, tokens: int) -> tuple[Traffic, Traffic]:
    by_formula = load.uniform and chosen.name == BALANCES[0]
    plain, once = (
        Traffic(
            deduplicated=deduplicate,
            rows=sent / tokens,
            expected=expected_rows(layer.block, layer.ranks, deduplicate) if by_formula else None,
            bytes=expert_parallel_bytes(layer.block, sent),
            saved=1 - sent / chosen.sent if chosen.sent else 0.0,
        )
        for deduplicate, sent in ((False, chosen.sent), (True, chosen.sent_once))
    )
    return plain, once


def _passes(layer: Layer, cuts: Sequence[Cut], tokens: int, deduplicated: bool, chunks: int) -> Passes:
    pairs = [layer.timelines(cut, tokens) for cut in cuts]
    forward, backward = (_mean([pair[way] for pair in pairs]) for way in (0, 1))
    rows = sum(chunk.sent for cut in cuts for chunk in cut.chunks) / len(cuts) / tokens
    return Passes(deduplicated, chunks, rows, forward, backward)


def _mean(timelines: Sequence[Timeline]) -> Pass:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(timelines)

    seconds = mean(one.seconds for one in timelines)
    best, wire = mean(one.best for one in timelines), mean(one.busy(WIRE) for one in timelines)
    processor = mean(one.busy(PROCESSOR) for one in timelines)
    return Pass(seconds, best, wire, processor, min(timelines, key=lambda one: abs(one.seconds - seconds)))


def _pass_dict(found: Pass) -> dict[str, Any]:
    figures = {name: getattr(found, name) for name in ("seconds", "best", "wire", "processor")}
    rank = found.timeline.fullest
    return {**figures, "fullest": rank, "events": [asdict(one) for one in found.timeline.seen_by(rank)]}
