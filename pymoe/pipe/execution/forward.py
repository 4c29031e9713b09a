"""A forward pass through a pipeline, and the backward pass that a loss outside of it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pymoe.pipe.context import MicroBatch, running
from pymoe.pipe.execution.graph import memory_of
from pymoe.pipe.execution.outer import accumulate, attach, end_history
from pymoe.pipe.execution.run import Run
from pymoe.pipe.execution.values import Crossing, Sent, unpack
from pymoe.pipe.micro_batches import MicroBatches
from pymoe.pipe.stages import INPUT, Pipeline, Source

__all__ = ["run_forward", "run_in_one_graph"]


def run_forward(run: Run, forward: Callable[[Run], None], backward: Callable[[Run], None]) -> list[list[Any]]:
    """For every micro-batch its output values, which have the pipeline as their history.

    Args:
        run: the mini-batch.
        forward: runs its forward actions.
        backward: runs its backward actions.
    """
    try:
        forward(run)
    except BaseException:
        run.release()
        raise
    outputs = run.outputs()
    crossings = [
        leaf
        for values in outputs
        for value in values
        for leaf in value.leaves
        if type(leaf) is Crossing and leaf.origin is not None
    ]
    made: dict[int, torch.Tensor] = {}
    if crossings:
        leaves = run.leaves()
        tensors = [*run.inputs.tensors, *leaves]
        ends = [(crossing.origin, crossing.number) for crossing in crossings]

        def gradients(grads: Sequence[torch.Tensor | None], keep: bool) -> Sequence[torch.Tensor | None]:
            try:
                run.begin_backward(keep)
                for (origin, number), grad in zip(ends, grads, strict=True):
                    if grad is not None:
                        assert origin is not None
                        origin.take(number, grad)
                backward(run)
                return _in_order(run, leaves)
            finally:
                if not keep:
                    run.release()
                    ends.clear()

        # Outputs of several micro-batches are copied into one tensor.
        tied = _tied(crossings, run.inputs.tensors) if len(outputs) == 1 else ()
        attached = attach(gradients, [crossing.tensor for crossing in crossings], tensors, tied)
        end_history(run.inputs.edited())
        made = {id(crossing): tensor for crossing, tensor in zip(crossings, attached, strict=True)}
    else:
        run.release()
    return [[_value(value, made) for value in values] for values in outputs]


def run_in_one_graph(pipeline: Pipeline, micro_batches: MicroBatches) -> list[list[Any]]:
    """The same on this thread, with nothing cut off from its history."""
    outputs = []
    for index, inputs in enumerate(micro_batches.values):
        made = {Source(INPUT, number): value for number, value in enumerate(inputs)}
        for number, stage in enumerate(pipeline.stages):
            about = MicroBatch(index, len(micro_batches.rows), micro_batches.weights[index], stage=number)
            with running(about):
                found = stage.function(*[made[source] for source in stage.inputs])
            made.update((Source(number, output), value) for output, value in enumerate(found))
        outputs.append([made[source] for source in pipeline.outputs])
    return outputs


def _tied(crossings: Sequence[Crossing], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Which of the outputs are in memory that another output has, too, or an input, or a leaf."""
    places = [memory_of(crossing.tensor) for crossing in crossings]
    shared = Counter([*places, *dict.fromkeys(map(memory_of, inputs))])
    return [
        number
        for number, (crossing, place) in enumerate(zip(crossings, places, strict=True))
        if crossing.is_fixed or shared[place] > 1
    ]


def _value(sent: Sent, made: dict[int, torch.Tensor]) -> Any:
    leaves = [made.get(id(leaf), leaf.tensor) if type(leaf) is Crossing else leaf for leaf in sent.leaves]
    return unpack(leaves, sent.structure)


def _in_order(run: Run, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Gradients for the run's inputs and for ``leaves``; those of others are added where they belong."""
    found, grads = run.gradients()
    by_leaf = {id(leaf): grad for leaf, grad in zip(found, grads, strict=True)}
    inputs = list(run.inputs.grads)
    ordered = [by_leaf.pop(id(leaf), None) for leaf in leaves]
    # A repeated forward has found them: tensors of closures, say, which nothing tells of before.
    late = [leaf for leaf in found if id(leaf) in by_leaf]
    accumulate(late, [by_leaf[id(leaf)] for leaf in late])
    return [*inputs, *ordered]
