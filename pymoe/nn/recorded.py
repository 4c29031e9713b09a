"""The experts of a mixture, with or without the gate that chooses them, as one node of autograd.

One operator after the other is one node after the other, and for a few tokens the way to each of them takes longer than
its kernel. This node makes one native call, which runs the same kernels, and its backward pass runs those of the
operators' backward passes: gradients have the same bits. They may be differentiated again. For that,
what one operator makes and the next one saves is an output of the node, too, whose gradient a second backward pass
brings.

The node is for eager code outside of transforms: see :func:`is_one_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pymoe import _torch_canaries as canaries
from pymoe import _torch_private as private
from pymoe.ops.combine import COMBINE_BACKWARD, CombineBackward
from pymoe.ops.expert_activation import EXPERT_ACTIVATION_BACKWARD, ExpertActivation, KernelOptions
from pymoe.ops.function_calls import apply, call, is_differentiated, is_recorded, is_transformed
from pymoe.ops.gate_topk import GATE_TOPK_BACKWARD, GateTopkBackward, Options, backward_options
from pymoe.ops.grouped_linear import (
    BIAS_GRAD,
    GROUPED_LINEAR,
    WEIGHT_GRAD,
    BiasGrad,
    GroupedLinear,
    WeightGrad,
    weight_grad,
)
from pymoe.ops.row_moves import COMBINE, SumChoices
from pymoe.reference.scores import accumulate_dtype

APPLY_EXPERTS_RECORDED = torch.ops.pymoe.apply_experts_recorded.default
APPLY_CHOSEN_EXPERTS_RECORDED = torch.ops.pymoe.apply_chosen_experts_recorded.default

Parameters = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""w_in, b_in, w_out, b_out."""


def is_one_call(*values: Any) -> bool:
    """Return whether experts may be one native call, and one node if one of ``values`` requires a gradient.

    They may not where autograd has to see the operators in between: inside a transform, in a graph that is being
    compiled with gradients, and where :func:`saved_tensors_are_hooked`.
    """
    if is_compiling():
        return not is_recorded(*values)
    return not is_transformed() and not (is_differentiated(*values) and saved_tensors_are_hooked())


def saved_tensors_are_hooked() -> bool:
    """Return whether somebody takes the tensors that nodes save, such as ``torch.utils.checkpoint``.

    A checkpoint compares what a recomputation saves with what the forward saved. So the nodes must be the same in both
    where something stood between the parts of a layer in one of them alone, such as a hook that was removed in between.
    """
    canaries.thread_states()
    return private.top_saved_tensors_default_hooks(True) is not None


def apply_experts_recorded(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    parameters: Parameters,
    activation: KernelOptions,
    capacity: int | None,
    foreign_experts: bool,
) -> Tensor:
    """Return (T, O): the arguments are those of the native ``apply_experts``."""
    y: Tensor = apply(_Experts, x, weights, *parameters, experts, activation, capacity, foreign_experts)[0]
    return y


def apply_chosen_experts_recorded(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    options: Options,
    parameters: Parameters,
    activation: KernelOptions,
    capacity: int | None,
) -> tuple[Tensor, Tensor]:
    """Return (T, O) and the load (E,): the arguments are those of the native ``apply_chosen_experts``."""
    y, load, *_ = apply(_ChosenExperts, x, logits, *parameters, bias, options, activation, capacity)
    return y, load


class _Operators(NamedTuple):
    """The operators that a backward pass runs."""

    combine_backward: Callable[..., tuple[Tensor, Tensor]]
    product: Callable[..., Tensor]
    weight_product: Callable[..., Tensor]
    bias_grad: Callable[..., Tensor]
    activation_backward: Callable[..., Tensor]
    sum_choices: Callable[..., Tensor]
    gate_backward: Callable[..., Tensor]


def _activation_backward(grad: Tensor, h: Tensor, *options: Any) -> Tensor:
    context = SimpleNamespace(saved_tensors=(h,), options=options)
    return ExpertActivation.backward(context, grad)[0]  # type: ignore[return-value]


_FUNCTIONS = _Operators(
    partial(call, CombineBackward),
    partial(call, GroupedLinear),
    partial(call, WeightGrad),
    partial(call, BiasGrad),
    _activation_backward,
    partial(call, SumChoices),
    partial(call, GateTopkBackward),
)
"""The Functions of the operators, for a backward pass that is recorded, compiled or transformed in turn."""

_KERNELS = _Operators(
    COMBINE_BACKWARD,
    GROUPED_LINEAR,
    WEIGHT_GRAD,
    BIAS_GRAD,
    EXPERT_ACTIVATION_BACKWARD,
    lambda rows, slot, *_: COMBINE(rows, slot, None),
    GATE_TOPK_BACKWARD,
)
"""What the same Functions run in the end."""


class _Node(torch.autograd.Function):
    """What both nodes share. Their first arguments: x, what the weights come from, w_in, b_in, w_out and b_out."""

    # A pipeline may ask for the gradients of the parameters later: pymoe.pipe.split_backward.
    backward_in_parts = True

    @staticmethod
    def keep(ctx: Any, *saved: Tensor, activation: KernelOptions, whole: bool) -> None:
        """Save what the backward pass reads: see :meth:`go_back`."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.activation, ctx.whole = activation, whole
        ctx.asked, ctx.left = ctx.needs_input_grad, None

    @staticmethod
    def saved(ctx: Any) -> list[Tensor]:
        """Return what :meth:`keep` saved, which the graph lets go of unless it is kept; and choose the operators."""
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        ctx.run = _KERNELS if not torch.is_grad_enabled() and is_one_call() else _FUNCTIONS
        return saved

    @staticmethod
    def go_back(
        ctx: Any,
        saved: list[Tensor],
        dy: Tensor | None,
        drows: Tensor | None,
        dinner: Tensor | None,
        dactive: Tensor | None,
        douter: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the weights, and of w_in, b_in, w_out and b_out.

        Args:
            ctx: of the node.
            saved: rows, inner, active, outer, weights, slot, token, offsets, w_in and w_out. The list is emptied, so
                that each is freed as early as by a node of its own.
            dy: the gradients of the outputs y, rows, inner, active and outer. Only a second backward pass has others
                than the first.
            drows: see ``dy``.
            dinner: see ``dy``.
            dactive: see ``dy``.
            douter: see ``dy``.
        """
        rows, inner, active, outer, weights, slot, token, offsets, w_in, w_out = saved
        saved.clear()
        run, whole = ctx.run, ctx.whole
        need_x, need_weights, need_w_in, need_b_in, need_w_out, need_b_out = needs = ctx.needs_input_grad[:6]
        need_inner = need_x or need_w_in or need_b_in
        need_outer = need_inner or need_w_out or need_b_out
        dx = dweights = dw_in = db_in = dw_out = db_out = None
        if ctx.left is not None:  # the parameters' part of a backward pass in two parts
            (dinner, douter), dy, need_inner = ctx.left, None, False
        if dy is not None and (need_outer or need_weights):
            grads = run.combine_backward(dy.contiguous(), outer, weights, slot, offsets, need_outer, need_weights)
            douter = _added(douter, grads[0] if need_outer else None)
            dweights = grads[1] if need_weights else None
        del outer
        if douter is not None:
            if need_inner:
                dactive = _added(dactive, run.product(douter, w_out.transpose(1, 2), offsets, None, None, whole))
            if need_w_out:
                dw_out = weight_grad(douter, active, offsets, None, whole, w_out, run.weight_product)
            if need_b_out:
                db_out = run.bias_grad(douter, offsets, None)
        del active
        if dactive is not None and need_inner:
            dinner = _added(dinner, run.activation_backward(dactive.contiguous(), inner, *ctx.activation))
        del inner, dactive
        if need_x and needs != ctx.asked[:6]:  # the first part of two: the second starts from these
            ctx.left = (dinner, douter)
        del douter
        if dinner is not None:
            if need_x:
                drows = _added(drows, run.product(dinner, w_in.transpose(1, 2), offsets, None, None, whole))
            if need_w_in:
                dw_in = weight_grad(dinner, rows, offsets, None, whole, w_in, run.weight_product)
            if need_b_in:
                db_in = run.bias_grad(dinner, offsets, None)
        if drows is not None and need_x:
            dx = run.sum_choices(drows.contiguous(), slot, token, offsets)
        return dx, dweights, dw_in, db_in, dw_out, db_out


class _Experts(_Node):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        experts: Tensor,
        activation: KernelOptions,
        capacity: int | None,
        foreign: bool,
    ) -> tuple[Tensor, ...]:
        kind, *numbers = activation
        y, rows, inner, active, outer, slot, token, offsets = APPLY_EXPERTS_RECORDED(
            x, experts, weights, w_in, b_in, w_out, b_out, kind, capacity, foreign, *numbers
        )
        saved = (rows, inner, active, outer, weights, slot, token, offsets, w_in, w_out)
        _Node.keep(ctx, *saved, activation=activation, whole=capacity is None and not foreign)
        return y, rows, inner, active, outer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_Node.go_back(ctx, _Node.saved(ctx), *grads), None, None, None, None


class _ChosenExperts(_Node):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        logits: Tensor,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        bias: Tensor | None,
        options: Options,
        activation: KernelOptions,
        capacity: int | None,
    ) -> tuple[Tensor, ...]:
        kind, *numbers = activation
        y, rows, inner, active, outer, slot, token, offsets, load, weights, experts = APPLY_CHOSEN_EXPERTS_RECORDED(
            x, logits, bias, *options, w_in, b_in, w_out, b_out, kind, capacity, *numbers
        )
        saved = (rows, inner, active, outer, weights, slot, token, offsets, w_in, w_out, logits, experts)
        _Node.keep(ctx, *saved, activation=activation, whole=capacity is None)
        ctx.mark_non_differentiable(load)
        ctx.chosen_by = bias, options
        return y, load, rows, inner, active, outer, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dy, _, drows, dinner, dactive, douter, dweights = grads
        *saved, logits, experts = _Node.saved(ctx)
        dx, through, *of_parameters = _Node.go_back(ctx, saved, dy, drows, dinner, dactive, douter)
        dlogits, dweights = None, _added(dweights, through)
        if dweights is not None and ctx.needs_input_grad[1]:
            options = backward_options(*ctx.chosen_by)
            dlogits = ctx.run.gate_backward(dweights.contiguous(), logits, experts, *options)
        return dx, dlogits, *of_parameters, None, None, None, None


def _added(given: Tensor | None, through: Tensor | None) -> Tensor | None:
    return through if given is None else given if through is None else given + through


@torch.library.register_fake("pymoe::apply_experts_recorded")
def _(
    x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor, b_in: Any, w_out: Tensor, b_out: Any, kind: int, *_: Any
) -> tuple[Tensor, ...]:
    return _shapes(x, experts.shape[0], experts.shape[1], w_in, w_out)


@torch.library.register_fake("pymoe::apply_chosen_experts_recorded")
def _(x: Tensor, logits: Tensor, bias: Any, k: int, *others: Any) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    chosen = logits.new_empty((tokens, k), dtype=torch.int32)
    weights = logits.new_empty((tokens, k), dtype=accumulate_dtype(logits.dtype))
    load = logits.new_empty((experts,), dtype=torch.int32)
    return *_shapes(x, tokens, k, others[5], others[7]), load, weights, chosen


def _shapes(x: Tensor, tokens: int, choices: int, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, ...]:
    """Return y, rows, inner, active, outer, slot, token and offsets without values."""
    rows = tokens * choices
    floating = ((tokens, w_out.shape[1]), (rows, x.shape[1]), (rows, w_in.shape[1]), (rows, w_out.shape[2]))
    indices = ((tokens, choices), (rows,), (w_in.shape[0] + 1,))
    return (
        *(x.new_empty(shape) for shape in (*floating, (rows, w_out.shape[1]))),
        *(x.new_empty(shape, dtype=torch.int32) for shape in indices),
    )
