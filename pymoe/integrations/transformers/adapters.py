"""Low-rank adapters of experts, as products with rows: ``rows @ down[e].T @ up[e].T`` next to the experts' products.

A wrapper around an experts module :func:`lends <lend>` it adapters for one call; the implementation of the experts
:func:`takes <take>` them. Nothing as large as the experts' weights is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pymoe.nn.apply_experts import Activation, Networks, activate
from pymoe.nn.low_rank import LowRank, add_adapters

_LENT = "_pymoe_adapters"
"""Name of an attribute that an experts module has during a call, before its forward takes the adapters."""


Adapters = dict[str, list[LowRank]]
"""The active adapters of stacked weights, by the names of their parameters."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Takes rows (S, H), sorted by expert, their offsets (E + 1,) and a bias (E, N) or None; returns rows (S, N)."""


@contextmanager
def lend(experts: Any, name: str, adapters: list[LowRank]) -> Iterator[None]:
    """Give the stacked weight ``name`` of an experts module adapters for one call of the module.

    Raises:
        RuntimeError: the call came to its end, and did not use the adapters; or another call is running, as of another
            thread, which might take them.
    """
    lent = experts.__dict__.setdefault(_LENT, {})
    if name in lent:
        raise RuntimeError(
            f"experts_implementation='pymoe' ({type(experts).__name__}): expected one call of experts with adapters at "
            f"a time, got another one while a call was running, as two threads make them"
        )
    lent[name] = adapters
    try:
        yield
    finally:
        left = take(experts)
    if left:
        raise RuntimeError(
            f"experts_implementation='pymoe' ({type(experts).__name__}): expected a call of the experts' forward, "
            f"which adds the adapters of {', '.join(left)}, got a forward that did not"
        )


def take(experts: Any) -> Adapters:
    """Return the adapters that were lent to an experts module, once."""
    adapters: Adapters = experts.__dict__.pop(_LENT, None) or {}
    return adapters


def adapted(product: Product, adapters: Sequence[LowRank]) -> Product:
    """Return a product to which adapters are added, in the dtype of its rows."""

    def with_adapters(rows: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        return add_adapters(product(rows, offsets, bias), rows, offsets, adapters)

    return with_adapters if adapters else product


def networks_of(
    first: Product,
    second: Product,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: Activation,
    post_norm: Callable[[Tensor], Tensor] | None,
) -> Networks:
    """Return the networks that two products and an activation between them make, for :func:`apply_networks` to call.

    Args:
        first: from rows (S, H) to rows (S, N).
        second: from rows (S, F) to rows (S, H).
        b_in: (E, N), or None.
        b_out: (E, H), or None.
        activation: from rows (S, N) to rows (S, F).
        post_norm: a function of rows (S, H) that is applied to the result, or None.
    """

    def networks(rows: Tensor, offsets: Tensor) -> Tensor:
        rows = second(activate(first(rows, offsets, b_in), activation), offsets, b_out)
        return rows if post_norm is None else post_norm(rows)

    return networks
