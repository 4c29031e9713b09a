"""The products of a bf16 layer that torch makes on an H100 and an H200: what they should take, from their sizes alone.

Their machine code is cuBLAS's and CUTLASS's, which nothing here reads. So this is a roofline and no more: a product
takes as long as its multiplications at the part of the tensor cores' rate that such kernels reach, or as its bytes,
each once, and a start for every launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from model import GPUS, REACHED, START_US

TERAFLOPS = 989.0
"""Of both GPUs, bf16 without sparsity, as their maker says."""
REACHED_OF_FLOPS = 0.65
"""The part that large products of cuBLAS and CUTLASS reach: an assumption, from published measurements."""


@dataclass(frozen=True)
class Product:
    """``experts`` products of (rows, depth) by (depth, columns), all rows together; ``launches`` of them all."""

    name: str
    rows: int
    depth: int
    columns: int
    experts: int = 1
    result_bytes: int = 2
    launches: int = 1
    depth_is_shared: bool = False  # among the experts, whose rows are the depth: the gradient of a weight

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.depth * self.columns

    @property
    def bytes(self) -> float:
        """Of both operands, in bf16, and of the result."""
        of_result = self.result_bytes * self.rows * self.columns
        if self.depth_is_shared:
            return 2.0 * self.depth * (self.rows + self.columns) + of_result * self.experts
        return 2.0 * self.depth * (self.rows + self.columns * self.experts) + of_result

    def us(self, terabytes_a_second: float) -> tuple[float, str]:
        """Return the predicted time, and what it is bound by."""
        of_flops = self.flops / (TERAFLOPS * REACHED_OF_FLOPS * 1e6)
        of_bytes = self.bytes / (terabytes_a_second * REACHED * 1e6)
        return START_US * self.launches + max(of_flops, of_bytes), "matrix" if of_flops > of_bytes else "bandwidth"


TOKENS, SLOTS, HIDDEN, FFN, EXPERTS = 4096, 32768, 7168, 2048, 256
ROUTER = "torch.mm, router"
GROUPED = "torch._grouped_mm"
PRODUCTS = [
    Product(f"{ROUTER}: logits, float32 result", TOKENS, HIDDEN, EXPERTS, result_bytes=4),
    Product(f"{ROUTER}: gradient of its weight", EXPERTS, TOKENS, HIDDEN),
    Product(f"{ROUTER}: gradient of the tokens", TOKENS, EXPERTS, HIDDEN),
    Product(f"{GROUPED}, w_in", SLOTS, HIDDEN, 2 * FFN, EXPERTS, launches=2),
    Product(f"{GROUPED}, w_out", SLOTS, FFN, HIDDEN, EXPERTS, launches=2),
    Product(f"{GROUPED}, gradient of w_in's rows", SLOTS, 2 * FFN, HIDDEN, EXPERTS, launches=2),
    Product(f"{GROUPED}, gradient of w_out's rows", SLOTS, HIDDEN, FFN, EXPERTS, launches=2),
    Product(f"{GROUPED}, gradient of w_in", 2 * FFN, SLOTS, HIDDEN, EXPERTS, launches=2, depth_is_shared=True),
    Product(f"{GROUPED}, gradient of w_out", HIDDEN, SLOTS, FFN, EXPERTS, launches=2, depth_is_shared=True),
]


def rows() -> list[list[object]]:
    """Return a row a product: its name, its size, launches, predicted times and the bound."""
    found: list[list[object]] = []
    for one in PRODUCTS:
        times = [one.us(gpu.terabytes_a_second) for gpu in GPUS]
        experts = f", {one.experts} experts" if one.experts > 1 else ""
        size = f"({one.rows}, {one.depth}) by ({one.depth}, {one.columns}){experts}"
        found.append([one.name, size, one.launches, *(f"{us:.0f}" for us, _ in times), times[-1][1]])
    return found


HEAD = ["product", "shape", "launches", "H100, µs", "H200, µs", "limit"]
