"""The router's product and its gate as one node of autograd, whose backward asks a GPU for two products and a kernel.

As two nodes they pass the gradient of the logits between them in the logits' dtype, float32, and the gradient of the
tokens is added to that of the experts: a cast and an addition more. Here the kernel of the gate's backward writes the
gradient of the logits in bfloat16, as :mod:`pymoe.nn.router_product` multiplies it, and that product adds to the
gradient that the experts have left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import Gate, Routing
from pymoe._transforms import in_torch_func
from pymoe.nn.router_product import gradients_of, multiply, takes, without_autocast
from pymoe.ops.function_calls import call, is_recorded
from pymoe.ops.gate_topk import GATE_ROUTING, Options, backward_options, gate_backward


def is_one_node(x_TH: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`route` serves this call: in bfloat16 on a GPU, eager, with gradients of the tokens."""
    return (
        x_TH.dtype == torch.bfloat16
        and x_TH.requires_grad
        and takes(x_TH, weight)
        and not torch.compiler.is_compiling()
        and not in_torch_func()
        and is_recorded(x_TH)
    )


def route(
    x_TH: Tensor, weight: Tensor, bias: Tensor | None, options: Options, capacity: int | None, alone: bool
) -> tuple[Gate, Tensor, Tensor, Routing]:
    """Return the gate, the logits (T, E) in float32, the tokens as the experts are to take them, and their routing.

    Args:
        x_TH: (T, H) bfloat16.
        weight: (E, H) bfloat16.
        bias: (E,) float32, added to the scores for the choice alone; or None.
        options: of the gate.
        capacity: the most slots that an expert takes, or None.
        alone: whether :func:`pymoe.ops.dispatch` is all that takes the returned tokens. What its backward has just
            made is then added to in place: nothing else can hold it.
    """
    passed_TH, logits_TE, *chosen = call(_Route, x_TH, weight, bias, options, capacity, alone)
    return Gate(*chosen[:3]), logits_TE, passed_TH, Routing(*chosen[3:])


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        x_TH: Tensor, weight: Tensor, bias: Tensor | None, options: Options, capacity: int | None, alone: bool
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
        ctx.options = backward_options(bias, options)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dx: Tensor | None, dlogits: Tensor | None, dweights: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x_TH, weight, logits_TE, experts_TK = ctx.saved_tensors
        needs_x, needs_weight, *others = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # the gradients are to be differentiated
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
