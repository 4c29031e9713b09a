"""Runs a call in an autograd graph of its own: the forward pass now, the backward pass later and on any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from pymoe._torch_private import FunctionBase, pytree
from pymoe.autograd.graph_nodes import add_gradients
from pymoe.autograd.isolated_graph import (
    SECOND_BACKWARD,
    IsolatedCall,
    as_function,
    graphs_are_made,
    isolate,
    map_outputs,
    trace,
)


class EmulatedAutogradContext(FunctionCtx):
    """A context for calls of ``Function.forward(ctx, ...)`` and ``Function.backward(ctx, ...)`` by hand.

    It supports what these functions use: ``save_for_backward`` and ``saved_tensors``, ``mark_dirty``,
    ``mark_non_differentiable``, ``set_materialize_grads``, and any attributes. Contexts of :func:`run_isolated_forward`
    are instances, too.
    """

    to_save = ()

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that ``save_for_backward`` was given."""
        return tuple(self.to_save)


class IsolatedContext(EmulatedAutogradContext):
    """State that :func:`run_isolated_forward` keeps for :func:`run_isolated_backward`.

    Attributes:
        leaves: the leaves that the call used without getting them as arguments, for example parameters.
        leaf_gradients: the gradients of ``leaves`` after the backward pass; None for a leaf without a gradient.
    """

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that an ``autograd.Function`` saved with ``save_for_backward``; () once they are freed."""
        roots = () if self._call is None else self._call.roots
        nodes: list[Any] = [root.node for root in roots if isinstance(root.node, FunctionBase)]
        return nodes[0].saved_tensors if nodes else ()

    def __init__(
        self, arguments: int, call: IsolatedCall | None, outputs: list[Any], fresh: list[torch.Tensor]
    ) -> None:
        numbers = {id(output): number for number, output in enumerate(fresh)}
        self._arguments = arguments
        self._call = call
        self._numbers = [numbers.get(id(output)) for output in outputs]  # per output: the index of its root, or None
        self._shapes = [tuple(output.shape) for output in fresh]
        self.leaves: tuple[torch.Tensor, ...] = () if call is None else tuple(call.leaves)
        self.leaf_gradients: tuple[torch.Tensor | None, ...] = (None,) * len(self.leaves)


def run_isolated_forward(func: Any, *args: Any) -> tuple[IsolatedContext, tuple[Any, ...]]:
    """Run ``func(*args)`` on this thread, in an autograd graph of its own.

    No other call shares the graph, so backward passes of several such calls may run at the same time, on any threads
    (in a common graph, PyTorch's engine would run them one after the other). In-place changes of an argument between
    the passes are detected as usual.

    Args:
        func: an ``autograd.Function`` class or its ``apply``, an ``nn.Module`` or any other callable.
        args: its arguments: tensors of any shape and dtype, and anything else. :func:`run_isolated_backward` returns
            the gradients of the tensors that require them.

    Returns:
        The context for :func:`run_isolated_backward`, and a tuple of outputs: the items of a tuple or list that
        ``func`` returns, or any other result as the only item. Outputs have no history and require no gradients, except
        for a leaf that is not an argument and is returned as it is, such as a parameter.

    Raises:
        TypeError: ``func`` is not callable. Exceptions of ``func`` propagate.
        RuntimeError: the call has modified in place an argument that needs gradients, and another argument has the same
            memory.
    """
    graphs = graphs_are_made()
    (call,) = isolate(as_function(func), [args], graphs, share=False)
    call.run()
    if not graphs:
        return IsolatedContext(len(args), None, pytree.tree_leaves(call.outputs), []), call.outputs
    (fresh,) = trace([call], hand_through=False)
    context = IsolatedContext(len(args), call, pytree.tree_leaves(call.outputs), fresh)
    detached = {id(output): output.detach() for output in fresh}
    outputs = map_outputs(lambda output: detached.get(id(output), output), call.outputs)
    call.outputs = ()
    call.forget_arguments()
    return context, outputs


def run_isolated_backward(
    context: IsolatedContext | Callable[..., Any], *grad_outputs: Any, retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Run the backward pass of a call of :func:`run_isolated_forward` on this thread, without accumulating gradients.

    Args:
        context: the context of the call. As in older code, a function may be passed before the context:
            ``run_isolated_backward(func, context, *grad_outputs)``.
        grad_outputs: for every output a tensor of its shape, or None; for a container, a container of the same
            structure. Gradients of outputs that require none are ignored.
        retain_graph: keep the graph for another backward pass.

    Returns:
        A gradient for every argument; None for an argument that is not a tensor, requires no gradient or does not
        influence the outputs. The gradients of ``context.leaves`` are stored in ``context.leaf_gradients``.

    Raises:
        TypeError: ``context`` is not an :class:`IsolatedContext`.
        ValueError: the gradients differ from the outputs in number or in a shape.
        RuntimeError: this is a second backward pass and the first one was run without ``retain_graph``, or a saved
            tensor was modified.
    """
    if grad_outputs and isinstance(grad_outputs[0], IsolatedContext) and callable(context):
        context, *grad_outputs = grad_outputs  # type: ignore[assignment]
    if not isinstance(context, IsolatedContext):
        raise TypeError(
            "run_isolated_backward: context must be the IsolatedContext that run_isolated_forward returned, got "
            f"{type(context).__name__}"
        )
    flat = pytree.tree_leaves(grad_outputs)
    if len(flat) != len(context._numbers):
        raise ValueError(
            f"run_isolated_backward: expected one gradient per output ({len(context._numbers)}), got {len(flat)}"
        )
    gradients: list[torch.Tensor | None] = [None] * context._arguments
    call = context._call
    if call is None:
        if any(number is not None for number in context._numbers):
            raise RuntimeError(SECOND_BACKWARD)
        return tuple(gradients)
    roots: list[torch.Tensor | None] = [None] * len(call.roots)
    for position, (number, grad) in enumerate(zip(context._numbers, flat, strict=True)):
        if number is not None and grad is not None:
            if tuple(grad.shape) != context._shapes[number]:
                raise ValueError(
                    f"run_isolated_backward: gradient {position}: expected the shape of its output, "
                    f"{context._shapes[number]}, got {tuple(grad.shape)}"
                )
            before = roots[number]
            roots[number] = grad if before is None else add_gradients(before, grad)
    found = call.gradients(roots, retain_graph)
    inputs = [alias.arguments[0] for alias in call.aliases if alias.edge is not None]
    for argument, gradient in zip(inputs, found, strict=False):
        gradients[argument] = gradient
    context.leaf_gradients = found[len(inputs) :]
    if not retain_graph:
        context._call = None
    return tuple(gradients)
