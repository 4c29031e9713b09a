"""Calls of an operator's ``autograd.Function`` at the lowest cost: only the kernel runs if autograd records nothing.

The transforms of :mod:`torch.func` require a ``setup_context``. With one, ``Function.apply`` binds its arguments to the
signature of ``forward`` in every call, which takes most of the time of a call with few tokens.
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
from pymoe._common.forward_mode import in_forward_mode
from pymoe._torch_private import are_functorch_transforms_active, unwrap_if_dead
from pymoe._transforms import is_exporting

_Function = type[torch.autograd.Function]

_apply_of: dict[_Function, Callable[..., Any]] = {}
"""The inner ``apply`` method of each Function, which the public ``Function.apply`` calls in the end."""

_REFUSAL = (
    "pymoe.ops: {} has no forward-mode derivative (jvp, jacfwd, hessian, forward_ad); pymoe.reference and "
    "MoE(backend='reference') have it"
)
_REFUSAL_IN_A_GRAPH = _REFUSAL.format("a graph of torch.compile")


def one_by_one(function: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Call ``function`` for each element of a batch in turn: a rule for :func:`torch.vmap` once ``function`` is bound.

    Args:
        function: takes ``args`` without their batch dimensions; it returns a tensor or a tuple of tensors.
        info: torch's description of the batch, of which only the size matters.
        in_dims: the batch dimension of every argument; None for an argument that is the same for all elements.
        args: the arguments of the batch.

    Returns:
        The stacked outputs and their batch dimensions.

    Raises:
        ValueError: the batch has no elements, so the shapes of the outputs are unknown.
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
    """Return a subclass of ``function`` with the methods that transforms need; torch.compile refuses the subclass."""

    def refuse(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(_REFUSAL.format(function.__name__.strip("_")))

    vmap, tangent = partial(one_by_one, partial(call, function)), getattr(function, "tangent", refuse)
    methods = {"vmap": staticmethod(vmap), "jvp": staticmethod(tangent)}
    return type(function.__name__, (function,), methods)


def is_recorded(*values: Any) -> bool:
    """Return whether a result that is computed from ``values`` may be differentiated.

    This is so if a tensor requires grad and grad mode is on. It is always so inside a ``forward_ad.dual_level``, while
    a graph is exported (which may later run on other tensors), and, except in compiled code, inside the transforms of
    :mod:`torch.func`.

    Args:
        values: the arguments of a call: tensors, and anything else.
    """
    if is_compiling():
        if is_exporting() or in_forward_mode():
            return True
    elif is_transformed():
        return True
    return is_differentiated(*values)


def is_transformed() -> bool:
    """Return whether a transform of :mod:`torch.func`, or forward-mode AD, may be active.

    Do not call this in compiled code.
    """
    canaries.transforms()
    return are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_differentiated(*values: Any) -> bool:
    """Return whether grad mode is on and a tensor requires grad: outside of transforms, autograd records a call only
    then.
    """
    if is_grad_enabled():
        # A loop, because any() with a generator takes longer than the test itself.
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def call(function: _Function, *args: Any) -> Any:
    """Return ``function.apply(*args)``, or ``function.forward(*args)`` if nothing records the call.

    Under :func:`torch.vmap` the Function is called for each element of the batch in turn. Its static method
    ``tangent(ctx, *tangents)``, if there is one, computes forward-mode derivatives.

    Args:
        function: a Function with ``setup_context``. Its ``forward`` takes these arguments, changes none of them, and
            returns new tensors or views of its arguments. It must not return an argument itself: ``apply`` would
            replace it with a view. If nothing records the call, returned views are ordinary views, and autograd tracks
            in-place changes of them.
        args: all arguments of its ``forward``.

    Raises:
        NotImplementedError: a forward-mode derivative is needed, and the Function has no ``tangent``; or the call is
            compiled as part of a graph inside forward mode, where tangents cannot be seen.
        ValueError: ``vmap`` has a batch without elements.
    """
    if is_compiling():
        # The error does not contain the name of the Function, because Dynamo cannot trace the name.
        if in_forward_mode():
            raise NotImplementedError(_REFUSAL_IN_A_GRAPH)
        return function.apply(*args)
    canaries.transforms()
    if are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _transformable(function).apply(*args)
    if is_grad_enabled():
        # This loop repeats the body of is_differentiated, because a call would cost more.
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                return apply(function, *args)
    return function.forward(*args)


def apply(function: _Function, *args: Any) -> Any:
    """Call ``function`` as ``function.apply(*args)`` does, but without binding the arguments to the signature of
    ``forward``.

    Binding takes most of the time of ``apply``. Call this outside of transforms only.
    """
    inner = _apply_of.get(function)
    if inner is None:
        inner = _apply_of[function] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    values = list(args)
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            # Tensors keep the wrapper of a transform after the transform has ended.
            values[place] = unwrap_if_dead(value)
    return inner(*values)
