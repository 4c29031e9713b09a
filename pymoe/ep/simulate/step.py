"""Seconds of a layer's parts for a block, a machine, a network and a load: the input of the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pymoe.ep.agreement import message_length
from pymoe.ep.simulate.balance import Spread
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.machine import Machine, Network
from pymoe.ep.simulate.timeline import Phases, Timeline, timeline
from pymoe.ep.simulate.traffic import travelling


@dataclass(frozen=True)
class Chunk:
    """The traffic and work of one chunk of a layer and step, for T tokens per rank."""

    rows: NDArray[np.float64]
    """(R,) number of rows that each rank computes."""
    received: NDArray[np.float64]
    """(R,) number of rows that arrive at each rank or stay there."""
    experts: NDArray[np.float64]
    """(R,) number of experts that compute these rows."""
    gathered: float
    """Number of rows written to the send buffer, the mean over ranks."""
    sent: float
    """Number of the gathered rows that leave their rank."""
    wire: float
    """Seconds in which the busiest rank sends and receives, without latency."""


@dataclass(frozen=True)
class Cut:
    """One layer and step of a load, cut into chunks."""

    deduplicated: bool
    tokens: float
    """T, the number of tokens per rank."""
    chunks: tuple[Chunk, ...]
    """Chunks of the cut; the chunk of clones is the last one, if they travel."""
    clones_wire: float | None
    """Seconds in which the busiest rank sends and receives the weights of clones, without latency; None: no clones."""


@dataclass(frozen=True)
class Layer:
    """One layer on ranks of one machine."""

    block: Block
    ranks: int
    machine: Machine
    network: Network

    def cut(self, spread: Spread, tokens: float, chunks: int, *, deduplicate: bool) -> Cut:
        """Return ``spread``, with ``tokens`` per rank, in chunks; one row per rank then means per rank and chunk."""
        chunk_TK, experts = spread.chunk_of_choices(chunks)
        found = []
        for chunk in range(len(experts)):
            chosen = chunk_TK == chunk
            plain = spread.pairs(False, chosen)
            pairs = spread.pairs(True, chosen) if deduplicate else plain
            wire = self.network.busiest(pairs * self.block.row_bytes)
            rows, received = plain.sum(0).numpy(), pairs.sum(0).numpy()
            number = experts[chunk].double().numpy()
            gathered, sent = float(pairs.sum()) / self.ranks, travelling(pairs) / self.ranks
            found.append(Chunk(rows, received, number, gathered, sent, wire))
        weights = self.block.expert_parameters * self.block.itemsize
        clones = self.network.busiest(spread.clones.double() * weights) if int(spread.clones.sum()) else None
        return Cut(deduplicate, tokens, tuple(found), clones)

    def counts_seconds(self) -> float:
        """Return the time of an all-gather of every rank's E counts, in the message that the layer sends."""
        received = 4.0 * (self.ranks - 1) * message_length(self.block.experts)
        return self.network.latency + received / self.network.ring_bandwidth(self.ranks)

    def phases(self, cut: Cut, tokens: float, *, backward: bool) -> Phases:
        """Return the seconds of a pass with ``tokens`` per rank, scaled from the seconds of ``cut``.

        The backward sends the gradients of the outputs to the experts and the gradients of the inputs back, so it has
        the same exchanges as the forward; its products cost twice as much; it knows the counts. Clones come first
        there, so that their gradients leave early.
        """
        block, machine = self.block, self.machine
        scale = tokens / cut.tokens
        experts = []
        chunks = cut.chunks
        if backward and cut.clones_wire is not None:
            chunks = (chunks[-1], *chunks[:-1])
        for chunk in chunks:
            work = machine.experts_seconds(block, scale * chunk.rows, chunk.experts, backward)
            if cut.deduplicated:  # rows are copied for each expert on arrival, and summed there
                work = work + 2 * machine.move_seconds(block, scale * chunk.rows, scale * chunk.received)
            experts.append(work)
        move = float(machine.move_seconds(block, scale * sum(chunk.gathered for chunk in cut.chunks), tokens))
        gate = machine.gate_seconds(block, tokens, backward)
        wire = tuple(scale * chunk.wire for chunk in chunks)
        clones = 0.0 if cut.clones_wire is None else self.network.latency + cut.clones_wire
        return Phases(
            gate=0.0 if backward else gate,
            counts=0.0 if backward or self.ranks == 1 else self.counts_seconds(),
            gather=move,
            latency=0.0 if self.ranks == 1 else self.network.latency,
            dispatch=wire,
            shared=machine.shared_seconds(block, tokens, backward),
            experts=tuple(experts),
            combine=wire,
            sum=move + (gate if backward else 0.0),
            clones=0.0 if backward else clones,
            clones_back=clones if backward else 0.0,
        )

    def timelines(self, cut: Cut, tokens: float) -> tuple[Timeline, Timeline]:
        """Return the forward and the backward pass with ``tokens`` per rank."""
        forward, backward = (timeline(self.phases(cut, tokens, backward=back)) for back in (False, True))
        return forward, backward

    def step_seconds(self, cuts: Sequence[Cut], tokens: float) -> float:
        """Return the time of forward and backward with ``tokens`` per rank, the mean over layers and steps."""
        return sum(one.seconds for cut in cuts for one in self.timelines(cut, tokens)) / len(cuts)

    def alone_seconds(self, tokens: float, *, backward: bool) -> float:
        """Return the time of a pass without exchanges: all experts are on the rank and compute its own tokens."""
        block, machine = self.block, self.machine
        rows = tokens * block.choices
        work = float(machine.experts_seconds(block, rows, block.experts, backward))
        work += machine.shared_seconds(block, tokens, backward) + machine.gate_seconds(block, tokens, backward)
        return work + 2 * float(machine.move_seconds(block, rows, tokens))
