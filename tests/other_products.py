"""A plugin: torch's matrix products on the CPU round otherwise for every shape, layout and place of a row.

    PYTHONPATH=tests pytest -p other_products tests/nn tests/runtime tests/pipe

So may those of another machine's BLAS: a test that fails has compared the bits of two different products of torch. Two
tests fail for other reasons: one counts functions of Python, and one knows a bound for products of bfloat16, which are
off by one unit in the last place here. Processes that tests start have torch's own products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
library = torch.library.Library("aten", "IMPL")


def layout(matrix: Tensor) -> int:
    """Return a number of the order of the dimensions in memory, and of where the memory begins."""
    order = sorted(range(matrix.dim()), key=lambda dim: -matrix.stride(dim))
    return sum((dim + 1) * 3**place for place, dim in enumerate(order)) + 5 * (matrix.data_ptr() % 64 == 0)


def rounded_otherwise(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Move elements of ``product`` by one unit in the last place, up, down or not at all, in place."""
    if product.is_floating_point():
        primes = (7, 11, 13, 17, 19, 23)
        start = sum(size * prime for size, prime in zip((*left.shape, *right.shape), primes, strict=False))
        start += layout(left) + 2 * layout(right)
        rows, columns = torch.arange(product.shape[-2]), torch.arange(product.shape[-1])
        steps = (rows[:, None] * 5 + columns * 7 + start) % 3 - 1
        product.mul_(1 + steps.to(product.dtype) * torch.finfo(product.dtype).eps)
    return product


def replace(name: str, into: Callable[..., Tensor]) -> None:
    """Have the operator ``name`` compute its product by ``into``, its form with ``out=``, and round it otherwise."""

    def product(*operands: Tensor, **factors: complex) -> Tensor:
        left, right = operands[-2:]
        out = left.new_empty((*left.shape[:-1], right.shape[-1]))
        return rounded_otherwise(into(*operands, **factors, out=out), left, right)

    library.impl(name, product, "CPU")


replace("mm", aten.mm.out)
replace("bmm", aten.bmm.out)
replace("addmm", aten.addmm.out)
replace("baddbmm", aten.baddbmm.out)
