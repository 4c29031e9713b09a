"""Chooses how many layers each stage of a pipeline has: by measured time, or by memory.

::

    balance = balance_by_time(2, model, sample)     # of a micro-batch's size
    pipe = Pipe(model, chunks=8, balance=balance)

Names and arguments are those of torchgpipe (Kim et al., 2020).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pymoe.pipe.balance.cost import balance_cost, check_partitions
from pymoe.pipe.balance.profile import LayerSize, LayerTime, profile_sizes, profile_times

__all__ = [
    "LayerSize",
    "LayerTime",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "profile_sizes",
    "profile_times",
]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Return layers per stage that make the slowest stage as fast as can be, by the times of :func:`profile_times`.

    Args:
        partitions: the number of stages.
        module: the model. It is left as it was.
        sample: an input, preferably of a micro-batch's size: times need not be proportional to the rows.
        timeout: seconds to measure.
        device: where to measure; None: where the model is.

    Returns:
        What ``Pipe`` takes as ``balance``.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or ``partitions`` is not an integer.
        ValueError: there are more stages than layers, or less than one; ``timeout`` is negative.
    """
    _check(partitions, module)
    times = profile_times(module, sample, timeout=timeout, device=device)
    return balance_cost([layer.total for layer in times], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Return layers per stage that make the largest stage as small as can be, by the bytes of :func:`profile_sizes`.

    ``param_scale`` is how many copies of its parameters training holds: 2 for parameters and gradients (SGD), 3 with
    momentum, 4 for Adam.

    Args:
        partitions: the number of stages.
        module: the model. It is left as it was.
        input: a mini-batch of the size to train with.
        chunks: the number of micro-batches; the activations of one are counted.
        param_scale: see above.
        device: where to measure; None: where the model is.

    Returns:
        What ``Pipe`` takes as ``balance``.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or ``partitions`` is not an integer.
        ValueError: there are more stages than layers, or less than one; ``chunks`` is less than 1; ``param_scale`` is
            negative.
    """
    _check(partitions, module)
    if not param_scale >= 0:
        raise ValueError(f"balance_by_size: param_scale must not be negative, got {param_scale}")
    sizes = profile_sizes(module, input, chunks=chunks, device=device)
    return balance_cost([layer.total(param_scale) for layer in sizes], partitions)


def _check(partitions: int, module: nn.Sequential) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"balance: module must be an nn.Sequential, got {type(module).__name__}")
    check_partitions(partitions, len(module))
