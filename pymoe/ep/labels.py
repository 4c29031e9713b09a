"""Rows that travel with numbers: for each row those of its experts on the rank that it goes to, and their weights.

The rank that receives such rows finds out from the numbers alone what to compute, as a layer of one process does from a
router's choices: its own experts are numbered from 0 on within a chunk, and larger numbers stand for none.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe.ep.exchange import Crossing, arrive, depart
from pymoe.ep.plan import RowCounts
from pymoe.reference.types import ActivationKind, Routing


class Labelled(NamedTuple):
    """The rows of one chunk, as they arrive from all ranks."""

    rows: Tensor
    """(N, H), rank by rank."""
    numbers: Tensor
    """(N, K) int32, the experts of each row, within the chunk."""
    weights: Tensor | None
    """(N, K), of these experts' outputs; None where a row has one expert, and its output goes back as it is."""
    computed: int
    """How many of the numbers are those of experts, or more."""


class LabelledCrossing:
    """The way out of a call's rows with numbers, and with weights if these are to be applied there.

    Args:
        counts: of the rows.
        computed: for every chunk, how many rows its experts compute here, at most.
    """

    def __init__(self, counts: RowCounts, computed: list[int]) -> None:
        self._counts, self._computed = counts, computed
        self._rows: Crossing
        self._numbers: Crossing
        self._weights: Crossing | None = None

    def depart(self, rows_SH: Tensor, numbers_SK: Tensor, weights_SK: Tensor | None) -> tuple[Tensor, ...]:
        """Start all chunks; return a token for the rows of each, then one for the weights of each.

        Args:
            rows_SH: (S, H), in the order of ranks, chunk after chunk.
            numbers_SK: (S, K) int32.
            weights_SK: (S, K), or None.
        """
        self._numbers = Crossing(self._counts, numbers_SK.shape[0], numbers_SK)
        self._numbers.depart(numbers_SK)
        of_weights: tuple[Tensor, ...] = ()
        if weights_SK is not None:
            self._weights = Crossing(self._counts, weights_SK.shape[0], weights_SK)
            of_weights = depart(weights_SK, self._weights)
        self._rows = Crossing(self._counts, rows_SH.shape[0], rows_SH)
        return *depart(rows_SH, self._rows), *of_weights

    def arrive(self, tokens: tuple[Tensor, ...], chunk: int) -> Labelled:
        """Wait for a chunk."""
        numbers = self._numbers.arrive(chunk)
        weights = None
        if self._weights is not None:
            weights = arrive(tokens[self._weights.chunks + chunk], self._weights, chunk)
        return Labelled(arrive(tokens[chunk], self._rows, chunk), numbers, weights, self._computed[chunk])


def apply_labelled(
    came: Labelled,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    *,
    activation: ActivationKind,
    ops: ModuleType,
) -> Tensor:
    """Return (N, H): for every row the output of its expert, or with weights the weighted sum of its experts'.

    Rows of an expert are computed in the order in which they came, rank by rank, so that sums over them are those of
    one process with the tokens of all ranks. A row without an expert becomes zero.

    Args:
        came: the rows of a chunk.
        w_in: of the chunk's experts, as of :class:`pymoe.nn.Experts`.
        w_out: of the same.
        b_in: of the same.
        b_out: of the same.
        activation: of the same.
        ops: :mod:`pymoe.ops.raw` or :mod:`pymoe.reference`.
    """
    rows, numbers, weights, computed = came
    if w_in.shape[0] == 0:
        # No expert, and no row. Still parameters and weights get their gradients, without elements, and the backward
        # pass takes part in the exchanges.
        nothing: Any = sum(part.sum() for part in (w_in, w_out, b_in, b_out, weights) if part is not None)
        return rows + torch.as_tensor(nothing).to(rows.dtype)
    slot, token, offsets = ops.build_routing(numbers, w_in.shape[0], foreign_experts=True)
    routing = Routing(slot, token[:computed], offsets)
    inner = ops.grouped_linear(ops.dispatch(rows, routing), w_in, offsets, b_in)
    inner = ops.expert_activation(inner, activation)
    outer = ops.grouped_linear(inner, w_out, offsets, b_out)
    combined: Tensor = ops.combine(outer, routing, weights)
    return combined
