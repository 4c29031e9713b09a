"""Follows the rows of a micro-batch through the graph of its loss, and finds where rows are combined.

A mean over rows is linear in a sum of terms that each depend on one row. So no operator before the sum may combine
several rows, and all operators after it must be linear. Every node of the graph gets a label, which says what its
result is: a constant, rows along a dimension, a total over rows, or unknown. Operators with unknown operands are not
judged. So an operator that this module does not list can hide a mistake, but no valid mean is refused.

The rows of a model's output are along its dimension 0. The model may have made several out of each row of the
micro-batch, as in an output of shape (B T, V).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

Edge = tuple[Node | None, int]
"""A node and the index of one of its results."""
LEAF = "torch::autograd::AccumulateGrad"
NONE, MEAN, SUM = 0, 1, 2
"""Values of ``_saved_reduction`` in the autograd nodes of torch's losses."""
ADDITIVE = {"Add", "Sub", "Rsub", "Where", "Lerp"}
LINEAR = {
    *ADDITIVE,
    *("Mul", "Div", "Neg", "Sum", "Mean", "Nansum", "Clone", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Alias"),
    *("Expand", "Squeeze", "Unsqueeze", "NanToNum"),
}
"""Operators whose result is linear in each operand (``Div``: in the numerator; ``NanToNum``: for finite values)."""
_SUMS = {"Sum", "Mean", "Nansum"}
_VIEWS = {"View", "UnsafeView", "ReshapeAlias"}
_MOVES = {
    *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Index", "Gather", "IndexSelect", "Take", "MaskedSelect"),
    *("Permute", "Transpose", "T", "Diagonal", "AsStrided", "Cat", "Stack", "Repeat", "Flip", "Roll", "ConstantPadNd"),
    *("MaskedFill", "Tril", "Triu", "Cumsum", "Trace", "Scatter", "ScatterAdd", "IndexAdd", "IndexFill", "Unfold"),
    *("DiagEmbed", "UnsafeSplit"),
}
"""Linear operators that keep, move or add elements."""
_CONTRACTIONS = {"Mm", "Bmm", "Mv", "Dot", "Vdot", "Addmm", "Baddbmm", "Addmv", "Addbmm"}
PROPORTIONAL = LINEAR | _MOVES | _CONTRACTIONS
_OVER_A_DIMENSION = {
    *("Softmax", "LogSoftmax", "SafeSoftmax", "Logsumexp", "Logcumsumexp", "LinalgVectorNorm", "Norm", "Prod"),
    *("Cumprod", "Max", "Min", "Amax", "Amin", "Aminmax", "Std", "Var", "StdMean", "VarMean", "Topk", "Sort"),
    *("Median", "Nanmedian", "Kthvalue", "Mode", "Cummax", "Cummin", "Roll", "Flip"),
}
"""Operators that combine or move all elements along their dimensions."""


class ValueKind(Enum):
    """The ways in which a value can depend on the rows of a micro-batch."""

    CONSTANT = "it depends on no output of the model"
    ROWS = "each of its elements depends on one row"
    TOTAL = "it is linear in a sum or mean over rows"
    UNKNOWN = "any other value"


class Label(NamedTuple):
    """Says how a value depends on the rows of a micro-batch, as far as is known."""

    kind: ValueKind
    dim: int | None = None
    """The dimension of the rows, counted from the end; None: the whole value depends on a single row."""
    part: Any = None
    """Identifies a selection of rows and their order; None: all rows in their own order."""
    is_sum: bool = False
    """True for a TOTAL that is a sum and was never divided."""


CONSTANT, TOTAL, UNKNOWN = Label(ValueKind.CONSTANT), Label(ValueKind.TOTAL), Label(ValueKind.UNKNOWN)
SUMMED = TOTAL._replace(is_sum=True)
_EACH_ITS_OWN = object()  # replaced by a selection that equals no other


@dataclass
class Rows:
    """What was found out about rows in the graph of a loss."""

    ends: Collection[Node | None]
    labels: dict[Node, Label] = field(default_factory=dict)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of the model's outputs on which the loss depends."""
    of_numbers: list[str] = field(default_factory=list)
    """Operations that no mean over rows contains, whichever dimension has the rows: phrases that follow "the loss" in
    error messages.
    """
    of_rows: list[str] = field(default_factory=list)
    """Operations that no mean over rows contains if the rows are along dimension 0 of :attr:`shapes`; phrases, too."""
    taken: dict[Edge, tuple[int, set[int]]] = field(default_factory=dict)
    """For each value from which rows were taken by position: its number of rows, and these positions."""
    used: set[Edge] = field(default_factory=set)
    """Values all of whose rows are used by some node."""


def follow(root: Node, ends: Collection[Node | None], most: int) -> Rows | None:
    """Return the findings about rows in the graph of a loss, or None if the graph has more than ``most`` nodes.

    ``root``: the node of the loss. ``ends``: the nodes of the model's outputs, where the reading stops.
    """
    rows = Rows(ends)
    todo = [] if root in ends else [root]
    while todo:
        node = todo[-1]
        if node in rows.labels:
            todo.pop()
            continue
        inner = [child for child, _ in node.next_functions if child is not None]
        missing = [child for child in inner if child not in rows.labels and child not in ends]
        if missing:
            todo += missing
        else:
            try:
                rows.labels[node] = _label(node, rows)
            except RuntimeError:  # nested tensors of the strided layout have no shape
                rows.labels[node] = UNKNOWN
                rows.used.update(_sources(node))
            todo.pop()
        if len(rows.labels) + len(todo) > most:
            return None
    for value, (count, places) in rows.taken.items():
        if len(places) < count and value not in rows.used:
            rows.of_rows.append(f"uses only {len(places)} of {count} rows of a micro-batch, by their places")
    return rows


def kind_of(node: Node) -> str | None:
    """Return the name of the operator of torch that made a node, or None if the node is not torch's own."""
    return _kind(node.name())


@cache
def _kind(name: str) -> str | None:
    kind, found, number = name.partition("Backward")
    return kind if found and number.isdigit() else None  # the names of Python nodes do not end in a number


def shape_of(node: Node, number: int = 0) -> tuple[int, ...]:
    """Return the shape of one of the results of the operator that made the node."""
    return tuple(node._input_metadata[number].shape)  # type: ignore[attr-defined]


class _Operand(NamedTuple):
    label: Label
    shape: tuple[int, ...]

    @property
    def front(self) -> int:
        """Return the dimension of the rows as a non-negative index."""
        assert self.label.dim is not None
        return self.label.dim + len(self.shape)


_CONSTANT = _Operand(CONSTANT, ())


def _operand(edge: tuple[Node | None, int], rows: Rows) -> _Operand:
    node, number = edge
    if node is None:
        return _CONSTANT
    if node in rows.ends:
        shape = shape_of(node, number)
        rows.shapes.add(shape)
        return _Operand(Label(ValueKind.ROWS, -len(shape)) if shape else TOTAL, shape)
    label = rows.labels[node]
    if label is CONSTANT:
        return _CONSTANT
    if label.part is _EACH_ITS_OWN:
        label = label._replace(part=(node, number))
    return _Operand(label, shape_of(node, number))


def _sources(node: Node) -> Iterator[Edge]:
    """Yield the operands of a node. If an operand is a result of ``unbind``, also yield the value that was unbound."""
    for source, number in node.next_functions:
        if source is not None:
            yield source, number
            if kind_of(source) == "Unbind":
                yield source.next_functions[0]


def _note_uses(node: Node, kind: str | None, inputs: Sequence[_Operand], rows: Rows) -> None:
    """Record in ``rows`` which rows of its operands a node uses: all, or only the rows at certain positions."""
    for edge, given in zip(node.next_functions, inputs, strict=True):
        source, number = edge
        if source is None or given.label.kind is not ValueKind.ROWS:
            continue
        if source not in rows.ends and kind_of(source) == "Unbind" and source.next_functions[0] in rows.taken:
            rows.taken[source.next_functions[0]][1].add(number)
        if given.label.dim is None:
            continue
        places = _places(node, kind, given)
        if places is None:
            rows.used.add((source, number))
        else:
            rows.taken.setdefault((source, number), (given.shape[given.front], set()))[1].update(places)


def _places(node: Node, kind: str | None, given: _Operand) -> Sequence[int] | None:
    """Return the positions of the rows that a node selects; None if it uses all rows, or if they are unknown."""
    if kind not in ("Select", "Slice", "Unbind") or _saved(node, "dim") % len(given.shape) != given.front:
        return None
    count = given.shape[given.front]
    if kind == "Unbind":  # each result is one row; _note_uses() records its position when a node uses it
        return ()
    if kind == "Select":
        return (_saved(node, "index") % count,)
    start, end, step = (_saved(node, name) for name in ("start", "end", "step"))
    return range(count)[start:end:step]


def _label(node: Node, rows: Rows) -> Label:
    operands = [_operand(edge, rows) for edge in node.next_functions]
    inputs = [one for one in operands if one is not _CONSTANT]
    if not inputs:
        return CONSTANT
    kind, shape = kind_of(node), shape_of(node)
    _note_uses(node, kind, operands, rows)
    if kind is None:
        return UNKNOWN if shape else TOTAL
    reduction = getattr(node, "_saved_reduction", None)
    # A loop is faster than comprehensions, and this runs for every micro-batch.
    has_total = has_unknown = is_reduced = False
    is_one_row = is_single = True
    for label, given in inputs:
        has_total |= label.kind is ValueKind.TOTAL
        has_unknown |= label.kind is ValueKind.UNKNOWN
        is_reduced |= bool(given) and not shape
        is_one_row &= label.kind is ValueKind.ROWS and label.dim is None
        is_single &= is_one_row and label.part is not None
    if is_reduced and reduction is None and kind not in PROPORTIONAL and not is_single:
        rows.of_numbers.append(of_whole(kind))
        return TOTAL
    if has_total:
        return _of_totals(kind, reduction, operands, inputs, rows)
    if has_unknown:
        return UNKNOWN if shape else TOTAL
    if reduction is not None:
        return _of_loss(kind, reduction, inputs, shape, rows)
    if kind in _CONTRACTIONS:
        return _contracted(kind, operands, rows)
    if kind in ("Cdist", "Pdist"):
        if len(inputs) < 2 and kind == "Cdist":
            return inputs[0].label
        rows.of_rows.append(_mixes(kind))
        return UNKNOWN
    if kind in ("Cat", "Stack"):
        return _joined(node, kind, inputs, shape)
    if len(inputs) > 1:
        return _combined(kind, inputs, shape, rows)
    if is_one_row:
        is_total = not shape and not is_single and kind in _SUMS
        return (TOTAL if kind == "Mean" else SUMMED) if is_total else inputs[0].label
    return _moved(node, kind, inputs[0], shape, rows)


def of_whole(kind: str) -> str:
    """Return a phrase for error messages about a loss that reduces a whole micro-batch to one number with ``kind``."""
    return f"takes the {kind} of a whole micro-batch"


def of_total(kind: str) -> str:
    """Return a phrase for error messages about a loss that applies the nonlinear ``kind`` to a mean or sum."""
    if kind in ("Mul", "Div"):
        return f"is the {'product' if kind == 'Mul' else 'quotient'} of means or sums over a micro-batch"
    return f"is the {kind} of a mean or sum over a micro-batch"


def _mixes(kind: str) -> str:
    return f"computes with several rows of a micro-batch at once ({kind})"


def _of_totals(kind: str, reduction: int | None, operands: list[_Operand], inputs: list[_Operand], rows: Rows) -> Label:
    """Return how a node's result depends on the rows if one of its operands is a total over rows."""
    is_sum = any([one.label.is_sum for one in inputs])
    if kind in ("Mul", "Div", *_CONTRACTIONS):
        factors = [one for one in operands[-2:] if one is not _CONSTANT]  # operands that are not constants
        is_proportional = len(factors) == 1 and (kind != "Div" or operands[0] is factors[0])
        is_sum = is_sum and kind != "Div"
    else:
        is_proportional = reduction is None and kind in PROPORTIONAL
    if not is_proportional:
        totals = [one for one in inputs if one.label.kind is ValueKind.TOTAL]
        found = rows.of_rows if all([one.shape for one in totals]) else rows.of_numbers
        found.append(of_total(kind))
    return SUMMED if is_sum else TOTAL


def _of_loss(kind: str, reduction: int, inputs: list[_Operand], shape: tuple[int, ...], rows: Rows) -> Label:
    """Return how the result of one of torch's losses depends on the rows."""
    label = _combined(kind, inputs, inputs[0].shape, rows)
    if label.kind is ValueKind.ROWS and label.dim is None and (reduction == NONE or label.part is not None):
        return label
    if reduction != NONE or label.kind is not ValueKind.ROWS or label.dim is None:
        return UNKNOWN if reduction == NONE else TOTAL
    is_first = label.dim == -max(len(one.shape) for one in inputs)
    return label._replace(dim=-len(shape)) if is_first and shape else UNKNOWN


def _contracted(kind: str, operands: list[_Operand], rows: Rows) -> Label:
    """Return how a product of matrices or vectors depends on the rows."""
    left, right = (one.label for one in operands[-2:])
    if len(operands) > 2 and operands[0] is not _CONSTANT:
        return UNKNOWN
    has_vector = kind in ("Mv", "Addmv", "Dot", "Vdot")
    summed = -1, -1 if has_vector else -2
    roles = []
    for label, own in ((left, summed[0]), (right, summed[1])):
        if label.kind is ValueKind.ROWS:
            if label.dim is None:
                return UNKNOWN
            roles.append("batch" if label.dim < -2 else "summed" if label.dim == own else "kept")
    if "summed" in roles and len(set(roles)) == 1 and (len(roles) == 1 or left.part == right.part):
        return SUMMED
    if roles == ["batch"] * len(roles) and kind != "Addbmm":
        return left if left.kind is ValueKind.ROWS else right
    if roles == ["kept"]:
        if left.kind is not ValueKind.ROWS:
            return right
        return left._replace(dim=-1 if has_vector else -2)
    rows.of_rows.append(_mixes(kind))
    return UNKNOWN


def _joined(node: Node, kind: str, inputs: list[_Operand], shape: tuple[int, ...]) -> Label:
    """Return how concatenated or stacked tensors depend on the rows."""
    along = _saved(node, "dim") % len(shape)
    labels = {one.label for one in inputs}
    if all([one.label.dim is None for one in inputs]):  # each operand is a single row
        return Label(ValueKind.ROWS, along - len(shape))
    first = inputs[0]
    if len({label.dim for label in labels}) > 1 or len(labels) > 1:
        return UNKNOWN
    if kind == "Stack":
        return first.label._replace(dim=first.front + (along <= first.front) - len(shape))
    return first.label._replace(part=("cat",)) if along == first.front else first.label


def _combined(kind: str, inputs: list[_Operand], shape: tuple[int, ...], rows: Rows) -> Label:
    """Return how the result of an elementwise operator with several operands depends on the rows."""
    dims = {one.label.dim for one in inputs if one.label.dim is not None}
    parts = {one.label.part for one in inputs}
    if len(dims) > 1 or len(parts) > 1:
        if kind in ADDITIVE:
            return TOTAL
        rows.of_rows.append(_mixes(kind))
        return UNKNOWN
    dim = next(iter(dims), None)
    sizes = [one.shape[dim] for one in inputs if dim is not None and one.label.dim is not None]
    if dim is not None and (len(shape) < -dim or shape[dim] not in sizes):
        return UNKNOWN
    return inputs[0].label._replace(dim=dim)


def _dims(node: Node, count: int) -> tuple[int, ...]:
    """Return the dimensions that an operator saved, or all dimensions if it saved none."""
    saved = _saved(node, "dim")
    saved = _saved(node, "dims") if saved is None else saved
    dims = saved if isinstance(saved, (tuple, list)) else () if saved is None else (saved,)
    return tuple([_signed(dim) % count for dim in dims]) or tuple(range(count))


def _moved(node: Node, kind: str, given: _Operand, shape: tuple[int, ...], rows: Rows) -> Label:
    """Return how a node's result depends on the rows if its only operand has rows along a dimension."""
    label, before, row = given.label, given.shape, given.front
    count = len(shape)
    if kind in _SUMS:
        if row in _dims(node, len(before)):
            return TOTAL if kind == "Mean" else SUMMED
        return _without(node, given, shape)
    if kind == "Cumsum" and row in _dims(node, len(before)):
        return TOTAL
    if kind in _OVER_A_DIMENSION:
        if row in _dims(node, len(before)):
            rows.of_rows.append(_mixes(kind))
            return UNKNOWN
        return _without(node, given, shape)
    if kind in _VIEWS:
        return _viewed(label, before, row, shape)
    if kind == "Permute":
        return label._replace(dim=_dims(node, count).index(row) - count)
    if kind in ("Transpose", "T"):
        one, other = (0, count - 1) if kind == "T" else (_saved(node, "dim0") % count, _saved(node, "dim1") % count)
        return label._replace(dim={one: other, other: one}.get(row, row) - count)
    if kind == "Unsqueeze":
        at = _saved(node, "dim") % count
        return label._replace(dim=row + (at <= row) - count)
    if kind == "Squeeze":
        dims = range(len(before)) if _saved(node, "dim") is None else _dims(node, len(before))
        gone = [dim for dim in dims if before[dim] == 1]
        return label._replace(dim=None if row in gone else row - sum(dim < row for dim in gone) - count)
    if kind == "Expand":
        return label
    # Gather along the rows comes from operators such as quantile.
    if kind == "Gather" and _saved(node, "dim") % len(before) == row:
        rows.of_rows.append(_mixes(kind))
        return UNKNOWN
    if kind in ("Select", "Unbind", "Slice", "Split", "UnsafeSplit", "SplitWithSizes", "Gather", "IndexSelect"):
        return _taken(node, kind, given, shape)
    if kind == "Index":
        return _indexed(node, given, shape)
    if kind == "MaskedSelect":
        return label._replace(dim=-1) if row == 0 else UNKNOWN
    if count == len(before) and shape[row] == before[row]:
        return label
    if row == 0 and shape and shape[0] == before[0]:
        return label._replace(dim=-count)
    return UNKNOWN if shape else TOTAL


def _saved(node: Node, name: str) -> Any:
    """Return the value that the node saved as ``name``; None if there is no such value."""
    value = getattr(node, f"_saved_{name}", None)
    return _signed(value) if isinstance(value, int) else value


def _signed(number: int) -> int:
    """Reinterpret an unsigned 64-bit integer as signed: nodes return negative integers as unsigned ones."""
    return number - 2**64 if number >= 2**63 else number


def _without(node: Node, given: _Operand, shape: tuple[int, ...]) -> Label:
    """Return how the result of a reduction over dimensions other than the rows depends on the rows."""
    if len(shape) == len(given.shape):
        return given.label
    before = sum([dim < given.front for dim in _dims(node, len(given.shape))])
    return given.label._replace(dim=given.front - before - len(shape))


def _viewed(label: Label, before: Sequence[int], row: int, shape: Sequence[int]) -> Label:
    """Return how a view with shape ``shape`` of a value with shape ``before`` depends on the rows.

    The view may split the row dimension ``row``, or merge it with the next one.
    """
    size, outside = before[row], prod(before[:row])
    places = [place for place in range(len(shape)) if prod(shape[:place]) == outside]
    # A row dimension of size 1 can be anywhere among the dimensions: the sizes do not tell where.
    places = places[: row == 0] if size == 1 else [place for place in places if shape[place] != 1]
    if not places or (shape[places[0]] % size and size % shape[places[0]]):
        return UNKNOWN
    return label._replace(dim=places[0] - len(shape))


def _taken(node: Node, kind: str, given: _Operand, shape: tuple[int, ...]) -> Label:
    """Return how the result of a node that selects elements along a dimension depends on the rows."""
    label, row = given.label, given.front
    along, places = _saved(node, "dim") % len(given.shape), _places(node, kind, given)
    if kind in ("Select", "Unbind"):
        if along == row:
            return label._replace(dim=None, part=("row", places[0], label.part) if places else _EACH_ITS_OWN)
        return label._replace(dim=row - (along < row) - len(shape))
    if along != row or (shape == given.shape and kind == "Slice"):
        return label
    if places is not None:  # Slice, with known positions
        return label._replace(dim=None if len(places) == 1 else label.dim, part=("slice", places, label.part))
    return label._replace(part=("index",) if kind == "IndexSelect" else _EACH_ITS_OWN)


def _indexed(node: Node, given: _Operand, shape: tuple[int, ...]) -> Label:
    """Return how the elements that masks and index tensors select from an operand depend on the rows."""
    indices: Sequence[torch.Tensor | None] = _saved(node, "indices")
    label, row = given.label, given.front
    places: list[tuple[int, int, torch.Tensor]] = []
    at = 0
    for index in indices:
        width = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None:
            places.append((at, at + width, index))
        at += width
    if not places or any(before[1] != after[0] for before, after in pairwise(places)):
        return UNKNOWN
    first, last = places[0][0], places[-1][1]
    if row < first:
        return label._replace(dim=row - len(shape))
    if row >= last:
        return label
    masks = [index.dtype in (torch.bool, torch.uint8) for _, _, index in places]
    if not all(masks) and any(index.dim() > 1 for _, _, index in places):
        return UNKNOWN
    # For several indices, as in x[arange(n), targets], assume that they select all rows in order.
    is_order = masks == [False] and len(places) == 1
    return label._replace(dim=first - len(shape), part=("index",) if is_order else label.part)
