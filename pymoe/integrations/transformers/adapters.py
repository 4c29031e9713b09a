"""Low-rank adapters of experts: ``scaling * rows @ down[e].T @ up[e].T`` is added to the products of expert e.

A wrapper around an experts module :func:`lends <lend>` the module adapters for one call; the implementation of the
experts :func:`takes <take>` them. No tensor as large as the experts' weights is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pymoe.nn.apply_experts import Activation, Networks, activate
from pymoe.nn.low_rank import LowRank, add_adapters

_LENT = "_pymoe_adapters"
"""Name of the attribute in which an experts module has the adapters until its forward takes them."""


Adapters = dict[str, list[LowRank]]
"""The active adapters of stacked weights, by the names of their parameters."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that takes rows (S, H) sorted by expert, their offsets (E + 1,), and a bias (E, N) or None; it returns
rows (S, N)."""


@contextmanager
def lend(experts: Any, name: str, adapters: list[LowRank]) -> Iterator[None]:
    """Lend adapters for the stacked weight ``name`` to an experts module, for one call of the module.

    Raises:
        RuntimeError: the call returned without taking the adapters; or another call with adapters for ``name`` is
            running, for instance in another thread.
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
    """Remove the adapters that were lent to an experts module, and return them; return {} if there are none."""
    adapters: Adapters = experts.__dict__.pop(_LENT, None) or {}
    return adapters


def adapted(product: Product, adapters: Sequence[LowRank]) -> Product:
    """Return ``product`` plus the products with the adapters, or ``product`` itself if there are no adapters."""

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
    """Return a function that applies two products with an activation between them, for :func:`apply_networks`.

    Args:
        first: from rows (S, H) to rows (S, N).
        second: from rows (S, F) to rows (S, H).
        b_in: (E, N), or None.
        b_out: (E, H), or None.
        activation: from rows (S, N) to rows (S, F).
        post_norm: applied to the resulting rows (S, H), or None.
    """

    def networks(rows: Tensor, offsets: Tensor) -> Tensor:
        rows = second(activate(first(rows, offsets, b_in), activation), offsets, b_out)
        return rows if post_norm is None else post_norm(rows)

    return networks
