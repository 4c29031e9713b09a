"""Ends a pipeline in a loss: one more stage, which runs whenever the last one does.

It is never recomputed, so a loss function is called once for each micro-batch, in their order: it may have a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from pymoe._torch_private import pytree
from pymoe.pipe.auxiliary import with_auxiliary_losses
from pymoe.pipe.context import is_recomputing, micro_batch
from pymoe.pipe.loss_graph import read_loss
from pymoe.pipe.loss_modules import modules_of
from pymoe.pipe.stages import INPUT, Pipeline, Source, Stage

LossFunction = Callable[..., torch.Tensor]
Structure = Callable[[Sequence[Any]], Any]
PLAIN = (type(None), bool, int, float, str)


def with_loss(
    pipeline: Pipeline,
    loss_fn: LossFunction | None,
    has_target: bool,
    structure: Structure,
    own: int,
    uncounted: frozenset[int],
    is_read: bool,
) -> Pipeline:
    """Return the pipeline with one more stage, which makes the loss and what its graph tells.

    Args:
        pipeline: a pipeline with outputs.
        loss_fn: called with the model's output and, if there is one, the target. None: the output is the loss.
        has_target: the new pipeline takes one more input, the target.
        structure: makes the model's output of the pipeline's output values.
        own: which of the output values is the loss if there is no ``loss_fn``.
        uncounted: micro-batches for which ``loss_fn`` is not called, and whose loss is 0.
        is_read: the graph of the loss is read. Else what it tells is None.
    """
    reading: tuple[Source, ...] = ()
    if is_read and loss_fn is None:
        read = with_reading(pipeline, own)
        pipeline, reading = replace(read, outputs=pipeline.outputs), read.outputs[-1:]
    outputs = tuple(dict.fromkeys(pipeline.outputs))
    places = [outputs.index(source) for source in pipeline.outputs]
    others = reading if loss_fn is None else (Source(INPUT, pipeline.inputs),) * has_target

    def compute(*values: Any) -> Sequence[Any]:
        output = structure([values[place] for place in places])
        given = values[len(outputs) :]
        if loss_fn is None:
            return [_checked(output, None), given[0] if is_read else None]
        flat = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        leaves = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        if uncounted and (now := micro_batch()) is not None and now.index in uncounted:
            return [_nothing(leaves), None]
        ends = {leaf.grad_fn for leaf in leaves}  # the loss function may change them in place
        loss = _checked(loss_fn(output, *given), loss_fn)
        return [loss, read_loss(loss, ends) if is_read else None]

    function: Callable[..., Sequence[Any]] = compute
    modules = modules_of(loss_fn, [module for stage in pipeline.stages for module in stage.modules])
    for module in modules:
        function = with_auxiliary_losses(function, module)
    stages = pipeline.stages
    made = Stage(function, (*outputs, *others), 2, modules, stages[-1].device)
    return Pipeline((*stages, made), pipeline.inputs + has_target, (Source(len(stages), 0),))


def with_reading(pipeline: Pipeline, own: int) -> Pipeline:
    """Return the pipeline with one more output: what the graph of its output ``own``, a loss, tells."""
    maker, number = pipeline.outputs[own]
    stage = pipeline.stages[maker]

    def function(*values: Any) -> Sequence[Any]:
        made = stage.function(*values)
        loss = made[number]
        is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not is_recomputing()
        return [*made, read_loss(loss, None) if is_loss else None]

    reads = replace(stage, function=function, outputs=stage.outputs + 1)
    stages = (*pipeline.stages[:maker], reads, *pipeline.stages[maker + 1 :])
    return replace(pipeline, stages=stages, outputs=(*pipeline.outputs, Source(maker, stage.outputs)))


def _nothing(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 0, with gradients of 0 for all outputs, whatever they are."""
    parts = [output.reshape(-1)[:0].sum() for output in outputs if output.requires_grad]
    return sum(parts[1:], parts[0]) if parts else torch.zeros((), device=outputs[0].device if outputs else None)


def _checked(loss: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    if loss_fn is None:
        raise ValueError(
            "Pipe.step: without a loss_fn the model's own output is minimised, so it must be a tensor with one "
            f"element, got {what}: give step a loss_fn (and a target), or let the model return its loss"
        )
    raise ValueError(f"Pipe.step: loss_fn must return a tensor with one element, got {what}")


def holds_no_tensors(loss_fn: LossFunction | None) -> bool:
    """Return whether keeping the function keeps no tensors of a step, as a closure over the targets would."""
    if isinstance(loss_fn, FunctionType):
        defaults = (*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values())
        return not (loss_fn.__closure__ or loss_fn.__dict__) and all([isinstance(value, PLAIN) for value in defaults])
    return loss_fn is None or isinstance(loss_fn, (nn.Module, BuiltinFunctionType))
