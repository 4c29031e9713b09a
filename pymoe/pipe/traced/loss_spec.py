"""Which part of a model's output is its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils import _pytree

__all__ = ["find_loss"]


def find_loss(spec: Any, structure: _pytree.TreeSpec) -> int:
    """The number of the leaf of a model's output that ``spec`` says is the loss.

    Args:
        spec: like the output, True where the loss is and False or None elsewhere: True for the output itself,
            ``(False, True)`` for the second of two, ``{"loss": True}`` for an item (or attribute) of that name; what a
            dictionary leaves out is not the loss.
        structure: of the output.

    Raises:
        TypeError: it contains something else.
        ValueError: there is no such part, none is the loss, or several are.
    """
    leaves = list(range(structure.num_leaves))
    output = _pytree.tree_unflatten(leaves, structure)
    found = list(_losses(spec, output, "the output"))
    if len(found) != 1:
        raise ValueError(f"output_loss_value_spec must name one loss, {spec!r} names {len(found)}")
    if isinstance(found[0], bool) or not isinstance(found[0], int):
        raise ValueError(f"output_loss_value_spec {spec!r}: the loss must be one tensor, not a structure of several")
    return found[0]


def _losses(spec: Any, output: Any, words: str) -> Iterator[Any]:
    if spec is None or spec is False:
        return
    if spec is True:
        yield output
    elif isinstance(spec, Mapping):
        for name, inner in spec.items():
            yield from _losses(inner, _item(output, name, words), f"{words}[{name!r}]")
    elif isinstance(spec, (tuple, list)):
        if not isinstance(output, (tuple, list)) or len(output) != len(spec):
            raise ValueError(f"output_loss_value_spec: {words} is no sequence of {len(spec)}, as {spec!r} is")
        for number, (inner, part) in enumerate(zip(spec, output, strict=True)):
            yield from _losses(inner, part, f"{words}[{number}]")
    else:
        raise TypeError(f"output_loss_value_spec: True, False, None, or structures of them, got {spec!r}")


def _item(output: Any, name: Any, words: str) -> Any:
    if isinstance(output, Mapping):
        if name in output:
            return output[name]
    elif isinstance(name, str) and hasattr(output, name):
        return getattr(output, name)
    raise ValueError(f"output_loss_value_spec: {words} has no {name!r}")
