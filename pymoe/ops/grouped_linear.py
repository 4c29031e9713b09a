"""grouped_linear: native grouped matrix products.

Contract: :func:`pymoe.reference.grouped_linear`; kernel: csrc/kernels/grouped_linear.h.

The three autograd Functions below compute each other's gradients, so a backward of any order runs on native kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_grouped_linear
from pymoe._common.types import cast_operands
from pymoe._native import load_operators
from pymoe.ops import index_checks, package_products
from pymoe.ops.function_calls import call
from pymoe.reference.grouped_linear import grouped_linear as reference

GROUPED_LINEAR = torch.ops.pymoe.grouped_linear.default
WEIGHT_GRAD = torch.ops.pymoe.grouped_linear_weight_grad.default
BIAS_GRAD = torch.ops.pymoe.grouped_linear_bias_grad.default


class GroupedLinear(torch.autograd.Function):
    """Computes y[r] = weight[e] @ x[r] + bias[e] for the expert e that owns row r, as :func:`grouped_linear` does."""

    # A pipeline may compute the gradient of x first and the other gradients later (pymoe.pipe.split_backward).
    backward_in_parts = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, order: Tensor | None, whole: bool
    ) -> Tensor:
        package = package_products.chosen
        if package is not None and x.device.type == package_products.DEVICE:
            return package_products.product(package, x, weight, offsets, bias, order)
        return GROUPED_LINEAR(x, weight, offsets, bias, order, whole)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, offsets, _, order, ctx.whole = inputs
        ctx.save_for_backward(x, weight, offsets, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offsets, order = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, _, _ = ctx.needs_input_grad
        return (
            call(GroupedLinear, grad, weight.transpose(1, 2), offsets, None, order, ctx.whole) if needs_x else None,
            weight_grad(grad, x, offsets, order, ctx.whole, weight.stride(), partial(call, WeightGrad))
            if needs_weight
            else None,
            None,
            call(BiasGrad, grad, offsets, order) if needs_bias else None,
            None,
            None,
        )


class WeightGrad(torch.autograd.Function):
    """Computes dweight[e], the sum of the outer products of grad[r] and x[r] over the rows r of expert e."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, offsets: Tensor, order: Tensor | None, whole: bool) -> Tensor:
        return WEIGHT_GRAD(grad, x, offsets, order, whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.whole = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, x, offsets, order = ctx.saved_tensors
        needs_grad, needs_x, *_ = ctx.needs_input_grad
        rest = (offsets, None, order, ctx.whole)
        return (
            call(GroupedLinear, x, cotangent, *rest) if needs_grad else None,
            call(GroupedLinear, grad, cotangent.transpose(1, 2), *rest) if needs_x else None,
            None,
            None,
            None,
        )


def weight_grad(
    grad: Tensor,
    x: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    whole: bool,
    strides: tuple[int, ...],
    product: Callable[..., Tensor],
) -> Tensor:
    """Return the gradient of a weight (E, N, H), laid out in memory as ``strides``, the strides of the weight, require.

    Autograd would copy a gradient that is laid out differently from the weight. So for a transposed view of an
    (E, H, N) parameter, return a transposed view of an (E, H, N) gradient. The bits are the same, because only the two
    factors of each product are swapped.

    Args:
        grad: (S, N), the gradient of the product.
        x: (S, H).
        offsets: (E + 1,).
        order: (S,), or None.
        whole: as for :func:`raw`.
        strides: the strides of the weight.
        product: computes the gradient: a call of ``WeightGrad``, or its kernel alone.
    """
    if strides[1] < strides[2]:
        return product(x, grad, offsets, order, whole).transpose(1, 2)
    return product(grad, x, offsets, order, whole)


class BiasGrad(torch.autograd.Function):
    """Computes dbias[e], the sum of grad[r] over the rows r of expert e."""

    @staticmethod
    def forward(grad: Tensor, offsets: Tensor, order: Tensor | None) -> Tensor:
        return BIAS_GRAD(grad, offsets, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        grad, offsets, order = inputs
        ctx.rows = grad.shape[0]
        ctx.save_for_backward(offsets, order)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        offsets, order = ctx.saved_tensors
        return rows_of_bias(cotangent, offsets, ctx.rows, order), None, None


def rows_of_bias(bias: Tensor, offsets: Tensor, rows: int, order: Tensor | None = None) -> Tensor:
    """Return the bias of every row's expert, (rows, N) for ``bias`` (E, N); zeros for rows without an expert."""
    # Compute the biases of the rows by a grouped linear layer without input features.
    nothing, no_weight = bias.new_empty((rows, 0)), bias.new_empty((*bias.shape, 0))
    return call(GroupedLinear, nothing, no_weight, offsets, bias, order, False)  # type: ignore[no-any-return]


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, order: Tensor | None = None
) -> Tensor:
    x, weight, bias = cast_operands(x, weight, bias)  # type: ignore[assignment]
    check_grouped_linear(x, weight, offsets, bias, order=order)
    index_checks.offsets_in_range("grouped_linear", offsets, x.shape[0])
    if order is not None:
        index_checks.order_in_range("grouped_linear", order, offsets)
        order = order.contiguous()
    return call(GroupedLinear, x, weight, offsets.contiguous(), bias, order, False)


grouped_linear.__doc__ = reference.__doc__


def raw(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    order: Tensor | None = None,
    whole: bool = False,
) -> Tensor:
    """Return the result of :func:`grouped_linear`, without checks of the arguments.

    Inside ``torch.autocast``, first cast the operands.

    Args:
        x: (S, H).
        weight: (E, N, H).
        offsets: (E + 1,), contiguous.
        bias: (E, N), or None.
        order: (S,), contiguous, or None.
        whole: True promises that ``offsets`` come unchanged from :func:`pymoe.ops.build_routing` and that every choice
            has a row: no choice was dropped, for lack of capacity or because its expert is on another rank. This saves
            two launches for each product that torch computes on a GPU: one that brings offsets into range before
            torch's product reads them, and one that afterwards clears the rows that no expert owns. The GPU does not
            check the promise: if it is broken, rows that no expert owns may have any values.
    """
    x, weight, bias = cast_operands(x, weight, bias)  # type: ignore[assignment]
    return call(GroupedLinear, x, weight, offsets, bias, order, whole)  # type: ignore[no-any-return]


def leaves_bias(x: Tensor) -> bool:
    """Return whether a layer should leave the biases of its products to the operators that follow the products.

    It should if torch's grouped product, which adds no bias, multiplies rows such as ``x``: in bfloat16 on GPUs of
    compute capability 9.0 and 10.0. Then ``expert_activation`` adds the first bias and ``combine`` the second, in
    float32, to rows that the product has rounded.
    """
    return x.dtype == torch.bfloat16 and not x.is_cpu and x.device.index is not None and _by_torch(x.device.index)


def _by_torch(device: int) -> bool:
    return load_operators().torch_multiplies(device)  # type: ignore[no-any-return]


# As torch.compiler.assume_constant_result does: Dynamo calls the function while it traces, and treats the result as a
# constant.
_by_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


@torch.library.register_fake("pymoe::grouped_linear")
def _(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.register_fake("pymoe::grouped_linear_weight_grad")
def _(grad: Tensor, x: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((offsets.shape[0] - 1, grad.shape[1], x.shape[1]))


@torch.library.register_fake("pymoe::grouped_linear_bias_grad")
def _(grad: Tensor, offsets: Tensor, order: Tensor | None = None) -> Tensor:
    return grad.new_empty((offsets.shape[0] - 1, grad.shape[1]))
