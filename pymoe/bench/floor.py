"""The floor of an operator's time: moving its bytes with ``copy_``, or doing its operations with ``torch.mm``.

A floor is timed in the same rounds as the operator, with as many bytes (so that they fit the same cache) or with about
as many operations. The rates measured before the first line are the machine's best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pymoe.bench.calls import generator
from pymoe.bench.cold import Rotating, copies_needed
from pymoe.bench.timing import Timer, Timing, measure, timer_for

RATE_BYTES = 1 << 28
"""Number of bytes that the copy reads and writes to measure the copy rate: too many for any cache."""
RATE_SIZE = 512
"""Number of rows and columns of the matrices with which the rate of ``torch.mm`` is measured."""
QUICK_RATE_BYTES, QUICK_RATE_SIZE = 1 << 26, 192
CUDA_RATE_BYTES, CUDA_RATE_SIZE = 1 << 33, 8192
"""RATE_BYTES and RATE_SIZE for a GPU, which has larger caches and needs larger matrices for full speed."""
MOST_BYTES = 1 << 30
MOST_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Floor:
    """A torch call that only moves an operator's bytes or computes its operations, as fast as torch can."""

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
    """The machine's best rates: bytes per second of ``copy_``, operations per second of ``torch.mm`` by dtype."""

    copy: float
    mm: dict[torch.dtype, float]

    def fastest_mm(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which torch multiplies values of ``dtype`` fastest: itself, or fp32 for 16 bits."""
        if dtype in (torch.bfloat16, torch.float16) and self.mm[torch.float32] > self.mm[dtype]:
            return torch.float32
        return dtype


def measure_rates(
    device: torch.device, dtypes: Iterable[torch.dtype], quick: bool = False, timer: Timer | None = None
) -> Rates:
    """Measure both rates (medians), for ``dtypes`` and fp32; ``quick`` uses smaller work and less time."""
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
    """Return the floor of a call that moves ``bytes`` or computes ``flops`` (if given); None if it does neither."""
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
    """Return a function that copies ``bytes / 2`` bytes into allocated memory; on CUDA, from outside the cache."""

    def one() -> Callable[[], object]:
        source = torch.ones(bytes // 8, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return Rotating([one() for _ in range(copies_needed(bytes // 2, device))])


def product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a function that multiplies two square matrices into allocated memory."""
    random = generator(device)
    left, right = (torch.randn(size, size, device=device, generator=random).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)
