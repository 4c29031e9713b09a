"""Reads from the graph of a loss whether it is a mean over the rows of its micro-batch.

The last steps of a loss compute scalars, and their autograd nodes save their divisors: a mean its number of elements, a
cross entropy the weight of the targets that are not padding, a quotient its denominator. In a mean over rows, each of
these divisors is constant or proportional to the number of rows. The graph is read backwards from the loss, as long as
values are scalars.

A node has a saved value as its attribute ``_saved_NAME``, where NAME is the operator's argument; :func:`_nodes_tell`
tests this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn import functional as F

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import FakeTensor, FunctionBase
from pymoe.pipe.loss_rows import (
    LEAF,
    MEAN,
    PROPORTIONAL,
    SUM,
    UNKNOWN,
    Label,
    ValueKind,
    follow,
    kind_of,
    of_total,
    of_whole,
)

MAX_NODES = 1000
"""Largest number of nodes that are read for one loss."""
MAX_FOLLOWED_NODES = 10_000
"""Largest number of nodes whose rows are followed."""
MAX_PARAMETER_NODES = 100
"""Largest number of nodes that are read to find out whether a value depends only on parameters."""
_OF_TWO = {"Add", "Sub", "Rsub", "Mul", "Div"}
_ELEMENTS = "Abs Clamp Exp Log Log1P LogSigmoidForward Neg Pow Reciprocal Relu Rsqrt Sigmoid Softmax Softplus Sqrt Tanh"
_OF_PLACES = "Alias Clone Expand Permute Select Squeeze T Transpose Unsqueeze View ReshapeAlias Cat Split Stack Unbind"
_OF_SUMS = "LinalgVectorNorm Mean Mm Norm Sum ToCopy"
_HIDE_NO_DATA = {*_OF_TWO, *_ELEMENTS.split(), *_OF_PLACES.split(), *_OF_SUMS.split()}
"""Operators whose results depend only on tensors that get gradients. (An embedding also depends on indices.)"""
_FUSED = "linear_cross_entropy"
"""A part of the names of torch's nodes that hide a cross entropy with its weights."""


class Words(NamedTuple):
    """The parts of error messages that depend on how the loss was given."""

    who: str
    remedy: str
    of_sums: str
    instead: str = ""


class Divisor(NamedTuple):
    """A number that divides a part of a loss or, if the exponent is -1, multiplies it."""

    value: float | torch.Tensor
    exponent: int = 1
    counts_rows: bool = False
    """True if, in a mean over rows, the number must be proportional to the number of rows and not constant."""
    is_quotient: bool = False
    """True if the loss divides by it explicitly (``/``), such as a sum by the number of rows."""


@dataclass
class LossReading:
    """The facts that were read from the autograd graph of one micro-batch's loss."""

    divisors: list[tuple[Divisor, ...]] = field(default_factory=list)
    """The divisors of each part of the loss; the loss is the sum of its parts."""
    sums: list[str] = field(default_factory=list)
    """Nodes of torch's losses that sum over their input, if nothing divides the sum."""
    own_sums: list[str] = field(default_factory=list)
    """Nodes of other sums that nothing divides. They are sums over rows if the rows are dimension 0 of the model's
    outputs.
    """
    of_numbers: list[str] = field(default_factory=list)
    """Reasons why the loss is not a mean over rows, found in computations with scalars, such as the root of a mean."""
    of_rows: list[str] = field(default_factory=list)
    """Further reasons, found in computations with rows. They hold if the rows are dimension 0 of the model's outputs.
    """
    shapes: frozenset[tuple[int, ...]] = frozenset()
    """Shapes of the model's outputs."""
    is_opaque: bool = False
    """True if the graph has nodes that can hide a divisor, such as those of Python, of compiled code and of nonlinear
    operators, or more nodes than are read.
    """
    is_weighted: bool = False
    """True if the graph has a fused cross entropy, which may divide by class weights that cannot be read."""


def read_loss(loss: torch.Tensor, ends: Collection[Node | None] | None) -> LossReading | None:
    """Read the graph of a loss (a tensor with one element). Return the findings, or None if the loss has no graph.

    ``ends``: nodes of the model's outputs; values that do not depend on them are constants. None: everything depends on
    the model.
    """
    if loss.grad_fn is None:
        return None
    _nodes_tell()
    return _read(loss.grad_fn, ends)


def _read(root: Node, ends: Collection[Node | None] | None) -> LossReading:
    reading = LossReading()
    if ends is not None and _is_mean_of_one(root, ends):
        reading.divisors.append((_elements(root),))
        return reading
    rows = None if ends is None else follow(root, ends, MAX_FOLLOWED_NODES)
    labels = {} if rows is None else rows.labels
    if rows is not None:
        reading.shapes, reading.of_numbers, reading.of_rows = frozenset(rows.shapes), rows.of_numbers, rows.of_rows
    todo: list[tuple[Node, tuple[Divisor, ...]]] = [(root, ())]
    for _ in range(MAX_NODES):
        if not todo:
            break
        node, divisors = todo.pop()
        if node.name() == LEAF:
            continue
        label, kind = labels.get(node), kind_of(node)
        if label is not None and label.kind is ValueKind.ROWS:  # each row may have its own divisor
            reading.divisors.append(divisors)
            continue
        inner = [(number, child) for number, (child, _) in enumerate(node.next_functions) if child is not None]
        if rows is None and kind not in PROPORTIONAL and _is_of_parameters(node):
            continue
        if kind in ("Mul", "Div") and len(inner) > 1:  # follow only the operands that depend on the model's outputs
            inner = [one for one in inner if not _is_factor(one[1], labels)] or inner
        totals = [one for one in inner if _is_scalar(one[1]) or labels.get(one[1], UNKNOWN).kind is ValueKind.TOTAL]
        reduction = getattr(node, "_saved_reduction", None)
        is_sum = reduction == SUM and (label is None or label.kind is not ValueKind.CONSTANT)
        is_own_sum = label is not None and label.is_sum and len(totals) < len(inner)
        if is_sum or is_own_sum:
            values = [value for value, *_ in divisors if not (isinstance(value, torch.Tensor) and has_no_value(value))]
            if not any([one.is_quotient for one in divisors]) and 0.0 not in map(float, values):
                (reading.sums if is_sum else reading.own_sums).append(node.name())
            divisors += (Divisor(1.0, counts_rows=True),)
        elif kind == "Mean" and (count := _saved(node, "self_sym_numel")) != 1:
            divisors += (Divisor(count),)
        elif reduction == MEAN:
            divisors += (_elements(node),)
        reading.is_opaque |= kind not in PROPORTIONAL and reduction is None
        reading.is_weighted |= _FUSED in node.name()
        if kind not in PROPORTIONAL and not isinstance(node, FunctionBase):
            if rows is None and kind is not None and inner:
                if totals:
                    reading.of_numbers.append(of_total(kind))
                elif reduction is None:
                    reading.of_numbers.append(of_whole(kind))
            totals = []
        if len(totals) < len(inner) or not inner:
            reading.divisors.append(divisors)
        todo += [(child, (*divisors, *_divisor(node, kind, number))) for number, child in totals]
    reading.is_opaque |= bool(todo)
    return reading


def _is_factor(node: Node, labels: Mapping[Node, Label]) -> bool:
    """Return whether a value is independent of the model's outputs or, if these are unknown, uses only parameters."""
    return labels[node].kind is ValueKind.CONSTANT if node in labels else not labels and _is_of_parameters(node)


def _is_of_parameters(node: Node) -> bool:
    """Return whether a value is known to depend only on parameters and plain numbers."""
    todo = [node]
    for _ in range(MAX_PARAMETER_NODES):
        if not todo:
            return True
        one = todo.pop()
        if one.name() == LEAF:
            if not isinstance(one.variable, nn.Parameter):  # type: ignore[attr-defined]
                return False
            continue
        kind = kind_of(one)
        children = [child for child, _ in one.next_functions if child is not None]
        is_with_data = len(children) < len(one.next_functions) and not (kind in _OF_TWO and _is_scalar(one))
        if kind not in _HIDE_NO_DATA or is_with_data:
            return False
        todo += children
    return False


def _is_mean_of_one(root: Node, ends: Collection[Node | None]) -> bool:
    """Return whether the root is a loss of torch that averages over a single model output (the usual case)."""
    children = [child for child, _ in root.next_functions if child is not None]
    return len(children) == 1 and children[0] in ends and getattr(root, "_saved_reduction", None) == MEAN


def _elements(node: Node) -> Divisor:
    """Return the divisor of one of torch's losses with mean reduction."""
    weight = getattr(node, "_saved_total_weight", None)
    return Divisor(_saved(node, "self").numel() if weight is None else weight, counts_rows=True)


def _divisor(node: Node, kind: str | None, number: int) -> Iterator[Divisor]:
    """Yield the divisors that a sum, product or quotient of scalars applies to the operand with this index."""
    if kind == "Div" and number == 0:
        yield Divisor(_constant(_saved(node, "other")), is_quotient=True)
    elif kind == "Mul":
        yield Divisor(_constant(_saved(node, "self" if number else "other")), -1)
    elif number and (alpha := getattr(node, "_saved_alpha", 1)) != 1:
        yield Divisor(_constant(alpha), -1)


def _constant(value: Any) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = value.detach()
    return value.clone() if value.numel() == 1 or has_no_value(value) else value.to(torch.float64).mean()


def has_no_value(value: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no data."""
    return value.is_meta or isinstance(value, FakeTensor)


def _is_scalar(node: Node) -> bool:
    metadata = node._input_metadata  # type: ignore[attr-defined]
    try:
        return len(metadata) == 1 and not metadata[0].shape
    except RuntimeError:  # nested tensors of the strided layout have no shape
        return False


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


@canaries.canary
def _nodes_tell() -> canaries.Exercises:
    """Test that autograd nodes save values under the names of their operators' arguments."""
    scores = torch.zeros(4, 2, requires_grad=True, device="cpu", dtype=torch.float64)
    target = torch.tensor([0, 1, 1, -100], device="cpu")
    losses = {
        "the weight of a cross entropy": F.cross_entropy(scores, target),
        "the elements of a mean": scores.view(-1)[:3].mean(),
        "the elements of an mse_loss": F.mse_loss(scores.view(-1)[:3], scores.detach().view(-1)[:3]),
        "the denominator of a quotient": scores.sum() / (target >= 0).sum(),
        "the factor of a product": scores.sum() * (1 / torch.tensor(3.0, device="cpu", dtype=torch.float64)),
    }
    for name, loss in losses.items():
        assert loss.grad_fn is not None
        yield name, [round(one.value, 9) for one in _numbers(_read(loss.grad_fn, None))] == [3.0]
    root = F.mse_loss(scores, scores.detach(), reduction="sum").grad_fn
    assert root is not None
    yield "the reduction of an mse_loss", bool(_read(root, None).sums)


class _Number(NamedTuple):
    value: float
    counts_rows: bool
    exact: float
    """Relative precision of the value."""


def _numbers(reading: LossReading) -> list[_Number]:
    """Return, for every part of a loss, the product of its divisors: each different number once, in ascending order."""
    found: set[_Number] = set()
    for divisors in reading.divisors:
        product, exact = 1.0, 1e-12
        for value, exponent, *_ in divisors:
            if isinstance(value, torch.Tensor) and has_no_value(value):
                continue
            number = float(value)
            product = product * number if exponent == 1 else product / number if number else inf
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                exact = max(exact, 16 * torch.finfo(value.dtype).eps)
        found.add(_Number(product, any(one.counts_rows for one in divisors), exact))
    return sorted(found)


def check_mean_over_rows(readings: Sequence[LossReading], rows: Sequence[int], words: Words) -> None:
    """Raise ValueError if the readings show that a loss is not a mean over rows. ``rows``: rows per micro-batch."""
    for reading, count in zip(readings, rows, strict=True):
        are_rows = all([_has_rows(shape, count) for shape in reading.shapes])
        sums = [(name, " with reduction='sum'") for name in reading.sums]
        sums += [(name, "") for name in reading.own_sums * are_rows]
        for name, how in sums:
            raise ValueError(
                f"{words.who}: the loss is a sum ({name.partition('Backward')[0]}{how}), and is taken for a mean over "
                f"rows: {words.of_sums}, or divide it by the number of rows"
            )
        if reading.is_weighted:
            raise ValueError(_not_over_rows("divides by what a fused cross entropy does not tell", rows, words))
        for what in [*reading.of_numbers, *reading.of_rows * are_rows]:
            raise ValueError(
                f"{words.who}: the loss {what}, so its gradients are not those for the whole mini-batch. Expected a "
                f"mean over rows of terms that depend on one row each{words.instead}"
            )
    found = [_numbers(reading) for reading in readings]
    for column in zip(*found, strict=False):
        first = column[0]
        is_constant = all([_equal(one.value, first.value, first.exact) and not one.counts_rows for one in column])
        if not is_constant and not all(
            [
                _equal(one.value * rows[0], first.value * count, first.exact)
                for one, count in zip(column, rows, strict=True)
            ]
        ):
            numbers = ", ".join(f"{one.value:g}" for one in column)
            raise ValueError(_not_over_rows(f"divides by {numbers}", rows, words))
    if len({len(numbers) for numbers in found}) > 1:
        raise ValueError(_not_over_rows("divides its parts by different numbers", rows, words))


def _has_rows(shape: tuple[int, ...], count: int) -> bool:
    """Return whether dimension 0 can be the rows: its size is ``count`` or, if no other size is ``count`` and ``count``
    is above 1, a multiple of ``count``.
    """
    return shape[:1] == (count,) or (count > 1 and bool(shape) and shape[0] % count == 0 and count not in shape[1:])


def _equal(one: float, other: float, exact: float) -> bool:
    return one == other or abs(one - other) <= exact * max(abs(one), abs(other))


def _not_over_rows(what: str, rows: Sequence[int], words: Words) -> str:
    return (
        f"{words.who}: the loss {what} in micro-batches of {', '.join(map(str, rows))} rows, so it is not known as a "
        f"mean over rows (padding, a mask, class weights). {words.remedy}"
    )
