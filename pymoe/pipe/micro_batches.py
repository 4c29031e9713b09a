"""Cuts mini-batches into micro-batches, and joins their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pymoe._torch_private import pytree


class Whole:
    """Wraps a tensor, or a structure of tensors, that every micro-batch gets uncut, such as a mask for all rows."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class MicroBatches(NamedTuple):
    """The values of micro-batches, and their numbers of rows."""

    values: list[list[Any]]
    """Parts of every value, by micro-batch."""
    rows: list[int]

    @property
    def weights(self) -> list[float]:
        """Return the weight of each micro-batch's mean in the mean over all rows."""
        total = sum(self.rows)
        return [rows / total if total else 1.0 for rows in self.rows]


def split(values: Sequence[Any], chunks: int) -> MicroBatches:
    """Cut the tensors in ``values`` along dimension 0 into ``chunks`` parts, or one part per row if there are fewer
    rows.

    Sizes differ by one at most, the larger ones first, as in ``torch.tensor_split``. Tensors without dimensions, values
    that are not tensors, and :class:`Whole` values go to every micro-batch.

    Raises:
        ValueError: tensors have different numbers of rows.
    """
    flat: list[tuple[list[Any], Any]] = [
        ([value], None) if isinstance(value, torch.Tensor) else pytree.tree_flatten(value) for value in values
    ]
    found = dict.fromkeys([leaf.shape[0] for leaves, _ in flat for leaf in leaves if _has_rows(leaf)])
    if len(found) > 1:
        raise ValueError(
            "Pipe: the tensors of a mini-batch must have the same number of rows (dimension 0), got "
            f"{' and '.join(map(str, found))}; pymoe.pipe.Whole(tensor) is not cut"
        )
    rows = next(iter(found), 0)
    count = max(1, min(chunks, rows))
    every, larger = divmod(rows, count)
    sizes = [every + (number < larger) for number in range(count)]
    parts = [
        [_cut(leaf, sizes, count) for leaf in leaves]  # indexed by leaf, then by micro-batch
        for leaves, _ in flat
    ]
    cut = [
        [
            leaves[0][number]
            if structure is None
            else pytree.tree_unflatten([leaf[number] for leaf in leaves], structure)
            for leaves, (_, structure) in zip(parts, flat, strict=True)
        ]
        for number in range(count)
    ]
    return MicroBatches(cut, sizes)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _cut(leaf: Any, sizes: list[int], count: int) -> Sequence[Any]:
    if isinstance(leaf, Whole):
        return [leaf.value] * count
    return leaf.split_with_sizes(sizes) if count > 1 and _has_rows(leaf) else [leaf] * count


def join(values: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: concatenate their tensors along dimension 0.

    Raises:
        ValueError: outputs differ in structure, or contain values that cannot be joined: scalar tensors, and other
            values that differ.
    """
    if len(values) == 1:
        return values[0]
    flat = [pytree.tree_flatten(value) for value in values]
    structure = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"Pipe: outputs of micro-batches differ in structure: 0 has {structure}, {number} has {other}"
            )
    return pytree.tree_unflatten(
        [_joined(parts) for parts in zip(*[leaves for leaves, _ in flat], strict=True)], structure
    )


def mean(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the loss of a mini-batch, a mean over its rows, from the losses of its micro-batches."""
    if len(losses) == 1:
        return losses[0]
    return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum(0)


def _joined(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            raise ValueError(
                "Pipe: scalar outputs of micro-batches cannot be combined: return a value per row, compute the loss in "
                "step(), name the output that is the loss (output_loss_value_spec), or use one micro-batch"
            )
        return torch.cat(parts)
    if any(type(part) is not type(first) or part != first for part in parts[1:]):
        raise ValueError(f"Pipe: outputs that are not tensors differ between micro-batches: {parts}")
    return first
