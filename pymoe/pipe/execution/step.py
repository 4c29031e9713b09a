"""A training step inside of a pipeline: forward, loss and backward of all micro-batches, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pymoe.pipe.execution.outer import accumulate, end_history
from pymoe.pipe.execution.run import Run
from pymoe.pipe.execution.values import Crossing, Sent

__all__ = ["Losses", "run_step"]


class Losses:
    """Takes the loss of every micro-batch, and starts its backward pass."""

    def __init__(self, weights: Sequence[float], graphs: bool) -> None:
        """``weights``: the gradient of what is minimised by each loss."""
        self._weights = weights
        self._graphs = graphs
        self._losses: list[torch.Tensor | None] = [None] * len(weights)
        self._starts: dict[tuple[float, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}

    def arrive(self, micro_batch: int, sent: Sequence[Sent]) -> None:
        """The loss of a micro-batch.

        Raises:
            RuntimeError: it depends on nothing that requires gradients.
        """
        loss: Crossing = sent[0].leaves[0]
        self._losses[micro_batch] = loss.tensor
        if not self._graphs:
            return
        if loss.origin is None:
            raise RuntimeError("Pipe.step: the loss does not require gradients: nothing that it depends on does")
        weight, tensor = self._weights[micro_batch], loss.tensor
        kind = weight, tensor.dtype, tensor.device, tensor.shape
        start = self._starts.get(kind)
        if start is None:
            start = self._starts[kind] = torch.full_like(tensor, weight)
        loss.origin.take(loss.number, start)

    def all(self) -> torch.Tensor:
        """(micro-batches,): the losses."""
        return torch.stack([loss.reshape(()) if loss.dim() else loss for loss in self._losses if loss is not None])


def run_step(run: Run, perform: Callable[[Run], None]) -> None:
    """Run all actions and add the gradients to what they belong to, if nothing has failed."""
    try:
        perform(run)
        inputs, input_grads = run.inputs.tensors, run.inputs.grads
        leaves, grads = run.gradients()
        edited = run.inputs.edited()
    finally:
        run.release()
    accumulate([*inputs, *leaves], [*input_grads, *grads])
    end_history(edited)
