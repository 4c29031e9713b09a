"""The loss of a step: the stage that computes it, the weights of micro-batches, and losses inside models.

The loss is an additional last stage, which runs right after the last stage of the model. It is never recomputed: a loss
function is called once for each micro-batch, in order, and may have state. The modules of the loss function count as
layers of that stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from math import isfinite
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from pymoe._errors import add_note
from pymoe._torch_private import pytree
from pymoe.autograd.graph_nodes import find_leaves_and_nodes
from pymoe.pipe.context import is_recomputing, micro_batch, with_auxiliary_losses
from pymoe.pipe.loss_graph import LossReading, Words, check_mean_over_rows, has_no_value, read_loss
from pymoe.pipe.loss_rows import kind_of
from pymoe.pipe.python_values import held_by
from pymoe.pipe.stages import INPUT, MicroBatches, Pipeline, Source, Stage

LossFunction = Callable[..., torch.Tensor]
Unflatten = Callable[[Sequence[Any]], Any]
PLAIN = (type(None), bool, int, float, str)


class Objective(NamedTuple):
    """The loss that a step minimises."""

    loss_fn: LossFunction | None
    """Called with the model's output and, if there is one, the target. None: the output is the loss."""
    has_target: bool
    """True if the pipeline takes one more input, the target."""
    unflatten: Unflatten
    """Builds the model's output from the pipeline's output values."""
    own: int
    """The index of the output value that is the loss, if there is no ``loss_fn``."""


def with_loss(pipeline: Pipeline, objective: Objective, uncounted: frozenset[int], is_read: bool) -> Pipeline:
    """Return the pipeline with one more stage, which computes the loss.

    ``uncounted``: the indices of micro-batches whose loss is 0: a loss function is not called for them, and the model's
    own loss gives gradients of 0. ``is_read``: the stage also reads facts from the loss's graph, and returns them as a
    :class:`LossReading`.
    """
    loss_fn, has_target, unflatten, own = objective
    reading: tuple[Source, ...] = ()
    if is_read and loss_fn is None:
        read = with_reading(pipeline, own)
        pipeline, reading = replace(read, outputs=pipeline.outputs), read.outputs[-1:]
    if uncounted and loss_fn is None:
        pipeline = _with_gradients_of_0(pipeline, own, uncounted)
    outputs = tuple(dict.fromkeys(pipeline.outputs))
    places = [outputs.index(source) for source in pipeline.outputs]
    others = reading if loss_fn is None else (Source(INPUT, pipeline.inputs),) * has_target

    def compute(*values: Any) -> Sequence[Any]:
        output = unflatten([values[place] for place in places])
        given = values[len(outputs) :]
        if loss_fn is None:
            loss = _checked(output, None)
            return [_nothing([loss]) if _is_running(uncounted) else loss, given[0] if is_read else None]
        flat = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        leaves = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        if _is_running(uncounted):
            return [_nothing(leaves), None]
        ends = {leaf.grad_fn for leaf in leaves}  # read before the call: loss_fn may change outputs in place
        try:
            loss = loss_fn(output, *given)
        except TypeError as error:
            if not given:
                add_note(
                    error, "the step was given no target: step(x, target=y, loss_fn=...) calls loss_fn(output, target)"
                )
            raise
        loss = _checked(loss, loss_fn)
        return [loss, read_loss(loss, ends) if is_read else None]

    function: Callable[..., Sequence[Any]] = compute
    modules = modules_of(loss_fn, [module for stage in pipeline.stages for module in stage.modules])
    for module in modules:
        function = with_auxiliary_losses(function, module)
    stages = pipeline.stages
    made = Stage(function, (*outputs, *others), 2, modules, stages[-1].device)
    return Pipeline((*stages, made), pipeline.inputs + has_target, (Source(len(stages), 0),))


def with_reading(pipeline: Pipeline, own: int) -> Pipeline:
    """Return the pipeline with one more output: the ``LossReading`` of output number ``own``, which is a loss."""
    maker, number = pipeline.outputs[own]
    stage = pipeline.stages[maker]

    def function(*values: Any) -> Sequence[Any]:
        made = stage.function(*values)
        loss = made[number]
        is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not is_recomputing()
        return [*made, read_loss(loss, None) if is_loss else None]

    reads = replace(stage, function=function, outputs=stage.outputs + 1)
    read = _with_stage(pipeline, maker, reads)
    return replace(read, outputs=(*pipeline.outputs, Source(maker, stage.outputs)))


def _with_stage(pipeline: Pipeline, number: int, stage: Stage) -> Pipeline:
    """Return the pipeline with another stage in place of stage ``number``."""
    return replace(pipeline, stages=(*pipeline.stages[:number], stage, *pipeline.stages[number + 1 :]))


def _is_running(micro_batches: frozenset[int]) -> bool:
    return bool(micro_batches) and (now := micro_batch()) is not None and now.index in micro_batches


def _with_gradients_of_0(pipeline: Pipeline, own: int, uncounted: frozenset[int]) -> Pipeline:
    """Return the pipeline, changed so that output number ``own``, a loss, gives gradients of 0 in the micro-batches
    ``uncounted``, even if its derivatives are infinite or NaN, as those of 0 / 0 are.
    """
    maker, number = pipeline.outputs[own]
    if maker == INPUT:
        return pipeline
    stage = pipeline.stages[maker]

    def function(*values: Any) -> Sequence[Any]:
        made = stage.function(*values)
        if _is_running(uncounted) and isinstance(made[number], torch.Tensor):
            _stop_gradients(made[number])
        return made

    return _with_stage(pipeline, maker, replace(stage, function=function))


def _stop_gradients(loss: torch.Tensor) -> None:
    """Make the backward of a loss whose own gradient is 0 give gradients of exactly 0.

    Autograd Functions may add gradients of their own, as those of injected losses do (:func:`pymoe.nn.inject_loss`), so
    gradients that have come through them are left as they are.
    """
    if loss.grad_fn is None:
        return
    _, nodes = find_leaves_and_nodes([loss.grad_fn], None)
    _, kept = find_leaves_and_nodes([node for node in nodes if node is not None and kind_of(node) is None], None)
    for node in nodes:
        if node is not None and node not in kept:
            node.register_hook(_zeros)


def _zeros(grads: Sequence[torch.Tensor | None], _: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def _nothing(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a loss of 0 that gives all outputs gradients of 0."""
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
    """Return True if the function can be kept after a step without keeping tensors of the step alive.

    False, for example, for a closure over targets.
    """
    if isinstance(loss_fn, FunctionType):
        defaults = (*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values())
        return not (loss_fn.__closure__ or loss_fn.__dict__) and all([isinstance(value, PLAIN) for value in defaults])
    return loss_fn is None or isinstance(loss_fn, (nn.Module, BuiltinFunctionType))


# Weights of micro-batches.

Reduction = Literal["mean", "sum"] | Callable[..., Any]
PADDING = -100
"""The target index that torch's losses, and most others, ignore by default."""


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
"""Torch's modules that divide the loss by the sum of the targets' weights; older versions lack the last one."""


class LossWeights(NamedTuple):
    """The weights of the micro-batches' losses."""

    shares: Sequence[float]
    """The factor of every micro-batch's loss in the loss of the mini-batch."""
    uncounted: frozenset[int] = frozenset()
    """Micro-batches of weight 0, such as those that contain only padding; their losses could be NaN."""
    are_rows: bool = False
    """True if it is assumed, and must be checked, that the losses are means over rows."""


def check_readings(readings: Sequence[LossReading | None], micro_batches: MicroBatches, words: Words) -> None:
    """Raise ValueError if losses are assumed to be means over rows and their graphs show that they are not, or if their
    graphs cannot be read and micro-batches have different shares of padding.
    """
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
    return 0 if has_no_value(leaf) else int((leaf == PADDING).sum())


def weigh(
    micro_batches: MicroBatches,
    reduction: Reduction,
    loss_fn: Callable[..., Any] | None,
    arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> LossWeights:
    """Return the weights of the micro-batches' losses. For torch's own losses, find out what they divide by.

    ``reduction``: "mean", "sum", or a function that returns the number by which a micro-batch's loss is divided;
    ``arguments``: the ``(args, kwargs)`` of this function for every micro-batch.

    Raises:
        TypeError: ``reduction`` returns something that is not a number.
        ValueError: ``reduction`` returns a negative or infinite number or NaN, or it is "sum" although ``loss_fn``,
            one of torch's own losses, does not sum.
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
    if not total:  # all weights are 0: sum the losses as the loss function returns them
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
    """Return the options of a loss function of torch, or None for any other function.

    For functions of ``torch.nn.functional`` these are the options given by ``functools.partial``, for modules of
    ``torch.nn`` all options.
    """
    function, given = _function(loss_fn)
    if type(function).__module__ == nn.CrossEntropyLoss.__module__:
        return {**vars(function), **function._buffers}
    if not isinstance(function, FunctionType) or not _has_reduction(function):
        return None
    if given.get("size_average") is False and given.get("reduce") is not False:
        given["reduction"] = "sum"  # torch's deprecated way to ask for a sum
    return given


def _function(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """Unwrap a ``functools.partial`` without positional arguments. Return the function or module inside, and the
    keyword arguments that the partial gives it.
    """
    given: dict[str, Any] = {}
    while isinstance(loss_fn, partial) and not loss_fn.args:
        given = {**loss_fn.keywords, **given}
        loss_fn = loss_fn.func
    return loss_fn, given


@cache
def _has_reduction(function: FunctionType) -> bool:
    return function.__module__ == F.__name__ and "reduction" in signature(function).parameters


def _divides_by(loss_fn: Any, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return a function that computes, from the target, the number by which torch's ``loss_fn`` divides its sum.

    Returns None if the loss is not a mean, or if its divisor is proportional to the number of rows.
    """
    function, _ = _function(loss_fn)
    if options.get("reduction", "mean") != "mean" or options.get("reduce") is False:
        return None
    if function in (F.cross_entropy, F.nll_loss) or type(function).__name__ in _OVER_TARGETS:
        ignored = options.get("ignore_index")
        return partial(_counted, options.get("weight"), PADDING if ignored is None else ignored)
    return None


def _counted(weight: torch.Tensor | None, ignore_index: int, target: Any) -> Any:
    """Return the total weight of the targets that are not ``ignore_index`` (without ``weight``, their number).

    If the targets are not integers, or have no data, return the number of rows.
    """
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or has_no_value(target):
        return len(target)  # for example, targets are probabilities, which are never ignored
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return weight.detach().to(target.device, torch.float64)[target.where(kept, 0)].mul(kept).sum()


# The modules of a loss function.

MAX_ITEMS = 256
"""Containers with more items than this are not searched for modules."""


def modules_of(loss_fn: Callable[..., Any] | None, layers: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the modules that a loss function uses, each once.

    A module that contains some of the model's ``layers``, such as the model itself, is not returned as a whole; only
    those parts are returned that the function's code names.

    Modules are found in methods, partial functions, closures, defaults, globals and attributes of objects, and in the
    functions called there, if the code names them. Modules that code looks up by other means are not found.
    """
    of_model = {id(part) for layer in layers for part in layer.modules()}
    found: dict[int, nn.Module] = {}
    seen: dict[Any, Any] = {}
    todo: list[tuple[Any, frozenset[str]]] = [(loss_fn, frozenset())]
    while todo:
        value, names = todo.pop()
        if isinstance(value, nn.Module) and (id(value) in of_model or of_model.isdisjoint(map(id, value.modules()))):
            found[id(value)] = value
            continue
        is_method = isinstance(value, MethodType)
        key = (id(value.__func__), id(value.__self__)) if is_method else (id(value), names)
        if key not in seen:
            seen[key] = value  # keeps the value alive, so that its id stays unique
            todo += _held(value, names)
    return tuple(found.values())


def _held(value: Any, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yield the parts of ``value``, each with the names that occur in the code that uses the part."""
    if isinstance(value, partial):
        yield from ((one, names) for one in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        code = frozenset(_names(getattr(value.__func__, "__code__", None)))
        yield from ((value.__func__, names), (value.__self__, code))
    elif isinstance(value, FunctionType):
        if value.__module__ and value.__module__.partition(".")[0] == "torch":
            return
        code = frozenset(_names(value.__code__))
        held = [*held_by(value), *[value.__globals__[name] for name in code if name in value.__globals__]]
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            held.append(wrapped)
        yield from ((one, code) for one in held)
    elif isinstance(value, (tuple, list, dict)) and len(value) <= MAX_ITEMS:
        yield from ((one, names) for one in (value.values() if isinstance(value, dict) else value))
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        call = type(value).__call__ if callable(value) else None
        names |= frozenset(_names(getattr(call, "__code__", None)))
        attributes = {**vars(value), **getattr(value, "_modules", {})}
        yield from ((attributes[name], names) for name in names if name in attributes)
        methods = [getattr(type(value), name, None) for name in names - attributes.keys()]
        yield from ((MethodType(method, value), names) for method in methods if isinstance(method, FunctionType))
        if isinstance(call, FunctionType):
            yield call, names


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)


# Losses inside a model.


class LossWrapper(nn.Module):
    """A model and its loss function as one module, which returns the loss. Subclasses compute the loss in ``forward``.

    Args:
        module: the model; kept as the attribute ``module``.
        loss_fn: a function or module that computes the loss; kept as the attribute ``loss_fn``.
    """

    loss_spec: Any = None
    """Where the loss is in the output: the default of :func:`pymoe.pipeline`'s ``output_loss_value_spec``."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss.

        Args:
            args: the model's arguments and the targets.
            kwargs: the same, as keyword arguments.

        Raises:
            NotImplementedError: the subclass does not define ``forward``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: a subclass of LossWrapper computes the loss there, as "
            "TrivialLossWrapper does by self.loss_fn(self.module(x), targets)"
        )


class TrivialLossWrapper(LossWrapper):
    """Returns ``loss_fn(module(x), targets)``."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> torch.Tensor:
        """Return the loss.

        Args:
            x: the model's input.
            targets: the second argument of ``loss_fn``.
        """
        loss: torch.Tensor = self.loss_fn(self.module(x), targets)
        return loss


def find_loss(spec: Any, structure: pytree.TreeSpec) -> int:
    """Return the index of the loss among the leaves of a model's output, given the output's structure.

    ``spec`` has the output's structure, with True where the loss is and False or None elsewhere: True if the output
    itself is the loss, ``(False, True)`` for the second of two values, ``{"loss": True}`` for the item or attribute
    ``loss``. Keys may be omitted.

    Raises:
        TypeError: ``spec`` contains something else.
        ValueError: the output has no part that ``spec`` names, or not exactly one part is the loss.
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
