"""Experts of transformers with quantised weights, as :func:`pymoe.nn.quantize_experts` makes them.

The experts module stays; a :class:`pymoe.nn.QuantizedLinear` replaces each of its stacked weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pymoe._common.types import cast_operands
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import followed_by_cast
from pymoe.integrations.transformers.adapters import adapted, networks_of
from pymoe.nn import QuantizedLinear, apply_experts
from pymoe.nn.apply_experts import Activation, apply_networks
from pymoe.nn.low_rank import LowRank
from pymoe.nn.plain_calls import are_called_plainly
from pymoe.nn.quantized_experts import handlers


def register() -> None:
    """Make :func:`pymoe.nn.quantize_experts` find the experts of transformers. Further calls change nothing."""
    if stacked_weights not in handlers:
        handlers.append(stacked_weights)


def stacked_weights(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the weights of an experts module as (E, out, in), by the names of their parameters.

    Return None for modules that are not behind transformers' experts interface, or in which a weight is not a
    floating-point tensor with three dimensions, for instance because it is already quantised.

    Raises:
        ValueError: the module runs an implementation other than pymoe's, which could not read quantised weights.
    """
    if not interface.is_behind(module):
        return None
    flags = interface.flags(module)
    names = ("gate_up_proj" if flags.gated else "up_proj", "down_proj")
    # Use getattr, because it also finds a weight that is parametrized.
    weights = {name: getattr(module, name, None) for name in names}
    if not all(
        isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 3 for weight in weights.values()
    ):
        return None
    if interface.implementation(module.config) != interface.NAME:
        raise ValueError(
            f"quantize_experts: model must run with experts_implementation='pymoe', got "
            f"{interface.implementation(module.config)!r}; call model.set_experts_implementation('pymoe') first"
        )
    return {
        name: weight.transpose(1, 2) if flags.transposed else weight
        for name, weight in weights.items()
        if weight is not None
    }


def run_quantized_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    w_in: QuantizedLinear,
    w_out: QuantizedLinear,
    activation: Activation,
    *,
    b_in: Tensor | None,
    b_out: Tensor | None,
    post_norm: Callable[[Tensor], Tensor] | None,
    foreign_experts: bool,
    adapters_in: Sequence[LowRank],
    adapters_out: Sequence[LowRank],
) -> Tensor:
    """Run :func:`pymoe.nn.apply_experts` with quantised weights; the arguments are those of ``run_experts``.

    Rows are cast as autocast requires, and keep their dtype without it; float64 becomes float32. If one of the two
    layers has hooks or is an instance of a subclass, both layers are called as modules, so that the hooks or the code
    of the subclass run.
    """
    operand: Any
    (operand,) = cast_operands(x.float() if x.dtype == torch.float64 else x)
    b_in, b_out = (None if bias is None else bias.to(operand.dtype) for bias in (b_in, b_out))
    if callable(activation):
        activation = followed_by_cast(activation, operand.dtype)
    adapters = bool(adapters_in or adapters_out)
    parts = (w_in, QuantizedLinear), (w_out, QuantizedLinear)
    if post_norm is None and not adapters and are_called_plainly(*parts):
        y = apply_experts(
            *(operand, index, weights, w_in.weight, w_out.weight),
            b_in=b_in,
            b_out=b_out,
            activation=activation,
            foreign_experts=foreign_experts,
        )
    else:
        first, second = adapted(w_in, adapters_in), adapted(w_out, adapters_out)
        networks = networks_of(first, second, b_in, b_out, activation, post_norm)
        y = apply_networks(operand, index, weights, w_in.num_experts, networks, foreign_experts=foreign_experts)
    return y.to(x.dtype)
