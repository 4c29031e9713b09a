"""Seconds of a layer's parts for a block, a machine, a network and a balance: what the timeline is made of."""

from __future__ import annotations

from dataclasses import dataclass

from pymoe.ep.simulate.balance import Balance
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.machine import Machine, Network
from pymoe.ep.simulate.timeline import Phases, Timeline, timeline

HEADER = 8
"""Numbers beside the counts, by which ranks notice that they disagree."""


@dataclass(frozen=True)
class Layer:
    """One layer on ranks of one machine."""

    block: Block
    ranks: int
    machine: Machine
    network: Network

    def counts_seconds(self) -> float:
        """Return the time of an all-gather of every rank's E counts and header, 4 bytes each."""
        received = 4.0 * (self.ranks - 1) * (self.block.experts + HEADER)
        return self.network.latency + received / self.network.ring_bandwidth(self.ranks)

    def phases(self, balance: Balance, tokens: float, *, deduplicate: bool, backward: bool) -> Phases:
        """Return the seconds of a pass with ``tokens`` a rank, which scale those that ``balance`` was made for.

        The backward sends the gradients of the outputs to the experts and those of the inputs back, so it has the
        exchanges of the forward; its products cost twice as much; it knows the counts.
        """
        block, machine = self.block, self.machine
        scale = tokens / balance.tokens
        gathered = scale * (balance.gathered_once if deduplicate else balance.tokens * block.choices)
        wire = 0.0 if self.ranks == 1 else scale * (balance.wire_once if deduplicate else balance.wire)
        rows = scale * balance.rows
        experts = machine.experts_seconds(block, rows, balance.experts, backward)
        if deduplicate:  # rows are copied for each expert where they arrive, and summed there
            experts += 2 * machine.move_seconds(block, rows, gathered)
        move = machine.move_seconds(block, gathered, tokens)
        gate = machine.gate_seconds(block, tokens, backward)
        latency = 0.0 if self.ranks == 1 else self.network.latency
        clones = self.network.latency + balance.clones_wire if balance.clones else 0.0
        return Phases(
            gate=0.0 if backward else gate,
            counts=0.0 if backward or self.ranks == 1 else self.counts_seconds(),
            gather=move,
            latency=latency,
            dispatch=wire,
            shared=machine.shared_seconds(block, tokens, backward),
            experts=experts,
            combine=wire,
            sum=move + (gate if backward else 0.0),
            clones=0.0 if backward else clones,
            clones_back=clones if backward else 0.0,
        )

    def timelines(
        self, balance: Balance, tokens: float, chunks: int, *, deduplicate: bool
    ) -> tuple[Timeline, Timeline]:
        """Return the forward and the backward pass in ``chunks`` parts."""
        passes = (self.phases(balance, tokens, deduplicate=deduplicate, backward=back) for back in (False, True))
        forward, backward = (timeline(phases, chunks) for phases in passes)
        return forward, backward

    def alone_seconds(self, tokens: float, *, backward: bool) -> float:
        """Return the time of a pass without exchange: all experts on the rank, over its own tokens."""
        block, machine = self.block, self.machine
        rows = tokens * block.choices
        work = machine.experts_seconds(block, rows, block.experts, backward)
        work += machine.shared_seconds(block, tokens, backward) + machine.gate_seconds(block, tokens, backward)
        return work + 2 * machine.move_seconds(block, rows, tokens)
