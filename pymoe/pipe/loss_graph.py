"""Reads from the graph of a loss whether it is a mean over the rows of its micro-batch.

The last steps of a loss compute numbers, and their nodes keep what they divide by: a mean its number of elements, a
cross entropy the weight of the targets that are not padding, a quotient its denominator. In a mean over rows these
are constants, or proportional to the number of rows. A graph is read from the loss on, as long as values are scalars.

What a node saves is called ``_saved_`` and the name of an argument of its operator; :func:`_hear` makes sure of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.nn import functional as F

from pymoe._torch_private import FakeTensor, FunctionBase, disable_current_modes

MOST_NODES = 1000
"""That are read of one loss."""
MEAN, SUM = 1, 2
"""What torch's losses save as their ``reduction``."""
_MUL, _DIV = {"MulBackward0", "MulBackward1"}, {"DivBackward0", "DivBackward1"}
_LINEAR = {
    *_MUL,
    *_DIV,
    *("AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward0", "RsubBackward1", "NegBackward0"),
    *("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1", "CloneBackward0", "ToCopyBackward0"),
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "ExpandBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "NanToNumBackward0", "WhereBackward0"),
}
"""Of scalars they make a scalar that is linear in each."""
_FUSED = "linear_cross_entropy"
"""In the names of nodes of torch that hide a cross entropy with its weights."""
_LEAF = "torch::autograd::AccumulateGrad"


class Words(NamedTuple):
    """What errors say to those who call a step."""

    who: str
    remedy: str
    of_sums: str
    instead: str = ""


class Divisor(NamedTuple):
    """A number by which a part of a loss is divided; one by which it is multiplied has the exponent -1."""

    value: float | torch.Tensor
    exponent: int = 1
    counts_rows: bool = False
    """It is proportional to the number of rows in any mean over rows, and no constant."""


@dataclass
class LossReading:
    """What the graph of one micro-batch's loss tells."""

    divisors: list[tuple[Divisor, ...]] = field(default_factory=list)
    """For every part, of which the loss is the sum, what it is divided by."""
    sums: list[str] = field(default_factory=list)
    """Nodes of torch's losses that are sums over what they get, and that nothing divides."""
    nonlinear: list[str] = field(default_factory=list)
    """Nodes that compute a number of a number, such as the root of a mean, but not in proportion."""
    is_opaque: bool = False
    """It has nodes that can hide anything: those of Python and of compiled code, say."""
    is_weighted: bool = False
    """One of them may divide by class weights."""


def read_loss(loss: torch.Tensor, ends: Collection[Node | None] | None) -> LossReading | None:
    """Return what the graph of a loss tells; None: it has none.

    Args:
        loss: a tensor with one element.
        ends: nodes of the model's outputs. What does not depend on them is a constant. None: everything depends on the
            model.
    """
    if loss.grad_fn is None:
        return None
    _hear()
    return _read(loss.grad_fn, ends)


def _read(root: Node, ends: Collection[Node | None] | None) -> LossReading:
    reading = LossReading()
    todo: list[tuple[Node, tuple[Divisor, ...]]] = [(root, ())]
    for _ in range(MOST_NODES):
        if not todo:
            break
        node, divisors = todo.pop()
        kind = node.name()
        if kind == _LEAF:
            continue
        inner = [(number, child) for number, (child, _) in enumerate(node.next_functions) if child is not None]
        scalars = [(number, child) for number, child in inner if _is_scalar(child)]
        reduction = getattr(node, "_saved_reduction", None)
        if kind.startswith("MeanBackward"):
            divisors += (Divisor(_saved(node, "self_sym_numel")),)
        elif reduction == MEAN:
            weight = getattr(node, "_saved_total_weight", None)
            divisors += (Divisor(_saved(node, "self").numel() if weight is None else weight, counts_rows=True),)
        elif reduction == SUM and not any(one.exponent == 1 for one in divisors) and _depends(node, ends):
            reading.sums.append(kind)
        is_known = kind in _LINEAR or reduction is not None
        reading.is_opaque |= not is_known
        reading.is_weighted |= _FUSED in kind
        if scalars and kind not in _LINEAR and not isinstance(node, FunctionBase):
            if _depends(node, ends):
                reading.nonlinear.append(kind)
            scalars = []
        if len(scalars) < len(inner) or not inner:
            reading.divisors.append(divisors)
        todo += [(child, (*divisors, *_divisor(node, kind, number))) for number, child in scalars]
    reading.is_opaque |= bool(todo)
    return reading


def _divisor(node: Node, kind: str, number: int) -> Iterator[Divisor]:
    """Yield what a sum, product or quotient of scalars does to its operand of that number."""
    if kind in _DIV and number == 0:
        yield Divisor(_constant(_saved(node, "other")))
    elif kind in _MUL:
        yield Divisor(_constant(_saved(node, "self" if number else "other")), -1)
    elif number and (alpha := getattr(node, "_saved_alpha", 1)) != 1:
        yield Divisor(_constant(alpha), -1)


def _constant(value: Any) -> float | torch.Tensor:
    return value.detach().clone() if isinstance(value, torch.Tensor) else float(value)


def _is_scalar(node: Node) -> bool:
    metadata = node._input_metadata  # type: ignore[attr-defined]
    return len(metadata) == 1 and not metadata[0].shape


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


def _depends(node: Node, ends: Collection[Node | None] | None) -> bool:
    """Return whether one of the nodes ``ends`` can be reached."""
    if ends is None:
        return True
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        if node not in seen:
            seen.add(node)
            todo += [child for child, _ in node.next_functions if child is not None]
    return False


@cache
def _hear() -> None:
    """Make sure that nodes of this torch tell what they are asked.

    Raises:
        RuntimeError: they do not.
    """
    with disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        scores = torch.zeros(4, 2, requires_grad=True, device="cpu", dtype=torch.float64)
        target = torch.tensor([0, 1, 1, -100], device="cpu")
        losses = {
            "the weight of a cross entropy": F.cross_entropy(scores, target),
            "the elements of a mean": scores.view(-1)[:3].mean(),
            "the elements of an mse_loss": F.mse_loss(scores.view(-1)[:3], scores.detach().view(-1)[:3]),
            "the denominator of a quotient": scores.sum() / (target >= 0).sum(),
            "the factor of a product": scores.sum() * (1 / torch.tensor(3.0, device="cpu", dtype=torch.float64)),
        }
        for what, loss in losses.items():
            assert loss.grad_fn is not None
            if [round(one.value, 9) for one in _numbers(_read(loss.grad_fn, None))] != [3.0]:
                raise RuntimeError(f"pymoe.pipe: torch {torch.__version__} does not tell {what} in the graph of a loss")
        root = F.mse_loss(scores, scores.detach(), reduction="sum").grad_fn
        assert root is not None
        if not _read(root, None).sums:
            raise RuntimeError(f"pymoe.pipe: torch {torch.__version__} does not tell the reduction of an mse_loss")


class _Number(NamedTuple):
    value: float
    counts_rows: bool
    exact: float
    """How exactly it is known, relative to it."""


def _numbers(reading: LossReading) -> list[_Number]:
    """Return the different numbers that parts of a loss are divided by, in their order."""
    found: set[_Number] = set()
    for divisors in reading.divisors:
        product, exact = 1.0, 1e-12
        for value, exponent, _ in divisors:
            if isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, FakeTensor)):
                continue
            number = float(value)
            product = product * number if exponent == 1 else product / number if number else inf
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                exact = max(exact, 16 * torch.finfo(value.dtype).eps)
        found.add(_Number(product, any(one.counts_rows for one in divisors), exact))
    return sorted(found)


def check_mean_over_rows(readings: Sequence[LossReading], rows: Sequence[int], words: Words) -> None:
    """Raise ValueError unless the losses of micro-batches, which have so many rows, can be means over rows."""
    for reading in readings:
        if reading.sums:
            raise ValueError(
                f"{words.who}: the loss is a sum ({_name(reading.sums[0])} with reduction='sum'), and is taken for a "
                f"mean over rows: {words.of_sums}, or divide it by the number of rows"
            )
        if reading.is_weighted:
            raise ValueError(_not_over_rows("divides by what a fused cross entropy does not tell", rows, words))
        if reading.nonlinear:
            raise ValueError(
                f"{words.who}: the loss is the {_name(reading.nonlinear[0])} of a mean or sum over a micro-batch, so "
                f"its gradients are not those for the whole mini-batch. Expected a mean over rows{words.instead}"
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


def _equal(one: float, other: float, exact: float) -> bool:
    return one == other or abs(one - other) <= exact * max(abs(one), abs(other))


def _name(kind: str) -> str:
    return kind.partition("Backward")[0]


def _not_over_rows(what: str, rows: Sequence[int], words: Words) -> str:
    return (
        f"{words.who}: the loss {what} in micro-batches of {', '.join(map(str, rows))} rows, so it is not known as a "
        f"mean over rows (padding, a mask, class weights). {words.remedy}"
    )
