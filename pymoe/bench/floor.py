"""The floor of an operator's time: the time in which ``copy_`` moves as many bytes as the operator, or ``torch.mm``
computes as many operations.

A floor is timed in the same rounds as the operator, with the same number of bytes (so that they fit into the same
cache) or about the same number of operations, up to the limits ``MOST_BYTES`` and ``MOST_SIZE``. Before the first
line is timed, the rates of a large copy and of large products are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pymoe.bench.calls import generator
from pymoe.bench.cold import Rotating, copies_needed
from pymoe.bench.timing import Timer, Timing, measure, timer_for

RATE_BYTES = 1 << 28
"""Number of bytes that the copy reads and writes to measure the copy rate: too many for most caches."""
RATE_SIZE = 512
"""Number of rows and columns of the matrices with which the rate of ``torch.mm`` is measured."""
QUICK_RATE_BYTES, QUICK_RATE_SIZE = 1 << 26, 192
CUDA_RATE_BYTES, CUDA_RATE_SIZE = 1 << 33, 8192
"""RATE_BYTES and RATE_SIZE for a GPU, which has larger caches and needs larger matrices for full speed."""
MOST_BYTES = 1 << 30
MOST_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Floor:
    """The baseline for an operator's rate: a call of ``copy_`` or ``torch.mm``.

    Unless the limits of :func:`floor_for` are reached, the call moves about as many bytes, or computes about as many
    operations, as the operator needs at least.
    """

    kind: str
    """``"copy_"``, or ``"mm"`` with the dtype of the product."""
    run: Callable[[], object]
    work: float
    """Number of bytes or floating-point operations of one call of the floor."""
    needed: float
    """Minimum number of bytes or floating-point operations that one call of the operator needs."""

    def share(self, floor: Timing, operator: Timing) -> tuple[float, ...]:
        """Return, for every round, the ratio of the operator's rate to the floor's: 1 means as fast as the floor."""
        factor = self.needed / self.work
        return tuple(factor * a / b for a, b in zip(floor.seconds, operator.seconds, strict=True))


@dataclass(frozen=True)
class Rates:
    """Rates of large work: bytes per second of ``copy_``, and operations per second of ``torch.mm`` by dtype."""

    copy: float
    mm: dict[torch.dtype, float]

    def fastest_mm(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which torch multiplies values of ``dtype`` fastest: for 16 bits that may be float32."""
        if dtype in (torch.bfloat16, torch.float16) and self.mm[torch.float32] > self.mm[dtype]:
            return torch.float32
        return dtype


def measure_rates(
    device: torch.device, dtypes: Iterable[torch.dtype], quick: bool = False, timer: Timer | None = None
) -> Rates:
    """Measure the rates of ``copy_`` and ``torch.mm`` as medians; ``quick`` uses smaller work and less time.

    Products are measured in float32 and in ``dtypes``. On CUDA, they are also measured in bfloat16, and ``quick`` only
    reduces the time.
    """
    moved, size = (QUICK_RATE_BYTES, QUICK_RATE_SIZE) if quick else (RATE_BYTES, RATE_SIZE)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        moved, size = min(CUDA_RATE_BYTES, memory // 4), CUDA_RATE_SIZE
        dtypes = (torch.bfloat16, *dtypes)
    budget = 0.05 if quick else 0.5
    dtypes = dict.fromkeys((torch.float32, *dtypes))
    timer = timer or timer_for(device)
    copies = measure({"copy_": copy(moved, device)}, budget=budget, rounds=(3, 50), timer=timer)
    products = measure(
        {str(dtype): product(size, dtype, device) for dtype in dtypes}, budget=budget, rounds=(3, 50), timer=timer
    )
    return Rates(moved / copies["copy_"].median, {dtype: 2 * size**3 / products[str(dtype)].median for dtype in dtypes})


def floor_for(bytes: int, flops: int, dtype: torch.dtype, device: torch.device, rates: Rates) -> Floor | None:
    """Return the floor of a call: a product if ``flops`` is not 0, else a copy of ``bytes``; None if both are 0.

    A copy moves at most ``MOST_BYTES``, and the matrices of a product have at most ``MOST_SIZE`` rows and columns.
    """
    if flops:
        size = min(max(round((flops / 2) ** (1 / 3) / 64) * 64, 64), MOST_SIZE[device.type])
        dtype = rates.fastest_mm(dtype)
        name = str(dtype).removeprefix("torch.")
        return Floor(f"mm {name}", product(size, dtype, device), 2 * size**3, flops)
    if bytes:
        moved = min(max(bytes // 8 * 8, 8), MOST_BYTES)
        return Floor("copy_", copy(moved, device), moved, bytes)
    return None


def copy(bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that copies ``bytes / 2`` bytes, so that reading and writing them moves ``bytes``.

    Both tensors are allocated beforehand. On CUDA, successive calls use different tensors, so that the cache has none
    of them.
    """

    def one() -> Callable[[], object]:
        source = torch.ones(bytes // 8, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return Rotating([one() for _ in range(copies_needed(bytes // 2, device))])


def product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a function that computes the product of two ``size`` x ``size`` matrices, into a matrix that is allocated
    beforehand.
    """
    random = generator(device)
    left, right = (torch.randn(size, size, device=device, generator=random).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)
