"""Speed and memory bandwidth of ranks; latency and bandwidth of networks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.checks import at_least, not_negative, positive
from pymoe.ep.simulate.timeline import Seconds


@dataclass(frozen=True)
class Machine:
    """One rank, as a roofline: work takes the longer of the times of its operations and of its memory traffic.

    Raises:
        TypeError: a number is of the wrong kind.
        ValueError: a number is out of range.
    """

    title: str
    flops: float
    """Floating-point operations per second that matrix products reach, not the nominal peak."""
    memory_bandwidth: float
    """Bytes per second, read and written."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        positive("Machine", "flops", self.flops)
        positive("Machine", "memory_bandwidth", self.memory_bandwidth)

    def __str__(self) -> str:
        return f"{self.title}: {self.flops / 1e12:g} Tflop/s, {self.memory_bandwidth / 1e9:g} GB/s of memory"

    def seconds(self, operations: Seconds, traffic: Seconds) -> Seconds:
        """Return the longer of ``operations`` at full speed and ``traffic`` bytes at full bandwidth, in seconds."""
        return np.maximum(operations / self.flops, traffic / self.memory_bandwidth)

    def gate_seconds(self, block: Block, tokens: float, backward: bool = False) -> float:
        """Return the time of the router over ``tokens``: 2 T H E operations forward, twice that backward."""
        times = 2 if backward else 1
        traffic = tokens * block.row_bytes + block.hidden * block.experts * block.itemsize
        return float(self.seconds(times * 2 * tokens * block.hidden * block.experts, times * traffic))

    def move_seconds(self, block: Block, rows: Seconds, tokens: Seconds) -> Seconds:
        """Return the time to gather ``rows`` from ``tokens``, or to sum them into these: memory traffic only."""
        return (rows + tokens) * block.row_bytes / self.memory_bandwidth

    def experts_seconds(self, block: Block, rows: Seconds, experts: Seconds, backward: bool = False) -> Seconds:
        """Return the time of the grouped products over ``rows`` of ``experts`` experts, each of which is used.

        Forward: 6 H F operations per row; the weights of experts with rows are read once, and rows of H, 2 F and F
        numbers are read and written. Backward: twice as much of both, because there are products for rows and for
        weights.
        """
        return self._networks(block, block.ffn, rows, np.minimum(experts, rows), backward)

    def shared_seconds(self, block: Block, tokens: float, backward: bool = False) -> float:
        """Return the time of the shared experts over ``tokens``; 0 if there are none."""
        return float(self._networks(block, block.shared_ffn, tokens, 1, backward)) if block.shared_ffn else 0.0

    def _networks(self, block: Block, ffn: int, rows: Seconds, experts: Seconds, backward: bool) -> Seconds:
        times = 2 if backward else 1
        weights = experts * 3 * block.hidden * ffn
        between = rows * (2 * block.hidden + 6 * ffn)  # x read, 2 F written and read, F written and read, y written
        return self.seconds(times * 6 * rows * block.hidden * ffn, times * (weights + between) * block.itemsize)


@dataclass(frozen=True)
class Network:
    """Links between ranks: an exchange takes ``latency`` plus the time of the rank that sends or receives most.

    A link carries both directions at full bandwidth. Nodes are ``ranks_per_node`` consecutive ranks. Within a node the
    local bandwidth applies, and rows within and between nodes travel at the same time.

    Raises:
        TypeError: a number is of the wrong kind.
        ValueError: a number is out of range.
    """

    title: str
    latency: float
    """Seconds of an empty exchange, for any number of ranks."""
    bandwidth: float
    """Bytes per second that a rank sends to other nodes, and receives at the same time."""
    ranks_per_node: int = 1
    local_bandwidth: float | None = None
    """Bytes per second within a node; None: the same as between nodes."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        not_negative("Network", "latency", self.latency)
        positive("Network", "bandwidth", self.bandwidth)
        at_least("Network", "ranks_per_node", self.ranks_per_node, 1)
        if self.local_bandwidth is not None:
            positive("Network", "local_bandwidth", self.local_bandwidth)

    def __str__(self) -> str:
        text = f"{self.title}: {self.bandwidth / 1e9:g} GB/s a rank"
        if self.ranks_per_node > 1 and self.local_bandwidth is not None:
            text += f" between nodes, {self.local_bandwidth / 1e9:g} within their {self.ranks_per_node} ranks"
        return f"{text}, {self.latency * 1e6:g} µs"

    @property
    def within_node(self) -> float:
        """Bytes per second within a node."""
        return self.bandwidth if self.local_bandwidth is None else self.local_bandwidth

    def busiest(self, pairs: Tensor) -> float:
        """Return the seconds in which the busiest rank sends and receives, without latency.

        Args:
            pairs: (R, R) float64, bytes from each rank (first dimension) to each rank; the diagonal does not travel.
        """
        node = torch.arange(pairs.shape[0]) // self.ranks_per_node
        same = node[:, None] == node[None, :]
        moved = pairs.clone().fill_diagonal_(0)
        local, remote = moved * same, moved * ~same
        slowest = 0.0
        for part, speed in ((local, self.within_node), (remote, self.bandwidth)):
            slowest = max(slowest, float(part.sum(0).max()) / speed, float(part.sum(1).max()) / speed)
        return slowest

    def ring_bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of a ring over all ranks, which are the bytes per second of its slowest link."""
        return self.within_node if ranks <= self.ranks_per_node else min(self.bandwidth, self.within_node)


MACHINES = {
    "a100": Machine("A100", 0.6 * 312e12, 0.8 * 2.04e12),
    "h100": Machine("H100", 0.4 * 989e12, 0.8 * 3.35e12),
    "h200": Machine("H200", 0.4 * 989e12, 0.8 * 4.8e12),
    "b200": Machine("B200", 0.4 * 2250e12, 0.8 * 8e12),
}
"""Nominal dense bf16 peaks and memory bandwidths from data sheets, times the fractions that training reaches."""

NETWORKS = {
    "nvlink": Network("NVLink 4", 10e-6, 0.8 * 450e9, 8),
    "nvlink5": Network("NVLink 5", 10e-6, 0.8 * 900e9, 72),
    "infiniband": Network("InfiniBand 400 Gb/s a rank", 20e-6, 0.9 * 50e9, 8, 0.8 * 450e9),
    "ethernet": Network("Ethernet 100 Gb/s a node", 50e-6, 0.9 * 12.5e9 / 8, 8, 0.8 * 31.5e9),
    "internet": Network("internet 1 Gb/s", 50e-3, 0.9 * 0.125e9),
}
"""Nominal bandwidths, times the fractions that exchanges reach; within a node of ``ethernet``: PCIe 4.0 x16."""
