"""Counting the slots of each expert once a training step, under activation checkpointing too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _CountOnBackward(torch.autograd.Function):
    @staticmethod
    def forward(weights: Tensor, load: Tensor, total: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, load, total = inputs
        ctx.save_for_backward(load)
        ctx.total = total  # not saved: other micro-batches add to it before this one's backward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (load,) = ctx.saved_tensors
        ctx.total.add_(load)
        return grad, None, None


def count_on_backward(weights: Tensor, load: Tensor, total: Tensor) -> Tensor:
    """Pass ``weights`` on, and add ``load`` to ``total`` when their gradient comes back.

    A forward may run any number of times for one training step: activation checkpointing runs it again during the
    backward, a pipeline or a remote expert may run it without gradients first. The gradient passes exactly once. So
    what is counted here is the load of the tokens that were trained on, whoever re-runs the forward, and nothing has
    to detect a recomputation. In-place addition in a backward also compiles into one graph.

    Each backward counts: a graph that is kept (``retain_graph=True``, ``create_graph=True``) and run twice counts its
    tokens twice.

    Args:
        weights: (T, K), the weights of a gate.
        load: (E,) int32.
        total: (E,) int64, added to in place.

    Returns:
        (T, K), the values of ``weights``.
    """
    passed: Tensor = _CountOnBackward.apply(weights, load, total)
    return passed
