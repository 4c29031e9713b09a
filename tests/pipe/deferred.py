"""Calls batch norms with micro-batches, without a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.pipe import context
from pymoe.pipe.deferred_batch_norm import convert_deferred_batch_norm


def run(module: Callable[[Tensor], Any], batch: Tensor, chunks: int, stage: int = 0, **flags: bool) -> list[Any]:
    """Call ``module`` for each micro-batch of ``batch``, as a stage of a pipeline does."""
    parts = batch.tensor_split(chunks)
    outputs = []
    for index, part in enumerate(parts):
        weight = len(part) / len(batch)
        with context.running(context.MicroBatch(index, len(parts), weight, **flags, stage=stage)):
            outputs.append(module(part))
    return outputs


def micro_batches(module: nn.Module, batch: Tensor, chunks: int) -> Callable[[int], Any]:
    """Return a function that runs ``module`` on one of ``chunks`` micro-batches."""
    parts = batch.tensor_split(chunks)

    def forward(index: int, **flags: Any) -> Any:
        with context.running(context.MicroBatch(index, chunks, len(parts[index]) / len(batch), **flags)):
            return module(parts[index])

    return forward


def pair(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a layer and its deferred copy."""
    return layer, convert_deferred_batch_norm(copy.deepcopy(layer))


def batches(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=random, dtype=torch.float64).add(step).to(dtype) for step in range(count)]


def assert_same_statistics(left: nn.Module, right: nn.Module, tolerance: float = 1e-12) -> None:
    left_buffers, right_buffers = dict(left.named_buffers()), dict(right.named_buffers())
    assert left_buffers.keys() == right_buffers.keys()
    for name, buffer in left_buffers.items():
        torch.testing.assert_close(right_buffers[name], buffer, rtol=tolerance, atol=tolerance)
