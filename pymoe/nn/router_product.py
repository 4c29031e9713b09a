"""Computes the logits of 16-bit tokens and weights on a GPU in one product with float32 sums, without casts to float32.

Products of two bfloat16 or float16 numbers are exact in float32, so only the sums are rounded, as in a product after
casts to float32. The two results differ only in the order of summation, and are equal if the sums are exact.

The gradients of ``logits = x @ weight.T`` are ``dlogits @ weight`` and ``dlogits.T @ x``, for float32 ``dlogits``:

- In bfloat16, ``dlogits`` is first rounded to bfloat16, as in every bfloat16 linear layer, so these products run on
  tensor cores, too. Let u = 2^-8, the unit roundoff of bfloat16. Before an element of the gradient of ``x`` is itself
  rounded, its error is at most ``u * sum |dlogits| |weight|``, to first order; for the gradient of the weight it is the
  same with ``|x|``. bfloat16 has the range of float32: values overflow or underflow only if they do in float32.
- float16 does not have that range: gradients that are multiplied by a loss scale may exceed 65504, and without a loss
  scale they may be smaller than the smallest float16 number. So in float16 ``dlogits`` stays float32, and ``weight``
  and ``x`` are cast to float32.

In bfloat16, if the tokens get a gradient, the product and the gate are one autograd node. Its backward runs two
products and a kernel on the GPU. Two nodes would need an additional cast and an addition: they would pass the gradient
of the logits between them in the logits' dtype, float32, and autograd would add the gradients of the tokens from router
and experts. In the single node, the kernel of the gate's backward writes the gradient of the logits in bfloat16, and
the product ``dlogits @ weight`` adds its result to the gradient of the tokens that comes from the experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import Gate, GateOptions, Routing, autocast_enabled, gate_backward_options
from pymoe._transforms import in_torch_func
from pymoe.ops.function_calls import call, is_recorded
from pymoe.ops.gate_topk import GATE_ROUTING, gate_backward

DEVICES = {"cuda"}
"""Types of devices for which torch has ``torch.mm`` of 16-bit operands with a float32 result."""


def takes(x_TH: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`wide_product` can compute the logits of these operands."""
    return (
        x_TH.dtype == weight.dtype
        and x_TH.dtype in (torch.bfloat16, torch.float16)
        and x_TH.device.type == weight.device.type
        and x_TH.device.type in DEVICES
    )


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context manager that turns ``torch.autocast`` off for this type of device."""
    if autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def wide_product(x_TH: Tensor, weight: Tensor) -> Tensor:
    """Return ``x_TH @ weight.T`` (T, E) in float32, differentiable any number of times.

    Args:
        x_TH: (T, H), bfloat16 or float16.
        weight: (E, H), the same dtype.
    """
    return call(_WideProduct, x_TH, weight)  # type: ignore[no-any-return]


def multiply(x_TH: Tensor, weight: Tensor) -> Tensor:
    """Return ``x_TH @ weight.T`` (T, E) in float32, not differentiable; for the forward of an ``autograd.Function``."""
    with without_autocast(x_TH.device.type):
        return torch.mm(x_TH, weight.t(), out_dtype=torch.float32)


def gradients_of(
    grad: Tensor, x_TH: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x_TH`` and ``weight`` for the logits' gradient ``grad`` (T, E), float32 or bfloat16."""
    if torch.is_grad_enabled():
        dx = call(_NarrowProduct, grad, weight) if needs_x else None
        return dx, call(_NarrowProduct, grad.t(), x_TH) if needs_weight else None
    with without_autocast(grad.device.type):
        if weight.dtype == torch.bfloat16:
            grad = grad.to(torch.bfloat16)  # one cast for both products
        dx = _narrow(grad, weight) if needs_x else None
        return dx, _narrow(grad.t(), x_TH) if needs_weight else None


class _WideProduct(torch.autograd.Function):
    """Computes x @ weight.T in float32, for 16-bit operands."""

    @staticmethod
    def forward(x_TH: Tensor, weight: Tensor) -> Tensor:
        return multiply(x_TH, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradients_of(grad, *ctx.saved_tensors, *ctx.needs_input_grad)


class _NarrowProduct(torch.autograd.Function):
    """Computes grad @ right in the 16-bit dtype of ``right``; its gradients are a wide and a narrow product."""

    @staticmethod
    def forward(grad: Tensor, right: Tensor) -> Tensor:
        with without_autocast(grad.device.type):
            return _narrow(grad, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, right = ctx.saved_tensors
        needs_grad, needs_right = ctx.needs_input_grad
        dgrad = call(_WideProduct, cotangent, right).to(grad.dtype) if needs_grad else None
        return dgrad, call(_NarrowProduct, grad.t(), cotangent) if needs_right else None


def _narrow(grad: Tensor, right: Tensor) -> Tensor:
    if right.dtype == torch.bfloat16:
        return torch.mm(grad.to(torch.bfloat16), right)
    return torch.mm(grad.float(), right.float()).to(right.dtype)


def is_one_node(x_TH: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`route` can take the operands: bfloat16 on a GPU, eager, with a gradient for the tokens."""
    return (
        x_TH.dtype == torch.bfloat16
        and x_TH.requires_grad
        and takes(x_TH, weight)
        and not torch.compiler.is_compiling()
        and not in_torch_func()
        and is_recorded(x_TH)
    )


def route(
    x_TH: Tensor, weight: Tensor, bias: Tensor | None, options: GateOptions, capacity: int | None, alone: bool
) -> tuple[Gate, Tensor, Tensor, Routing]:
    """Return the gate, the logits (T, E) in float32, the tokens for the experts, and their routing.

    The returned tokens have the values of ``x_TH``. The experts must use them instead of ``x_TH``, so that the gradient
    from the experts passes through this node.

    Args:
        x_TH: (T, H) bfloat16.
        weight: (E, H) bfloat16.
        bias: (E,) float32, added to the scores only for the choice; or None.
        options: the options of the gate.
        capacity: the maximum number of rows of an expert, or None.
        alone: true if only :func:`pymoe.ops.dispatch` uses the returned tokens. Then this node's backward adds in place
            to the gradient that the backward of ``dispatch`` returned, since nothing else can hold that tensor.
    """
    passed_TH, logits_TE, *chosen = call(_Route, x_TH, weight, bias, options, capacity, alone)
    return Gate(*chosen[:3]), logits_TE, passed_TH, Routing(*chosen[3:])


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        x_TH: Tensor, weight: Tensor, bias: Tensor | None, options: GateOptions, capacity: int | None, alone: bool
    ) -> tuple[Tensor, ...]:
        logits_TE = multiply(x_TH, weight)
        return x_TH.view_as(x_TH), logits_TE, *GATE_ROUTING(logits_TE, bias, *options, capacity)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x_TH, weight, bias, options, _, ctx.alone = inputs
        _, logits_TE, _, experts_TK, *others = output
        ctx.mark_non_differentiable(experts_TK, *others)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TH, weight, logits_TE, experts_TK)
        ctx.options = gate_backward_options(bias, options)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dx: Tensor | None, dlogits: Tensor | None, dweights: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x_TH, weight, logits_TE, experts_TK = ctx.saved_tensors
        needs_x, needs_weight, *others = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # true with create_graph=True
        if dweights is not None:
            narrow = dlogits is None and not again
            through_gate = gate_backward(dweights.contiguous(), logits_TE, experts_TK, ctx.options, narrow=narrow)
            dlogits = through_gate if dlogits is None else through_gate + dlogits
        dweight = None
        if dlogits is not None:
            adds_to_dx = dx is not None and needs_x and not again
            dlogits = dlogits if again else dlogits.to(torch.bfloat16)
            of_router, dweight = gradients_of(dlogits, x_TH, weight, needs_x and not adds_to_dx, needs_weight)
            if dx is not None and adds_to_dx:
                with without_autocast(weight.device.type):
                    dx = (dx.addmm_ if ctx.alone else dx.addmm)(dlogits, weight)
            elif of_router is not None:
                dx = of_router if dx is None else dx + of_router
        return dx if needs_x else None, dweight, *(None for _ in others)
