"""How much the loss of each micro-batch counts in the loss of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from math import isfinite
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from pymoe._torch_private import FakeTensor, pytree
from pymoe.pipe.loss_graph import LossReading, Words, check_mean_over_rows
from pymoe.pipe.micro_batches import MicroBatches

Reduction = Literal["mean", "sum"] | Callable[..., Any]
PADDING = -100
"""What torch's losses, and those of others, leave out unless told otherwise."""


STEP = Words(
    "Pipe.step",
    "Give the step the number that the loss is divided by, as a function of a micro-batch's target: "
    "reduction=lambda target: (target != -100).sum(), for example",
    "give the step reduction='sum', too",
    "; with reduction=len the step takes it for one",
)
CALL = Words(
    "Pipe",
    "Call step(reduction=...), which takes the number that the loss is divided by, or have one micro-batch",
    "call step(reduction='sum')",
)
_OVER_TARGETS = {"CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss"}
"""Modules of torch (older ones lack the last) that divide by the sum of the weights of targets."""


class LossWeights(NamedTuple):
    """How much the losses of micro-batches count."""

    shares: Sequence[float]
    """For every micro-batch the gradient of its loss."""
    uncounted: frozenset[int] = frozenset()
    """Micro-batches of which nothing counts: their losses may not be numbers."""
    are_rows: bool = False
    """The losses are taken for means over rows, which nobody has stated of this loss function."""


def check_readings(readings: Sequence[LossReading | None], micro_batches: MicroBatches, words: Words) -> None:
    """Raise ValueError if losses that are taken for means over rows are something else, as far as their graphs tell."""
    read = [(reading, rows) for reading, rows in zip(readings, micro_batches.rows, strict=True) if reading is not None]
    known = [reading for reading, _ in read]
    check_mean_over_rows(known, [rows for _, rows in read], words)
    if any(reading.is_opaque for reading in known):
        rows = micro_batches.rows
        padding = [sum(map(_padding, pytree.tree_leaves(values))) for values in micro_batches.values]
        if any(here * rows[0] != padding[0] * count for here, count in zip(padding, rows, strict=True)):
            raise ValueError(
                f"{words.who}: micro-batches have different amounts of padding ({PADDING}), and what the loss divides "
                f"by cannot be seen. {words.remedy}{words.instead}"
            )


def _padding(leaf: Any) -> int:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.is_floating_point() or leaf.is_complex():
        return 0
    return 0 if _has_no_numbers(leaf) else int((leaf == PADDING).sum())


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def weigh(
    micro_batches: MicroBatches,
    reduction: Reduction,
    loss_fn: Callable[..., Any] | None,
    arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> LossWeights:
    """Return how much the losses of the micro-batches count.

    Args:
        micro_batches: of how many rows they are.
        reduction: ``"mean"``, ``"sum"``, or what the loss of a micro-batch is divided by, as a function.
        loss_fn: one of torch's losses may say itself what it is divided by.
        arguments: for every micro-batch those of that function.

    Raises:
        TypeError: the function does not return numbers.
        ValueError: it returns a number below 0, or none that is finite.
    """
    count = len(micro_batches.rows)
    weight = None
    if callable(reduction):
        weight = reduction
    elif (options := options_of(loss_fn)) is not None:
        own = options.get("reduction", "mean")
        if reduction == "sum" != own:
            raise ValueError(f"Pipe.step: reduction: expected {own!r}, which that of loss_fn is, got 'sum'")
        reduction = "sum" if own == "sum" else reduction
        weight = _divides_by(loss_fn, options)
    if reduction == "sum":
        return LossWeights([1.0] * count)
    if weight is None:
        return LossWeights(micro_batches.weights, are_rows=count > 1)
    weights = [_number(weight(*args, **kwargs)) for args, kwargs in arguments]
    total = sum(weights)
    if not total:  # of the whole mini-batch nothing counts, and its loss is what the loss function makes of that
        return LossWeights([1.0] * count)
    shares = [weight / total for weight in weights]
    return LossWeights(shares, frozenset(number for number, share in enumerate(shares) if not share))


def _number(weight: Any) -> float:
    if isinstance(weight, torch.Tensor) and weight.numel() != 1:
        raise TypeError(f"Pipe.step: reduction: expected a number, got a tensor of shape {tuple(weight.shape)}")
    try:
        number = float(weight)
    except (TypeError, ValueError):
        raise TypeError(f"Pipe.step: reduction: expected a number, got {type(weight).__name__}") from None
    if number < 0 or not isfinite(number):
        raise ValueError(f"Pipe.step: reduction: expected a finite number of at least 0, got {number}")
    return number


def options_of(loss_fn: Callable[..., Any] | None) -> dict[str, Any] | None:
    """Return the options of a loss function that is one of torch's; None: it is not.

    They are those that were given, of a function of ``torch.nn.functional`` or of a partial one, or all of a module of
    ``torch.nn``.
    """
    function, given = _function(loss_fn)
    if type(function).__module__ == nn.CrossEntropyLoss.__module__:
        return {**vars(function), **function._buffers}
    if not isinstance(function, FunctionType) or not _has_reduction(function):
        return None
    if given.get("size_average") is False and given.get("reduce") is not False:
        given["reduction"] = "sum"  # as torch spelled it once
    return given


def _function(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function, or module, that is called, and what partial ones give it by name."""
    given: dict[str, Any] = {}
    while isinstance(loss_fn, partial) and not loss_fn.args:
        given = {**loss_fn.keywords, **given}
        loss_fn = loss_fn.func
    return loss_fn, given


@cache
def _has_reduction(function: FunctionType) -> bool:
    return function.__module__ == F.__name__ and "reduction" in signature(function).parameters


def _divides_by(loss_fn: Any, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return what a mean of torch's divides by, as a function of the target; None: it is proportional to rows."""
    function, _ = _function(loss_fn)
    if options.get("reduction", "mean") != "mean" or options.get("reduce") is False:
        return None
    if function in (F.cross_entropy, F.nll_loss) or type(function).__name__ in _OVER_TARGETS:
        ignored = options.get("ignore_index")
        return partial(_counted, options.get("weight"), PADDING if ignored is None else ignored)
    return None


def _counted(weight: torch.Tensor | None, ignore_index: int, target: Any) -> Any:
    """Return the sum of the weights of the targets that are not ``ignore_index``."""
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or _has_no_numbers(target):
        return len(target)  # of probabilities none is left out
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return weight.detach().to(target.device, torch.float64)[target.where(kept, 0)].mul(kept).sum()
