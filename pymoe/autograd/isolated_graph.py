"""Runs a call of a function in its own autograd graph.

- forward: Floating-point and complex tensors among the arguments (not those within containers) are replaced by
  aliases: same memory, same version counter (so an in-place edit of the caller's tensor is detected if the graph has
  saved it), and an autograd history that begins at the alias. In a map, if no argument of a call has a history, leaves
  that require gradients are passed without an alias. (If an argument has a history, the leaves need aliases, too,
  because the search for the call's leaves would otherwise enter that history.) The function itself runs unchanged; an
  ``autograd.Function`` gets torch's own context object.
- leaves: The leaves that the call has used, as arguments or not (parameters, tensors of a closure), are found by
  walking its graph back from the outputs. If the walk reaches graphs that existed before the call, it continues to
  their leaves.
- backward: ``autograd.grad`` from the outputs to the aliases and the leaves: nothing is accumulated anywhere.

Tensors that leave a call, but not as outputs (in an object, as a module's attribute), keep their history: a backward
pass from them, inside or outside of the call, continues through the aliases to the caller's tensors.

A hook of a leaf runs once, on the sum of all calls' gradients of the leaf. It does not run when the gradients of one
call are computed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge, Node

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import get_sequence_nr, pytree, run_backward
from pymoe._transforms import has_tangent
from pymoe.autograd.graph_nodes import (
    apply_directly,
    edge_of,
    find_leaves_and_nodes,
    has_compiled_nodes,
    keep_nodes,
    make_edge,
    put_behind,
)

Result = TypeVar("Result")


class _Differentiated(threading.local):
    """State of a thread: ``entry`` is the entry node of the call that the thread is differentiating, or None."""

    entry: Any = None


_running = _Differentiated()
_NONE = object()  # the value of `entry` while a graph without an entry node is differentiated
_everywhere: set[object] = set()  # one token per call that any thread is differentiating


def entry_of_this_thread() -> Any:
    """Return the entry node (that of the aliases) of the call that this thread is differentiating; None without a call.

    If the call has no entry node, return a placeholder.
    """
    return _running.entry


def within_call(entry: Any, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Run ``function``, which differentiates a call, without running hooks of leaves, and return its result.

    ``entry`` is the entry node of the call, that is, the node of its aliases; None if the call has none.
    """
    token = object()
    before, _running.entry = _running.entry, entry or _NONE
    _everywhere.add(token)
    try:
        return function(*args, **options)
    finally:
        _everywhere.discard(token)
        _running.entry = before


class _OutsideCalls:
    """Wraps a hook of a leaf, so that the hook does not run while the gradients of a call are computed.

    The backward nodes of CPU tensors run on the thread that started the backward pass, so the state of that thread
    decides. Those of other devices run on autograd's own threads, which cannot tell who started the pass: there, the
    hook does not run while any thread differentiates a call.
    """

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        if _running.entry is not None or (_everywhere and not grad.is_cpu):
            return None
        return self.hook(grad)


def keep_hooks_outside(leaf: torch.Tensor) -> None:
    """Wrap the hooks of ``leaf`` in :class:`_OutsideCalls`, because ``autograd.grad`` would run them for each call."""
    hooks: Any = leaf._backward_hooks
    for key, hook in list(hooks.items()) if hooks else ():
        if type(hook) is not _OutsideCalls and key in hooks:
            hooks[key] = _OutsideCalls(hook)


SECOND_BACKWARD = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


def graphs_are_made() -> bool:
    """Return whether operators on this thread record a history."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


class _CallInputs(torch.autograd.Function):
    """Returns aliases of ``tensors``. They are results of an operation, not leaves: they may be modified in place."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return anchor.detach(), *[tensor.detach() for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx is entry_of_this_thread():  # gradients end at the aliases, where the caller's graph begins
            return (None,) * len(grads)
        return None, *grads[1:]


@dataclass(slots=True, eq=False)
class Alias:
    """A tensor among the arguments of a call, and its replacement within the call."""

    arguments: list[int]  # the positions of the original among the arguments
    original: torch.Tensor
    tensor: torch.Tensor | None = None
    edge: GradientEdge | None = None  # the edge that gets the gradient; None: no gradient is needed


class IsolatedCall:
    """A call with its arguments, outputs and graph. :func:`isolate` makes such calls; each is run once."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._function: Callable[..., Any] | None = function
        self._args: list[Any] | None = list(args)
        self._entry: Node | None = None
        self._guard: torch.Tensor | None = None  # keeps the entry node alive
        self._leaf_arguments: list[torch.Tensor] = []
        self.aliases: list[Alias] = []
        self.outputs: Any = ()  # the function's outputs, always as a tuple
        self.roots: list[GradientEdge] = []  # edges of `fresh` outputs, then of `written` aliases
        self.leaves: list[torch.Tensor] = []
        # Ids of outputs that are views of an alias, of a leaf or of another output, or that share their base with
        # another returned view.
        self.tied: set[int] = set()
        self.written: list[Alias] = []  # aliases that the call modified in place, in a way that matters for gradients

    def run(self) -> None:
        """Call the function with the aliases in place of the arguments."""
        function, args = self._function, self._args
        assert function is not None
        assert args is not None
        self._function = self._args = None
        for alias in self.aliases:
            for argument in alias.arguments:
                args[argument] = alias.tensor
        outputs = function(*args)
        self.outputs = as_tuple(outputs)

    def find_fresh(self, hand_through: bool) -> list[torch.Tensor]:
        """Return the outputs that have a history, each once.

        First add the arguments whose history the call has changed, by modifying them in place, to ``written``, and
        their edges to ``roots``. With ``hand_through``, the caller's tensors replace the aliases among ``outputs``.

        Raises:
            RuntimeError: one of the ``written`` arguments shares its memory with another argument.
        """
        aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for alias in self.aliases:
            tensor = alias.tensor
            assert tensor is not None
            alias.tensor = None
            aliases[id(tensor)] = tensor, alias.original
            if tensor.requires_grad and tensor.grad_fn is not (alias.edge and alias.edge.node):
                self.written.append(alias)
                self.roots.append(edge_of(tensor))
        if self.written:
            self._refuse_overlaps()
        self._leaf_arguments = []
        fresh: dict[int, torch.Tensor] = {}

        def look(output: Any) -> Any:
            if isinstance(output, torch.Tensor):
                if hand_through and id(output) in aliases:
                    return aliases[id(output)][1]
                if output.grad_fn is not None:
                    fresh[id(output)] = output
            return output

        if len(self.outputs) == 1 and type(self.outputs[0]) is torch.Tensor:
            self.outputs = (look(self.outputs[0]),)
        else:
            self.outputs = map_outputs(look, self.outputs)
        found = list(fresh.values())
        views = [output for output in found if output._is_view()]
        if views:
            bases = [id(output._base) for output in views]
            for output, base in zip(views, bases, strict=True):
                if base in aliases or base in fresh or bases.count(base) > 1 or output._base.is_leaf:  # type: ignore[union-attr]
                    self.tied.add(id(output))
        return found

    def _refuse_overlaps(self) -> None:
        """Raise if an argument that was modified in place shares its memory with another argument.

        The other argument's alias would have the new values without a history of the change.
        """
        given = [*(alias.original for alias in self.aliases), *self._leaf_arguments]
        memory = [tensor for tensor in given if tensor.layout == torch.strided]
        places = [tensor.untyped_storage()._cdata for tensor in memory]
        for alias in self.written:
            if places.count(alias.original.untyped_storage()._cdata) > 1:
                raise RuntimeError(
                    "a call has modified an argument in place that shares its memory with another argument: their "
                    "common history cannot be kept; pass one of them, and make the other within the call"
                )

    def forget_arguments(self) -> None:
        """Drop the references to the caller's tensors; the backward pass needs only what the graph has saved."""
        if not self.aliases:
            return
        self.written = []
        self.aliases = [alias for alias in self.aliases if alias.edge is not None]
        for alias in self.aliases:
            del alias.original

    def gradients(self, grads: Sequence[torch.Tensor | None], keep: bool) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of every alias with an edge and of every leaf; see :func:`differentiate`."""
        inputs = [alias.edge for alias in self.aliases if alias.edge is not None]
        return differentiate(self.roots, grads, inputs, self.leaves, self._entry, keep=keep)


def differentiate(
    roots: Sequence[GradientEdge | None],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[GradientEdge],
    leaves: Sequence[torch.Tensor],
    entry: Node | None,
    keep: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``inputs``, then those of ``leaves``, in the graph of one call; None where there is none.

    No gradients are accumulated into leaves. The graph is kept (``retain_graph=True``), because it may lead into other
    graphs that are still needed; it is freed when its roots are. Only a graph with nodes of ``torch.compile`` is freed
    immediately, because these nodes raise an error under ``retain_graph=True``; ``keep`` keeps even such a graph.

    Args:
        roots: the edges where the backward pass begins; None and roots without a gradient are skipped.
        grads: a gradient for each root, or None.
        inputs: the edges where the call's graph begins.
        leaves: tensors into which gradients would be accumulated.
        entry: the node of all ``inputs``; None if there are no inputs.
        keep: keep the graph in any case, for example because it will be differentiated again.
    """
    starts, values = [], []
    for root, grad in zip(roots, grads, strict=True):
        if grad is not None and root is not None:
            starts.append(root)
            values.append(grad)
    if not starts or not (inputs or leaves):
        return (None,) * (len(inputs) + len(leaves))
    for leaf in leaves:
        if leaf._backward_hooks:
            keep_hooks_outside(leaf)
    keep = keep or not has_compiled_nodes([start.node for start in starts], entry)
    return within_call(  # type: ignore[no-any-return]
        entry, run_backward, tuple(starts), tuple(values), keep, False, (*inputs, *leaves), True, accumulate_grad=False
    )


def isolate(
    function: Callable[..., Any], args_per_call: Iterable[Sequence[Any]], graphs: bool, share: bool
) -> list[IsolatedCall]:
    """Return an :class:`IsolatedCall` of ``function`` for each item of ``args_per_call``, ready to run.

    Args:
        function: the function to call.
        args_per_call: the arguments of each call.
        graphs: if true, give each call a graph of its own; if false, use the arguments unchanged.
        share: if true, a tensor that is passed to a call twice gets one alias, and leaves that require gradients get
            none if no argument of the call has a history. If false, a tensor gets a separate alias, and so a separate
            gradient, each time that it is passed.
    """
    calls = [IsolatedCall(function, args) for args in args_per_call]
    if not graphs:
        return calls
    entering: list[Alias] = []
    for call in calls:
        assert call._args is not None
        tensors = [(place, value) for place, value in enumerate(call._args) if isinstance(value, torch.Tensor)]
        leaves_stay = share and all([value.grad_fn is None for _, value in tensors])
        known: dict[int, Alias] = {}
        for place, value in tensors:
            required = value.requires_grad
            if required and leaves_stay:
                call._leaf_arguments.append(value)
                continue
            if share and id(value) in known:
                known[id(value)].arguments.append(place)
                continue
            if not (required or value.is_floating_point() or value.is_complex()):
                continue
            if not required and has_tangent(value):
                continue  # an alias would lack the tensor's forward-mode tangent
            alias = known[id(value)] = Alias([place], value)
            call.aliases.append(alias)
            if required:
                entering.append(alias)
            else:
                alias.tensor = value.detach()
    if entering:
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        guard, *tensors = apply_directly(_CallInputs, anchor, *[alias.original for alias in entering])
        entry = guard.grad_fn
        for number, (alias, tensor) in enumerate(zip(entering, tensors, strict=True), 1):
            alias.tensor, alias.edge = tensor, GradientEdge(entry, number)
        for call in calls:
            call._entry, call._guard = entry, guard
    return calls


def trace(calls: Sequence[IsolatedCall], hand_through: bool) -> list[list[torch.Tensor]]:
    """Prepare the backward passes of ``calls``, which must have run with graphs: set ``roots`` and ``leaves`` of each.

    Return the result of :meth:`IsolatedCall.find_fresh` for each call: its outputs that have a history.
    """
    fresh = [call.find_fresh(hand_through) for call in calls]
    outputs = [output for own in fresh for output in own]
    if outputs or any([call.roots for call in calls]):
        canaries.graphs()
    nodes: list[Any] = [output.grad_fn for output in outputs]
    guard = keep_nodes(outputs, nodes)
    numbers = [output.output_nr for output in outputs]
    edges = [make_edge(GradientEdge, parts) for parts in zip(nodes, numbers, itertools.repeat(guard))]
    first, limit = 0, get_sequence_nr()
    for call, own in zip(calls, fresh, strict=True):
        last = first + len(own)
        ends = nodes[first:last] + [root.node for root in call.roots]
        call.leaves, inside = find_leaves_and_nodes(ends, call._entry)
        if any([node._sequence_nr() >= limit for node in ends]):
            put_behind(limit, [node for node in inside if node not in (None, call._entry)])
        call.roots = edges[first:last] + call.roots
        first = last
    return fresh


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Return a tuple or list as a tuple, and anything else as a tuple of one."""
    if isinstance(outputs, (tuple, list)):
        return tuple(outputs)
    return (outputs,)


_PLAIN = (torch.Tensor, type(None), bool, int, float, str)


def map_outputs(change: Callable[[Any], Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``outputs`` with ``change`` applied to every value, including those within containers."""
    return tuple(
        [change(output) if isinstance(output, _PLAIN) else pytree.tree_map(change, output) for output in outputs]
    )


def as_function(func: Any) -> Callable[..., Any]:
    """Return the function to call for an ``autograd.Function`` class, its ``apply``, a module or any other callable.

    Raises:
        TypeError: ``func`` cannot be called.
    """
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        return func.apply
    if not callable(func):
        raise TypeError(f"func must be an autograd.Function, a module or another callable, got {type(func).__name__}")
    return func
