"""Measures lower bounds on the time of a block: reading every touched weight once, and dense products of equal size.

Weights are read by a reduction, which writes almost nothing. The fastest of torch's reductions depends on the machine
and the number of threads, so :func:`fastest_reader` measures all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.layers.blocks import Built
from pymoe.bench.timing import Timer, measure

READ_BYTES = 1 << 29
"""Bytes to read when measuring the bandwidth, in parts of :data:`PART_BYTES`."""
PART_BYTES = 1 << 24
COLUMNS = 1 << 14
Reader = Callable[[Tensor], object]
"""A function that reads a contiguous vector of int64 once."""


def product_with_vector(memory: Tensor) -> Tensor:
    """Multiply the memory, as float32, by a vector that stays in the cache."""
    columns = min(COLUMNS, 2 * len(memory))
    values = memory.view(torch.float32)
    whole = len(values) // columns * columns
    return torch.mv(values[:whole].view(-1, columns), torch.ones(columns))


READERS: Mapping[str, Reader] = {
    "sum of int64": lambda memory: memory.sum(),
    "sum of float32": lambda memory: memory.view(torch.float32).sum(),
    "float32 matrix times vector": product_with_vector,
}


@dataclass(frozen=True)
class Bandwidth:
    """The fastest way to read memory that is not in a cache."""

    name: str
    """The reader's name in :data:`READERS`."""
    rates: Mapping[str, float]
    """Median bytes per second of every reader."""

    @property
    def reader(self) -> Reader:
        """Return the fastest reduction."""
        return READERS[self.name]


def fastest_reader(timer: Timer, total: int = READ_BYTES, budget: float = 2.0) -> Bandwidth:
    """Measure all readers on ``total`` bytes, with as many threads as torch uses."""
    part = min(PART_BYTES, total)
    memory = torch.zeros(total // part, part // 8, dtype=torch.int64).fill_(0x3C003C003C003C00)

    def read_all(reader: Reader) -> None:
        for one in memory:
            reader(one)

    calls = {name: (lambda reader=reader: read_all(reader)) for name, reader in READERS.items()}
    timings = measure(calls, budget=budget, rounds=(3, 20), timer=timer)
    rates = {name: memory.nbytes / timing.median for name, timing in timings.items()}
    return Bandwidth(max(rates, key=lambda name: rates[name]), rates)


def weights_read(one: Built, index: Tensor) -> list[Tensor]:
    """Return the weights that tokens with the choices ``index`` (T, K) read, each once, as vectors of int64."""
    found = [weight.detach()[expert] for expert in index.unique().tolist() for weight in one.touched]
    if one.block.shared:
        found += [weight.detach() for weight in one.module.shared_experts.parameters()]
    return [weight.view(-1).view(torch.int64) for weight in found]


def read(reader: Reader, memory: Sequence[Tensor]) -> None:
    """Read every vector once."""
    for vector in memory:
        reader(vector)


def dense_products(one: Built, tokens: int, train: bool) -> Callable[[], None]:
    """Return a function that computes the products of a block with a single expert for all slots.

    There are two products forward and, in training, two more for the gradients of each. Operands are contiguous,
    outputs are allocated beforehand, and there is no routing and no activation.
    """
    block = one.block
    slots = tokens * (block.choices + block.shared)
    sizes = []
    for inputs, outputs in ((block.hidden, 2 * block.ffn), (block.ffn, block.hidden)):
        sizes.append((slots, inputs, outputs))
        if train:
            sizes += [(slots, outputs, inputs), (outputs, slots, inputs)]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns).to(one.dtype)

    products = [(matrix(m, k), matrix(k, n), torch.empty(m, n, dtype=one.dtype)) for m, k, n in sizes]

    def run() -> None:
        for left, right, out in products:
            torch.mm(left, right, out=out)

    return run


def last_level_cache() -> int:
    """Return the bytes of the first processor's largest cache; 32 MiB if the system does not report any."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] if text[-1:] in "KM" else int(text))
    return max(sizes, default=32 << 20)
