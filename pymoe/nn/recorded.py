"""Runs the experts of a layer, with or without the gate that chooses them, as one autograd node.

Separate operators are separate nodes, and for a few tokens the overhead of a node exceeds the run time of its kernel.
This node runs the same kernels in one native call, and its backward runs the kernels of the operators' backward passes,
so outputs and gradients have the same bits. Gradients can be differentiated again: for that purpose the node also
returns the intermediate tensors between the operators, which get gradients in a second backward pass.

The node is for eager code outside of transforms, on the CPU: see :func:`is_one_node`. On a GPU the operators run one
after the other, each with its own node, except that the router's product, its gate and the routing are one node
(:mod:`pymoe.nn.router_product`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pymoe import _torch_canaries as canaries
from pymoe import _torch_private as private
from pymoe._common.types import ActivationOptions, GateOptions, accumulate_dtype, gate_backward_options
from pymoe.nn.losses import Injected
from pymoe.ops.combine import COMBINE_BACKWARD, CombineBackward
from pymoe.ops.expert_activation import EXPERT_ACTIVATION_BACKWARD, activation_backward
from pymoe.ops.function_calls import apply, call, is_transformed
from pymoe.ops.gate_topk import GATE_TOPK_BACKWARD, GateTopkBackward
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

APPLY_EXPERTS_RECORDED = torch.ops.pymoe.apply_experts_recorded.default
APPLY_CHOSEN_EXPERTS_RECORDED = torch.ops.pymoe.apply_chosen_experts_recorded.default

Parameters = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""w_in, b_in, w_out, b_out."""


def is_one_node(x: Tensor) -> bool:
    """Return whether a call with gradients, outside of transforms, may be one node.

    The call must be on the CPU, without saved-tensor hooks and outside of ``torch.jit.trace``.

    Saved-tensor hooks, such as those of ``torch.utils.checkpoint``, receive the tensors that nodes save. A checkpoint
    requires that the recomputation saves the same tensors as the forward, so both must run the same nodes. A layer does
    not use the one node while one of its submodules has a module hook. If such a hook were removed between the forward
    and the recomputation, the two would run different nodes, and the checkpoint would fail.

    ``torch.jit.trace`` only follows the tensors that are direct arguments of a node. Everything else would become a
    constant: here the logits, which are inside a tuple, and the load that is counted.
    """
    canaries.thread_states()
    traces = torch.jit.is_tracing()  # type: ignore[attr-defined]  # public, and documented, but not in an __all__
    return x.is_cpu and private.top_saved_tensors_default_hooks(True) is None and not traces


def apply_experts_recorded(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    parameters: Parameters,
    activation: ActivationOptions,
    capacity: int | None,
    foreign_experts: bool,
) -> Tensor:
    """Return the output (T, O). The arguments are those of the native ``apply_experts``."""
    y: Tensor = apply(_Experts, x, weights, *parameters, experts, activation, capacity, foreign_experts)[0]
    return y


def apply_chosen_experts_recorded(
    x: Tensor,
    logits: Tensor,
    carrier: Tensor,
    bias: Tensor | None,
    options: GateOptions,
    parameters: Parameters,
    activation: ActivationOptions,
    capacity: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the output (T, O) and the load (E,).

    All arguments except ``carrier`` are those of the native ``apply_chosen_experts``. ``carrier`` has the values of
    ``logits``, and gets the gradient that flows back through the weights of the choice. It is ``logits`` itself, or a
    result of :func:`count_and_inject`.
    """
    # Hide the logits in a tuple, so that autograd does not see them as an input: the node returns no gradient for them,
    # and compiled autograd cannot add a missing gradient to the gradients that the logits get from elsewhere.
    read = (private.unwrap_if_dead(logits),)
    y, load, *_ = apply(_ChosenExperts, x, carrier, *parameters, read, bias, options, activation, capacity)
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


_FUNCTIONS = _Operators(
    partial(call, CombineBackward),
    partial(call, GroupedLinear),
    partial(call, WeightGrad),
    partial(call, BiasGrad),
    activation_backward,
    partial(call, SumChoices),
    partial(call, GateTopkBackward),
)
"""The Functions of the operators, for a backward pass that is itself recorded, compiled or transformed."""

_KERNELS = _Operators(
    COMBINE_BACKWARD,
    GROUPED_LINEAR,
    WEIGHT_GRAD,
    BIAS_GRAD,
    EXPERT_ACTIVATION_BACKWARD,
    lambda rows, slot, *_: COMBINE(rows, slot, None),
    GATE_TOPK_BACKWARD,
)
"""The native operators that the Functions in ``_FUNCTIONS`` run."""


class _Needs(NamedTuple):
    """For each of a node's first six arguments, whether its gradient is needed.

    ``weights`` is the weights of the choices; for :class:`_ChosenExperts` it is the logits that determine them.
    """

    x: bool
    weights: bool
    w_in: bool
    b_in: bool
    w_out: bool
    b_out: bool


class _Node(torch.autograd.Function):
    """Base class of both autograd nodes of this module. :class:`_Needs` names the first six arguments of a node.

    Several threads may run the backward of a retained graph at once, so a backward pass stores nothing on ``ctx``. The
    only exception is the first part of a pass in two parts (:mod:`pymoe.pipe.split_backward`): a graph has only one
    such pass.
    """

    # Tells pipelines that they may compute the gradients of the parameters later than those of the inputs.
    backward_in_parts = True
    takes_missing_gradients = True

    @staticmethod
    def keep(
        ctx: Any,
        steps: tuple[Tensor, ...],
        weights: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        *others: Tensor,
        activation: ActivationOptions,
        whole: bool,
    ) -> None:
        """Save what the backward may need: tensors in the order of :meth:`go_back`'s ``saved``, then ``others``."""
        rows, inner, active, outer, slot, token, offsets = steps
        ctx.asked = ctx.needs_input_grad
        needs = _Needs(*ctx.asked[:6])
        need_inner = needs.x or needs.w_in or needs.b_in
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            rows if needs.w_in else None,
            inner if need_inner else None,
            active if needs.w_out else None,
            outer,
            weights,
            slot,
            token if needs.x else None,
            offsets,
            w_in if needs.x else None,
            w_out if need_inner else None,
            *others,
        )
        ctx.activation, ctx.whole = activation, whole
        ctx.strides = w_in.stride(), w_out.stride()
        ctx.left = None

    @staticmethod
    def start(ctx: Any) -> tuple[_Operators, list[Any]]:
        """Return the operators for a backward pass, and the tensors that :meth:`keep` saved.

        Remove the saved tensors from the node, unless the graph is retained.
        """
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        plain = not (torch.is_grad_enabled() or is_compiling() or is_transformed())
        return _KERNELS if plain else _FUNCTIONS, saved

    @staticmethod
    def go_back(
        ctx: Any,
        run: _Operators,
        saved: list[Any],
        dy: Tensor | None,
        drows: Tensor | None,
        dinner: Tensor | None,
        dactive: Tensor | None,
        douter: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weights, w_in, b_in, w_out and b_out; None for those that are not needed.

        Each tensor is freed as early as it would be by separate nodes, so the peak memory is the same.

        Args:
            ctx: the context of the node.
            run: the operators.
            saved: rows, inner, active, outer, weights, slot, token, offsets, w_in and w_out. The list is emptied.
            dy: the gradient of the output y.
            drows: the gradient of the output rows; given only in a second backward pass, like the next three.
            dinner: the gradient of the output inner.
            dactive: the gradient of the output active.
            douter: the gradient of the output outer.
        """
        rows, inner, active, outer, weights, slot, token, offsets, w_in, w_out = saved
        saved.clear()
        whole, needs = ctx.whole, _Needs(*ctx.needs_input_grad[:6])
        need_inner = needs.x or needs.w_in or needs.b_in
        need_outer = need_inner or needs.w_out or needs.b_out
        in_parts = needs != ctx.asked[:6]
        dx = dweights = dw_in = db_in = dw_out = db_out = None
        if in_parts and not needs.x and ctx.left is not None:  # the second part continues where the first ended
            (dinner, douter), ctx.left = ctx.left, None
            dy, need_inner = None, False
        if dy is not None and (need_outer or needs.weights):
            made, dweights = run.combine_backward(
                dy.contiguous(), outer, weights, slot, offsets, need_outer, needs.weights, None
            )
            douter = _added(douter, made if need_outer else None)
            dweights = dweights if needs.weights else None
            del made
        del outer
        if douter is not None:
            if need_inner:
                dactive = _added(dactive, run.product(douter, w_out.transpose(1, 2), offsets, None, None, whole))
            if needs.w_out:
                dw_out = weight_grad(douter, active, offsets, None, whole, ctx.strides[1], run.weight_product)
            if needs.b_out:
                db_out = run.bias_grad(douter, offsets, None)
        left = douter if in_parts and needs.x else None
        del active, douter
        if dactive is not None and need_inner:
            dinner = _added(dinner, run.activation_backward(dactive.contiguous(), inner, *ctx.activation))
        del inner, dactive
        if in_parts and needs.x:
            ctx.left = dinner, left
        if dinner is not None:
            if needs.x:
                drows = _added(drows, run.product(dinner, w_in.transpose(1, 2), offsets, None, None, whole))
            if needs.w_in:
                dw_in = weight_grad(dinner, rows, offsets, None, whole, ctx.strides[0], run.weight_product)
            if needs.b_in:
                db_in = run.bias_grad(dinner, offsets, None)
        del rows, dinner, left
        if drows is not None and needs.x:
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
        activation: ActivationOptions,
        capacity: int | None,
        foreign: bool,
    ) -> tuple[Tensor, ...]:
        kind, *numbers = activation
        y, *steps = APPLY_EXPERTS_RECORDED(
            x, experts, weights, w_in, b_in, w_out, b_out, kind, capacity, foreign, *numbers
        )
        whole = capacity is None and not foreign
        _Node.keep(ctx, tuple(steps), weights, w_in, w_out, activation=activation, whole=whole)
        return y, *steps[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_Node.go_back(ctx, *_Node.start(ctx), *grads), None, None, None, None


class _ChosenExperts(_Node):
    """Runs the gate and the experts that it chooses. The node gets the logits twice: as ``carrier`` and in ``read``.

    Its backward computes the gradient of the logits from those in ``read``, and returns it for ``carrier``, where
    :func:`count_and_inject` acts on it. A second backward pass gives the logits in ``read`` a gradient directly, so it
    neither counts nor injects again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        carrier: Tensor,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        read: tuple[Tensor],
        bias: Tensor | None,
        options: GateOptions,
        activation: ActivationOptions,
        capacity: int | None,
    ) -> tuple[Tensor, ...]:
        (logits,) = read
        kind, *numbers = activation
        y, *steps, load, weights, experts = APPLY_CHOSEN_EXPERTS_RECORDED(
            x, logits, bias, *options, w_in, b_in, w_out, b_out, kind, capacity, *numbers
        )
        of_gate = (logits, experts) if ctx.needs_input_grad[1] else (None, None)
        whole = capacity is None
        _Node.keep(ctx, tuple(steps), weights, w_in, w_out, *of_gate, activation=activation, whole=whole)
        ctx.mark_non_differentiable(load)
        ctx.chosen_by = gate_backward_options(bias, options)
        return y, load, *steps[:4], weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dy, _, drows, dinner, dactive, douter, dweights = grads
        del grads
        run, saved = _Node.start(ctx)
        experts, logits = saved.pop(), saved.pop()  # torch 2.11 traces `*saved, logits, experts = ...` wrongly
        dx, through, *of_parameters = _Node.go_back(ctx, run, saved, dy, drows, dinner, dactive, douter)
        dlogits, dweights = None, _added(dweights, through)
        if dweights is not None and ctx.needs_input_grad[1]:
            dlogits = run.gate_backward(dweights.contiguous(), logits, experts, *ctx.chosen_by)
        return dx, dlogits, *of_parameters, None, None, None, None, None


def _added(given: Tensor | None, through: Tensor | None) -> Tensor | None:
    return through if given is None else given if through is None else given + through


class _CountAndInject(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, load: list[Tensor], total: Tensor | None, injected: Injected | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.load, ctx.total, ctx.injected = load, total, injected
        if injected is not None:
            ctx.save_for_backward(logits)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is not None:
            (load,) = ctx.load
            if ctx.total is not None:
                ctx.total.add_(load)
            if ctx.injected is not None:
                grad = grad + ctx.injected.gradient(*ctx.saved_tensors, load)
        return grad, None, None, None


def count_and_inject(logits: Tensor, load: list[Tensor], total: Tensor | None, injected: Injected | None) -> Tensor:
    """Return the values of ``logits``. The backward of the result counts the load and injects the losses.

    This backward adds the load to ``total``, and the gradient of the injected losses to that of ``logits``.

    Counting works as in :func:`pymoe.nn.local_tensors.count_on_backward`, but that function wraps the gate's weights.
    Here, they exist only inside the node of :func:`apply_chosen_experts_recorded`. The output of that node cannot be
    wrapped either, because the caller may change it in place.

    Args:
        logits: (T, E), from which a gate will choose.
        load: an empty list, to which the caller appends the load (E,) before the backward pass.
        total: (E,) int64, to which the backward pass adds the load; None counts nothing.
        injected: the factors of the injected losses, or None.
    """
    passed: Tensor = apply(_CountAndInject, logits, load, total, injected)
    return passed


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
    """Return uninitialised tensors with the shapes of y, rows, inner, active, outer, slot, token and offsets."""
    rows = tokens * choices
    floating = ((tokens, w_out.shape[1]), (rows, x.shape[1]), (rows, w_in.shape[1]), (rows, w_out.shape[2]))
    indices = ((tokens, choices), (rows,), (w_in.shape[0] + 1,))
    return (
        *(x.new_empty(shape) for shape in (*floating, (rows, w_out.shape[1]))),
        *(x.new_empty(shape, dtype=torch.int32) for shape in indices),
    )
