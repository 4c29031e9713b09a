"""Losses inside a model: which part of its output is the loss, and modules that return one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pymoe._torch_private import pytree


class LossWrapper(nn.Module):
    """A model and its loss, as one module that returns the loss. Subclasses compute it in ``forward``.

    Args:
        module: the model.
        loss_fn: the loss.
    """

    loss_spec: Any = None
    """Where in the output the loss is: the default of ``output_loss_value_spec`` of :func:`pymoe.pipeline`."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss.

        Args:
            args: what the model takes, and the targets.
            kwargs: the same by name.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: a subclass of LossWrapper computes the loss there, as "
            "TrivialLossWrapper does by self.loss_fn(self.module(x), targets)"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> torch.Tensor:
        """Return the loss.

        Args:
            x: what the model takes.
            targets: what ``loss_fn`` takes beside the model's output.
        """
        loss: torch.Tensor = self.loss_fn(self.module(x), targets)
        return loss


def find_loss(spec: Any, structure: pytree.TreeSpec) -> int:
    """Return the number of the leaf of a model's output that is the loss, given the output's structure.

    ``spec`` is like the output, True where the loss is and False or None elsewhere: True for the output itself,
    ``(False, True)`` for the second of two, ``{"loss": True}`` for an item (or attribute) of that name; what a
    dictionary omits is not the loss.

    Raises:
        TypeError: it contains something else.
        ValueError: there is no such part, or not exactly one is the loss.
    """
    leaves = list(range(structure.num_leaves))
    output = pytree.tree_unflatten(leaves, structure)
    found = list(_losses(spec, output, "the output"))
    if len(found) != 1:
        raise ValueError(f"output_loss_value_spec: expected one loss, {spec!r} names {len(found)}")
    if isinstance(found[0], bool) or not isinstance(found[0], int):
        raise ValueError(f"output_loss_value_spec: expected one tensor, not a structure of several, got {spec!r}")
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
            raise ValueError(f"output_loss_value_spec: {words} is not a sequence of {len(spec)}, as {spec!r} is")
        for number, (inner, part) in enumerate(zip(spec, output, strict=True)):
            yield from _losses(inner, part, f"{words}[{number}]")
    else:
        raise TypeError(f"output_loss_value_spec: expected True, False, None or structures of them, got {spec!r}")


def _item(output: Any, name: Any, words: str) -> Any:
    if isinstance(output, Mapping):
        if name in output:
            return output[name]
    elif isinstance(name, str) and hasattr(output, name):
        return getattr(output, name)
    raise ValueError(f"output_loss_value_spec: {words} has no {name!r}")
