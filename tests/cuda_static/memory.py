"""The memory that a traced kernel sees: named buffers of a stated size, and what every access of a warp touched."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

SECTOR = 32
"""Bytes that DRAM and L2 move at once."""


@dataclass
class Buffer:
    """Bytes of global memory. Without ``data`` they are read as zeros, and what is written is forgotten."""

    name: str
    base: int
    size: int
    data: np.ndarray | None = None


@dataclass
class Traffic:
    """What warps did to one buffer in one way: instructions, sectors, bytes, and the widths of the accesses."""

    accesses: int = 0
    sectors: int = 0
    bytes: int = 0
    widths: set[int] = field(default_factory=set)

    @property
    def bytes_a_sector(self) -> float:
        """Of the bytes that memory moves, 32 a sector, those that were asked for."""
        return self.bytes / self.sectors if self.sectors else 0.0


class OutsideOfMemory(Exception):
    """An access that is in none of the buffers, or not aligned to its width."""


class Memory:
    """Buffers, and what was done to each of them."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def buffer_of(self, addresses: np.ndarray, width: int, what: str) -> Buffer:
        """Return the buffer that all of the accesses lie in."""
        low, high = int(addresses.min()), int(addresses.max()) + width
        for one in self.buffers:
            if one.base <= low and high <= one.base + one.size:
                if (addresses % width).any():
                    raise OutsideOfMemory(f"{what} is not aligned to {width} bytes")
                return one
        near = [f"{one.name} [{one.base:#x}, {one.base + one.size:#x})" for one in self.buffers]
        raise OutsideOfMemory(f"{what} reaches [{low:#x}, {high:#x}); the buffers are {', '.join(near)}")

    def note(self, way: str, buffer: Buffer, addresses: np.ndarray, width: int) -> None:
        """Count an access of a warp."""
        entry = self.traffic[way, buffer.name]
        entry.accesses += 1
        entry.widths.add(width)
        entry.sectors += len(np.unique(addresses // SECTOR))  # one is aligned to its width, so within a sector
        entry.bytes += width * len(np.unique(addresses))

    def parts(self, way: str, addresses: np.ndarray, width: int, what: str) -> list[tuple[Buffer, np.ndarray]]:
        """Count an access, and return its buffers, mostly one, each with the numbers of its addresses."""
        found: dict[int, list[int]] = defaultdict(list)
        for number, address in enumerate(addresses.tolist()):
            near = [i for i, one in enumerate(self.buffers) if one.base <= address < one.base + one.size]
            found[near[0] if near else -1].append(number)
        parts = []
        for numbers in found.values():
            buffer = self.buffer_of(addresses[numbers], width, what)
            self.note(way, buffer, addresses[numbers], width)
            parts.append((buffer, np.array(numbers)))
        return parts

    def load(self, addresses: np.ndarray, width: int, what: str) -> tuple[Buffer, np.ndarray]:
        """Return the buffer (of the first address) and the bytes, one row a lane."""
        parts = self.parts("load", addresses, width, what)
        read = np.zeros((len(addresses), width), np.uint8)
        for buffer, numbers in parts:
            if buffer.data is not None:
                read[numbers] = buffer.data[(addresses[numbers] - buffer.base)[:, None] + np.arange(width)]
        return parts[0][0], read

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray, what: str) -> None:
        """Write one row of bytes a lane; of lanes that write to one place the last wins."""
        for buffer, numbers in self.parts("store", addresses, width, what):
            if buffer.data is not None:
                buffer.data[(addresses[numbers] - buffer.base)[:, None] + np.arange(width)] = values[numbers]
