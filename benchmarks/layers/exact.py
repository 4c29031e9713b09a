"""Computes reference results of a block: in float64 for float32 blocks, in float32 for 16-bit blocks.

Rows of the output and of the input's gradient are computed for a sample of tokens, and gradients of weights for a
sample of experts, since a whole block in float64 would not fit into memory. Each contender is checked with its own
choice of experts: in 16 bits, routers that round differently choose differently, which is no error of the experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.layers.blocks import Built

TOKENS = 8
"""Number of tokens whose rows are compared."""
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps (T, H) tokens to (T, K) experts and (T, K) weights."""


@dataclass(frozen=True)
class Sample:
    """The exact values with which one call is compared."""

    tokens: Tensor
    """Indices of the compared tokens."""
    experts: tuple[int, ...]
    """Experts whose weight gradients are compared."""
    output: Tensor
    """(tokens, H)."""
    grad_x: Tensor | None = None
    """Input gradients of shape (tokens, H); only in training."""
    grad_weights: tuple[tuple[Tensor, Tensor], ...] = ()
    """For each compared expert, the gradients of ``gate_up_proj`` and ``down_proj``."""

    def error(self, output: Tensor, grad_x: Tensor | None = None, grads: tuple[Tensor, Tensor] | None = None) -> float:
        """Return the largest relative error: the Frobenius norm of a difference divided by the exact values' norm.

        Args:
            output: the output of all tokens, (T, H).
            grad_x: the input gradients of all tokens, (T, H); only in training.
            grads: the whole gradients of ``gate_up_proj`` and ``down_proj``; only in training.
        """
        pairs = [(output[self.tokens], self.output)]
        if self.grad_x is not None:
            assert grad_x is not None
            assert grads is not None
            pairs.append((grad_x[self.tokens], self.grad_x))
            for expert, wanted in zip(self.experts, self.grad_weights, strict=True):
                pairs += [(got[expert], one) for got, one in zip(grads, wanted, strict=True)]
        errors = [relative(got.detach(), wanted.detach()) for got, wanted in pairs]
        return max(errors, key=lambda one: (one != one, one))  # NaN counts as the largest


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference divided by the norm of ``wanted``."""
    return float((got.to(wanted.dtype) - wanted).norm() / wanted.norm().clamp_min(1e-30))


def sample(one: Built, choice: Choice, x: Tensor, grad: Tensor | None = None) -> Sample:
    """Compute the exact values for a call with tokens ``x`` (T, H); in training, ``grad`` is the gradient of the
    output.
    """
    wide = torch.float64 if one.dtype == torch.float32 else torch.float32
    count = len(x)
    tokens = torch.linspace(0, count - 1, min(TOKENS, count)).round().long()
    x = x.detach()
    if grad is None:
        with torch.no_grad():
            index, weights = choice(x)
            return Sample(tokens, (), mixture(one, x[tokens].to(wide), index[tokens], weights[tokens].to(wide)))
    x.requires_grad_()
    index, weights = choice(x)
    output = mixture(one, x[tokens].to(wide), index[tokens], weights[tokens].to(wide))
    (grad_x,) = torch.autograd.grad(output, x, grad[tokens].to(wide))
    load = index.flatten().long().bincount(minlength=one.block.experts)
    busiest, median = int(load.argmax()), int(load.argsort()[-(int((load > 0).sum()) + 1) // 2])
    experts = tuple(dict.fromkeys((busiest, median)))
    found = tuple(weight_gradients(one, e, x.detach(), index, weights.detach(), grad, wide) for e in experts)
    return Sample(tokens, experts, output.detach(), grad_x[tokens].to(wide), found)


def mixture(one: Built, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the block's output, (T, H), computed one expert at a time, including the shared expert."""
    output = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, place = (index == expert).nonzero(as_tuple=True)
        w_in, w_out = (weight[expert].detach().to(x.dtype) for weight in one.touched)
        rows = through(one, expert, x[token], w_in, w_out)
        output = output.index_add(0, token, rows * weights[token, place, None])
    if one.block.shared:
        shared = copy.deepcopy(one.module.shared_experts).to(x.dtype).requires_grad_(False)
        output = output + shared(x)
    return output


def through(one: Built, expert: int, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Apply an expert to the rows ``x``: two products with biases, and the gate between them."""
    experts = one.experts
    if not experts.is_transposed:
        w_in, w_out = w_in.T, w_out.T
    inner = x @ w_in
    if experts.has_bias:
        inner = inner + experts.gate_up_proj_bias[expert].detach().to(x.dtype)
    rows = experts._apply_gate(inner) @ w_out
    if experts.has_bias:
        rows = rows + experts.down_proj_bias[expert].detach().to(x.dtype)
    return rows


def weight_gradients(
    one: Built, expert: int, x: Tensor, index: Tensor, weights: Tensor, grad: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of an expert's two weights, summed over all of its tokens."""
    token, place = (index == expert).nonzero(as_tuple=True)
    w_in, w_out = (weight[expert].detach().to(wide).requires_grad_() for weight in one.touched)
    rows = through(one, expert, x[token].to(wide), w_in, w_out) * weights[token, place, None].to(wide)
    of_in, of_out = torch.autograd.grad(rows, (w_in, w_out), grad[token].to(wide))
    return of_in, of_out
