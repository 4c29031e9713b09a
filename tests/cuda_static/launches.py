"""Runs blocks of recorded launches, and adds up what their warps did."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from memory import Buffer, Memory, Traffic
from recorded import Recorded
from registers import LANES, U32
from sass import Function
from warp import GENERIC_SHARED, PARAMETERS, Counts, Warp

SHARED_START = 0x400
"""Where a block's shared memory begins on sm_90."""


@dataclass
class Result:
    """What the blocks that were run did: counts a warp, and the traffic of all of these."""

    warps: list[Counts]
    traffic: dict[tuple[str, str], Traffic]
    blocks_run: int
    issued: Counter[str] = field(default_factory=Counter)

    @property
    def instructions_a_warp(self) -> float:
        """Instructions that a warp issues, on average."""
        return fmean(one.instructions for one in self.warps)

    @property
    def epochs(self) -> int:
        """The most epochs that a warp had."""
        return max(one.epochs for one in self.warps)

    @property
    def loads_in_epoch(self) -> float:
        """Loads of payload that are on their way together, on average over epochs."""
        every = [count for one in self.warps for count in one.loads_in_epoch]
        return fmean(every) if every else 0.0

    @property
    def cycles(self) -> int:
        """Cycles that the slowest warp takes with a multiprocessor to itself."""
        return max(one.cycles for one in self.warps)


def run(
    function: Function, launch: Recorded, buffers: list[Buffer], payload: frozenset[str], blocks: list[int],
    latency: dict[str, int],
) -> Result:  # fmt: skip
    """Run some blocks of a launch to their ends. ``payload`` names the buffers whose loads make epochs."""
    memory = Memory(buffers)
    head = bytearray(PARAMETERS)
    struct.pack_into("<6I", head, 0, launch.threads, 1, 1, launch.blocks, 1, 1)
    constants = bytes(head) + launch.arguments + bytes(64)
    counts = [
        counts for block in blocks for counts in run_block(function, launch, block, memory, constants, payload, latency)
    ]
    issued: Counter[str] = Counter()
    for one in counts:
        issued.update(one.issued)
    return Result(counts, dict(memory.traffic), len(blocks), issued)


def run_block(
    function: Function, launch: Recorded, block: int, memory: Memory, constants: bytes, payload: frozenset[str],
    latency: dict[str, int],
) -> list[Counts]:  # fmt: skip
    """Run one block, all its warps up to each barrier before any goes past it."""
    shared = np.zeros(SHARED_START + (256 << 10), np.uint8)
    warps = []
    for first in range(0, launch.threads, LANES):
        lane = np.arange(LANES).astype(U32)
        bit = U32(1) << lane
        special = {
            "SR_TID.X": lane + U32(first), "SR_LANEID": lane, "SR_CTAID.X": np.full(LANES, block, U32),
            "SR_LTMASK": bit - U32(1), "SR_EQMASK": bit, "SR_LEMASK": (bit << U32(1)) - U32(1),
            "SR_SWINHI": np.full(LANES, GENERIC_SHARED, U32), "SR_CgaCtaId": np.zeros(LANES, U32),
        }  # fmt: skip
        for name in ("SR_TID.Y", "SR_TID.Z", "SR_CTAID.Y", "SR_CTAID.Z"):
            special[name] = np.zeros(LANES, U32)
        warp = Warp(function, memory, shared, constants, special, payload, latency)
        warp.alive = lane + first < launch.threads
        warps.append(warp)
    going = [(warp, warp.run()) for warp in warps]
    while going:
        at_barrier = []
        for warp, steps in going:
            if next(steps, "ended") is None:
                at_barrier.append((warp, steps))
        latest = max((warp.counts.cycles for warp, _ in at_barrier), default=0)
        for warp, _ in at_barrier:  # a barrier lets them go on together
            warp.counts.cycles = latest
        going = at_barrier
    return [warp.counts for warp in warps]
