"""Calls of an operator's ``autograd.Function`` that cost what is needed: the kernel alone where nothing is recorded.

``Function.apply`` with a ``setup_context``, which the transforms of :mod:`torch.func` ask for, binds the signature of
``forward`` anew in every call: most of the time of a call with few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import are_functorch_transforms_active, unwrap_if_dead

_Function = type[torch.autograd.Function]

_apply_of: dict[_Function, Callable[..., Any]] = {}
"""The ``apply`` to which the public one of a Function leads."""


def one_by_one(function: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Call ``function`` for one element of a batch after the other: a rule for :func:`torch.vmap`.

    Args:
        function: takes ``args`` without their batch dimensions; it returns a tensor or a tuple of tensors.
        info: from torch: the batch size is all that matters.
        in_dims: the batch dimension of every argument; None: it is the same for all elements.
        args: the arguments of the batch.

    Returns:
        The stacked outputs, and their batch dimensions.

    Raises:
        ValueError: the batch has no elements, of which the shapes of the outputs could be learned.
    """
    if not info.batch_size:
        raise ValueError("pymoe.ops: torch.vmap: expected a batch of at least one element, got none")

    def of(place: int) -> list[Any]:
        return [value if dim is None else value.select(dim, place) for value, dim in zip(args, in_dims, strict=True)]

    outputs = [function(*of(place)) for place in range(info.batch_size)]
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    return tuple(torch.stack(column) for column in zip(*outputs, strict=True)), (0,) * len(outputs[0])


@cache
def _transformable(function: _Function) -> _Function:
    """Return the Function with what transforms ask for; torch.compile refuses Functions that have it."""

    def refuse(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(
            f"pymoe.ops: {function.__name__.strip('_')} has no forward-mode derivative (jvp, jacfwd, hessian, "
            "forward_ad); pymoe.reference and MoE(backend='reference') have it"
        )

    vmap, tangent = partial(one_by_one, partial(call, function)), getattr(function, "tangent", refuse)
    methods = {"vmap": staticmethod(vmap), "jvp": staticmethod(tangent)}
    return type(function.__name__, (function,), methods)


def is_recorded(*values: Any) -> bool:
    """Return whether a derivative of what is computed from ``values`` may be asked for.

    That is so where one of the tensors requires grad and grad mode is on, inside the transforms of :mod:`torch.func`,
    inside a ``forward_ad.dual_level``, and in an exported graph, which may meet other tensors than its example.

    Args:
        values: the arguments of a call: tensors, and anything else.
    """
    if is_compiling():
        if torch.compiler.is_exporting():
            return True
    else:
        canaries.transforms()
        if are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return True
    return is_grad_enabled() and _any_requires_grad(values)


def call(function: _Function, *args: Any) -> Any:
    """Return ``function.apply(*args)``, or ``function.forward(*args)`` where nothing records it.

    Under :func:`torch.vmap` the Function is called for one element of the batch after the other. Forward-mode
    derivatives are those of its static method ``tangent(ctx, *tangents)``.

    Args:
        function: a Function with ``setup_context``, whose ``forward`` takes these arguments and changes none of them.
            It returns fresh tensors or views of its arguments, which are ordinary views where nothing is recorded:
            autograd follows changes of them in place. It never returns an argument itself, of which ``apply`` makes a
            view and ``forward`` alone would not.
        args: all arguments of its ``forward``.

    Raises:
        NotImplementedError: a forward-mode derivative is asked for, and the Function has no ``tangent``.
    """
    if is_compiling():
        return function.apply(*args)
    canaries.transforms()
    if are_functorch_transforms_active():
        return _transformable(function).apply(*args)
    if forward_ad._current_level >= 0:
        function = _transformable(function)
    elif not (is_grad_enabled() and _any_requires_grad(args)):
        return function.forward(*args)
    apply = _apply_of.get(function)
    if apply is None:
        apply = _apply_of[function] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    # Tensors that left a transform are wrapped still.
    return apply(*[unwrap_if_dead(value) if isinstance(value, Tensor) else value for value in args])


def _any_requires_grad(values: tuple[Any, ...]) -> bool:
    for value in values:  # noqa: SIM110  # a generator for any() would cost more than the answer
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False
