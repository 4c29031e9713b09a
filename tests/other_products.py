"""A pytest plugin that makes the rounding of torch's CPU matrix products depend on shape, layout and position of a row.

    PYTHONPATH=tests pytest -p other_products tests/nn tests/runtime tests/pipe

The BLAS of another machine may do the same, so a test that fails relies on equal bits of two different products of
torch. Two tests fail for other reasons: one counts Python functions, and one has an error bound for bfloat16 products,
which are off by one unit in the last place here. Child processes of tests use torch's own products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
library = torch.library.Library("aten", "IMPL")


def layout(matrix: Tensor) -> int:
    """Return a number that depends on the order of the dimensions in memory and on the address of the memory."""
    order = sorted(range(matrix.dim()), key=lambda dim: -matrix.stride(dim))
    return sum((dim + 1) * 3**place for place, dim in enumerate(order)) + 5 * (matrix.data_ptr() % 64 == 0)


def rounded_otherwise(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Change elements of ``product`` in place by one unit in the last place, up, down or not at all; return it."""
    if product.is_floating_point():
        primes = (7, 11, 13, 17, 19, 23)
        start = sum(size * prime for size, prime in zip((*left.shape, *right.shape), primes, strict=False))
        start += layout(left) + 2 * layout(right)
        rows, columns = torch.arange(product.shape[-2]), torch.arange(product.shape[-1])
        steps = (rows[:, None] * 5 + columns * 7 + start) % 3 - 1
        product.mul_(1 + steps.to(product.dtype) * torch.finfo(product.dtype).eps)
    return product


def replace(name: str, into: Callable[..., Tensor]) -> None:
    """Replace the operator ``name``: compute the product by ``into``, its ``out=`` form, and change the rounding."""

    def product(*operands: Tensor, **factors: complex) -> Tensor:
        left, right = operands[-2:]
        out = left.new_empty((*left.shape[:-1], right.shape[-1]))
        return rounded_otherwise(into(*operands, **factors, out=out), left, right)

    library.impl(name, product, "CPU")


replace("mm", aten.mm.out)
replace("bmm", aten.bmm.out)
replace("addmm", aten.addmm.out)
replace("baddbmm", aten.baddbmm.out)
