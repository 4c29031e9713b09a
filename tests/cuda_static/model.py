"""What a call should take on a GPU, on paper. Nothing here was measured; ``docs`` explain the model under its name.

A launch takes as long as the slowest of seven things that a GPU does side by side, and starting it:

bandwidth   all bytes of its tensors, each once, at the part of the memory's bandwidth that copies reach
L2          all sectors that its warps load and store, at what L2 gives all multiprocessors together
issue       all instructions of all warps, one a cycle and scheduler
latency     Little's law: the bytes that it loads, of which as many are on their way as resident warps load in an epoch
shared      the bytes that its warps read and write in shared memory, as if no two lanes met in a bank
matrix      its products of matrices, at the part of the tensor cores' rate that mma.sync reaches
chain       waves of blocks, each as long as one warp takes alone, by the stalls and scoreboards of its code
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean

from cases import Work
from launches import Result
from memory import SECTOR
from recorded import Case

START_US = 1.5
"""From the end of one kernel to the first instruction of the next, and its last stores: an assumption."""
LOADED_LATENCY_US = 0.7
"""Of a load while memory is busy: an assumption."""
REACHED = 0.9
"""The part of the bandwidth that a copy reaches: an assumption."""
L2_TERABYTES_A_SECOND = 5.7
"""What all multiprocessors together get from L2: an assumption, from published measurements of the H100."""
SHARED_BYTES_A_CYCLE = 128
HMMA_CYCLES = 2048 / 512 / (5 / 8)
"""Of a product of 16 x 16 by 16 x 8. A tensor core makes 512 multiplications a cycle, and mma.sync five eighths of
them: published measurements of the H100."""
SCHEDULERS = 4
WARP_REGISTERS, ALL_REGISTERS, MOST_WARPS, MOST_BLOCKS = 256, 65536, 64, 32
SHARED_BYTES, SHARED_A_BLOCK = 227 << 10, 1 << 10


@dataclass(frozen=True)
class Gpu:
    """What its maker says of a GPU."""

    name: str
    multiprocessors: int
    clock_ghz: float
    terabytes_a_second: float


GPUS = (Gpu("H100", 132, 1.755, 3.35), Gpu("H200", 132, 1.755, 4.8))


@dataclass(frozen=True)
class Occupancy:
    """What fits on a multiprocessor of sm_90."""

    blocks: int
    warps: int


def occupancy(registers: int, threads: int, shared_bytes: int) -> Occupancy:
    """Return how many blocks of a kernel a multiprocessor holds at once."""
    warps = math.ceil(threads / 32)
    of_registers = ALL_REGISTERS // (math.ceil(registers * 32 / WARP_REGISTERS) * WARP_REGISTERS) // 4 * 4 // warps
    of_shared = (SHARED_BYTES + SHARED_A_BLOCK) // (shared_bytes + SHARED_A_BLOCK)
    blocks = min(of_registers, of_shared, MOST_WARPS // warps, MOST_BLOCKS)
    return Occupancy(blocks, blocks * warps)


@dataclass(frozen=True)
class Prediction:
    """The parts of a launch's time, in microseconds."""

    bandwidth: float
    issue: float
    latency: float
    chain: float
    l2: float = 0.0
    shared: float = 0.0
    matrix: float = 0.0

    @property
    def total(self) -> float:
        """The time of the launch."""
        return START_US + max(asdict(self).values())

    @property
    def limit(self) -> str:
        """What it waits for."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name]).replace("l2", "L2")


def bytes_in_flight(result: Result, held: Occupancy, work: Work) -> float:
    """Return the bytes of payload that a multiprocessor's resident warps have on their way at once."""
    loads = [entry for (way, name), entry in result.traffic.items() if way == "load" and name in work.payload]
    if not loads or not result.loads_in_epoch:
        return 0.0
    an_access = sum(entry.bytes for entry in loads) / sum(entry.accesses for entry in loads)
    return held.warps * result.loads_in_epoch * an_access


def predict(case: Case, result: Result, blocks: int, threads: int, held: Occupancy, work: Work, gpu: Gpu) -> Prediction:
    """Predict one launch of a call."""
    touched = {name for _, name in result.traffic}
    of_tensors = sum(size for name, _, size in case.buffers if name in touched and name != "workspace")
    warps = blocks * math.ceil(threads / 32)
    share = warps / len(result.warps)  # of the launch's warps that one of those that were run stands for
    loaded = sum(
        entry.bytes * share for (way, name), entry in result.traffic.items() if way == "load" and name in work.payload
    )
    on_their_way = bytes_in_flight(result, held, work)
    waves = math.ceil(blocks / (held.blocks * gpu.multiprocessors))
    # The busiest multiprocessor decides, where a launch does not fill them all.
    fullest = math.ceil(blocks / gpu.multiprocessors) * math.ceil(threads / 32)
    busiest = fullest if waves == 1 else warps / gpu.multiprocessors
    cycles_a_us = gpu.clock_ghz * 1e3
    sectors = sum(entry.sectors * share for (way, _), entry in result.traffic.items() if way != "atomic")
    shared_bytes = fmean(one.shared_bytes for one in result.warps)
    products = result.issued["HMMA"] / len(result.warps)
    return Prediction(
        bandwidth=of_tensors / (gpu.terabytes_a_second * REACHED * 1e6),
        issue=busiest * result.instructions_a_warp / SCHEDULERS / cycles_a_us,
        latency=loaded / gpu.multiprocessors / on_their_way * LOADED_LATENCY_US if on_their_way else 0.0,
        chain=waves * result.cycles / cycles_a_us,
        l2=sectors * SECTOR / (L2_TERABYTES_A_SECOND * 1e6),
        shared=busiest * shared_bytes / SHARED_BYTES_A_CYCLE / cycles_a_us,
        matrix=busiest * products * HMMA_CYCLES / SCHEDULERS / cycles_a_us,
    )
