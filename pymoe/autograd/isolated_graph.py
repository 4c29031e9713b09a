"""One call of a function in an autograd graph of its own.

- forward: Tensors among the arguments are replaced by aliases: same memory, same version counter (so an in-place edit
  of the caller's tensor is noticed where the graph has saved it), and an autograd history that begins here. Where
  there is no history to cut, leaves that require gradients need no alias. (Beside others they do: their gradients
  would be looked for in the others' histories, too.) The function runs as it is, an ``autograd.Function`` with torch's
  own context object.
- leaves: Those that the call has reached, given to it or not (parameters, tensors of a closure), are found by walking
  its graph back from the outputs. Where the walk runs into graphs that were there before the call it goes on to their
  leaves.
- backward: ``autograd.grad`` from the outputs to the aliases and the leaves: nothing is accumulated anywhere.

Tensors that leave a call by other ways than its outputs (in an object, as a module's attribute) keep their history:
gradients go through the aliases to the caller's tensors, as they do in a backward pass that the call makes itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pymoe._torch_private import (
    DelayedError,
    FunctionBase,
    get_sequence_nr,
    peek_interpreter_stack,
    pytree,
    run_backward,
)
from pymoe.autograd.compiled_nodes import has_compiled_nodes
from pymoe.autograd.leaf_hooks import entry_of_this_thread, keep_hooks_outside, within_call

SECOND_BACKWARD = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


def graphs_are_made() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether it carries a derivative of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


class _Entry(torch.autograd.Function):
    """Makes the aliases. Being no leaves, they may be written to like any result."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return anchor.detach(), *[tensor.detach() for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx is entry_of_this_thread():  # the aliases have their gradients, and the caller's graph is not the call's
            return (None,) * len(grads)
        return None, *grads[1:]


def apply_directly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without a look for ``torch.func`` transforms: inside of these nothing is isolated."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class Alias:
    """A tensor among the arguments of a call, and what stands for it within."""

    __slots__ = ("arguments", "edge", "grad_fn", "original", "tensor")

    def __init__(self, argument: int, original: torch.Tensor) -> None:
        self.arguments = [argument]  # its positions
        self.original = original
        self.tensor: torch.Tensor | None = None
        self.edge: GradientEdge | None = None  # where its gradient comes out; None: it needs none
        self.grad_fn: Node | None = None

    def enter(self, tensor: torch.Tensor, edge: GradientEdge | None) -> None:
        self.tensor = tensor
        self.edge = edge
        self.grad_fn = None if edge is None else edge.node


class IsolatedCall:
    """A call, its outputs and its graph. Made by :func:`isolate`; run once."""

    __slots__ = (
        "_args",
        "_entry",
        "_function",
        "_guard",
        "_leaf_arguments",
        "aliases",
        "leaves",
        "outputs",
        "roots",
        "tied",
        "written",
    )

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._function: Callable[..., Any] | None = function
        self._args: list[Any] | None = list(args)
        self._entry: Node | None = None
        self._guard: torch.Tensor | None = None  # keeps the entry node alive
        self._leaf_arguments: list[torch.Tensor] = []
        self.aliases: list[Alias] = []
        self.outputs: Any = ()  # as the function gave them, but always a tuple
        self.roots: list[GradientEdge] = []  # of `fresh` outputs, then of `written` aliases
        self.leaves: list[torch.Tensor] = []
        self.tied: set[int] = set()  # ids of outputs whose memory others look at, too
        self.written: list[Alias] = []  # changed in place by the call, in a way that gradients must know of

    def run(self) -> None:
        function, args = self._function, self._args
        assert function is not None
        assert args is not None
        self._function = self._args = None
        for alias in self.aliases:
            for argument in alias.arguments:
                args[argument] = alias.tensor
        outputs = function(*args)
        self.outputs = (outputs,) if type(outputs) is torch.Tensor else as_tuple(outputs)

    def find_fresh(self, hand_through: bool) -> list[torch.Tensor]:
        """After :meth:`run`, with graphs: the outputs that have a history here, each once.

        Finds what the call has written to, too. ``hand_through``: in ``outputs``, aliases that the function has
        returned become the caller's tensors again.

        Raises:
            RuntimeError: the call has written to an argument and was given another that shares its memory.
        """
        aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for alias in self.aliases:
            tensor = alias.tensor
            assert tensor is not None
            alias.tensor = None
            aliases[id(tensor)] = tensor, alias.original
            if tensor.requires_grad and tensor.grad_fn is not alias.grad_fn:
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
        """Aliases do not know of each other, so the history of a write to one would miss the others."""
        given = [*(alias.original for alias in self.aliases), *self._leaf_arguments]
        memory = [tensor for tensor in given if tensor.layout == torch.strided]
        places = [tensor.untyped_storage()._cdata for tensor in memory]
        for alias in self.written:
            if places.count(alias.original.untyped_storage()._cdata) > 1:
                raise RuntimeError(
                    "a call has written in place to an argument that shares its memory with another argument: "
                    "their common history cannot be kept; hand over one of them, and make the other in the call"
                )

    def forget_arguments(self) -> None:
        """Lets go of the caller's tensors: the graph has saved what it needs of them."""
        if not self.aliases:
            return
        self.written = []
        self.aliases = [alias for alias in self.aliases if alias.edge is not None]
        for alias in self.aliases:
            del alias.original

    def gradients(self, grads: Sequence[torch.Tensor | None], keep: bool) -> tuple[torch.Tensor | None, ...]:
        """For every alias with an edge and every leaf, from gradients for the roots; None where there is none.

        ``keep``: it will be asked again.
        """
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
    """For every input and leaf of the graph of one call, from gradients for its roots; None where there is none.

    Accumulates nothing, and the graph is kept: it may end in others that are still needed, and goes with its roots. One
    with nodes of ``torch.compile`` is not, as these refuse to run then.

    Args:
        roots: where the backward pass begins; None is left out, with its gradient.
        grads: for each root, None for none.
        inputs: where the call's graph begins.
        leaves: tensors that gradients would be accumulated into.
        entry: the node that the inputs belong to; None if it has none.
        keep: it will be run again.
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
    """The calls, ready to run.

    Args:
        function: what all of them call.
        args_per_call: the arguments of each.
        graphs: each in a graph of its own; otherwise with the arguments as they are.
        share: a tensor that a call is given twice is one tensor within, too, and a call that is given no history is
            given leaves as they are; otherwise each argument has its own gradient.
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
                continue  # which an alias would lack
            alias = known[id(value)] = Alias(place, value)
            call.aliases.append(alias)
            if required:
                entering.append(alias)
            else:
                alias.enter(value.detach(), None)
    if entering:
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        guard, *tensors = apply_directly(_Entry, anchor, *[alias.original for alias in entering])
        entry = guard.grad_fn
        for number, (alias, tensor) in enumerate(zip(entering, tensors, strict=True), 1):
            alias.enter(tensor, GradientEdge(entry, number))
        for call in calls:
            call._entry, call._guard = entry, guard
    return calls


def trace(calls: Sequence[IsolatedCall], hand_through: bool) -> list[list[torch.Tensor]]:
    """After calls have run, with graphs: finds what their backward passes need.

    Returns:
        :meth:`IsolatedCall.find_fresh` of each.
    """
    fresh = [call.find_fresh(hand_through) for call in calls]
    outputs = [output for own in fresh for output in own]
    nodes: list[Any] = [output.grad_fn for output in outputs]
    guard = keep_nodes(outputs, nodes)
    numbers = [output.output_nr for output in outputs]
    edges = [_edge(GradientEdge, parts) for parts in zip(nodes, numbers, itertools.repeat(guard))]
    first, limit = 0, get_sequence_nr()
    for call, own in zip(calls, fresh, strict=True):
        last = first + len(own)
        ends = nodes[first:last] + [root.node for root in call.roots]
        call.leaves, inside = find_leaves_and_nodes(ends, call._entry)
        if any([node._sequence_nr() >= limit for node in ends]):
            _put_behind(limit, [node for node in inside if node not in (None, call._entry)])
        call.roots = edges[first:last] + call.roots
        first = last
    return fresh


_ACCUMULATION = 2**64 - 1  # what nodes of leaves have for a number


def _put_behind(limit: int, nodes: Sequence[Any]) -> None:
    """Give the nodes of a call numbers below ``limit``, in the order that they have.

    Of nodes that could run now, the engine takes the one with the greatest number, the latest. But each thread counts
    for itself. Where a tensor has left a call by another way than its outputs, a backward pass comes to the call's
    nodes by that way, too, and frees what they have saved: the node of the map, and all that comes to it first, must
    run before, as they are made later, on the thread that asked.
    """
    by_number: dict[int, list[Any]] = {}
    for node in nodes:
        by_number.setdefault(node._sequence_nr(), []).append(node)
    by_number.pop(_ACCUMULATION, None)
    if limit < len(by_number):  # this thread has hardly made any: it counts on, so that there are enough numbers below
        one = torch.empty(0, requires_grad=True, device="cpu")
        while get_sequence_nr() < len(by_number):
            one.view_as(one)
        limit = len(by_number)
    for number in sorted(by_number, reverse=True):  # the call's earlier nodes have to make room for the late ones
        limit -= 1
        if number <= limit:
            limit = number
            continue
        for node in by_number[number]:
            node._set_sequence_nr(limit)


_edge: Any = tuple.__new__  # skips the Python function that makes a GradientEdge


def keep_nodes(tensors: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Node | None:
    """A node that keeps the tensors' alive and is never run: those of an ``autograd.Function`` do not keep themselves.

    With grad mode on. A ``view_as`` of each would do, too, and take three times as long.
    """
    own = [tensor for tensor, node in zip(tensors, nodes, strict=True) if isinstance(node, FunctionBase)]
    if not own:
        return None
    return with_failing_node("pymoe: this node is never run", own)[0].grad_fn


def once_only(name: str, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """With a history that raises when it is asked for: the calls' graphs are not there to be differentiated again."""
    required = [gradient if gradient is None else gradient.detach().requires_grad_() for gradient in gradients]
    message = f"{name}: its backward pass cannot be differentiated again (create_graph=True)"
    return tuple(with_failing_node(message, required))


def with_failing_node(message: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """``tensors`` with the same memory and another history: one node for all, whose backward raises ``message``."""
    made: Any = DelayedError(message, len(tensors))(*tensors)
    return made if len(tensors) > 1 else (made,)


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """As ``get_gradient_edge``, which takes twice the time. With grad mode on."""
    node: Any = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    token = None
    if isinstance(node, FunctionBase):
        nodes: list[Any] = [node]
        token = keep_nodes([tensor], nodes)
    return _edge(GradientEdge, (node, tensor.output_nr, token))  # type: ignore[no-any-return]


def find_leaves(nodes: Sequence[Node], entry: Node | None) -> list[torch.Tensor]:
    """The tensors into which a backward pass from ``nodes`` would accumulate, in an order that the graph decides."""
    return find_leaves_and_nodes(nodes, entry)[0]


def find_leaves_and_nodes(
    nodes: Sequence[Node], entry: Node | None
) -> tuple[list[torch.Tensor], Collection[Node | None]]:
    """The same, and all nodes of the graph; ``entry`` and None are among them, and nothing behind ``entry`` is."""
    leaves: list[torch.Tensor] = []
    seen: set[Node | None] = {None, entry}
    stack: list[Any] = [node for node in dict.fromkeys(nodes) if node not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        following = node.next_functions
        if following:
            for after, _ in following:
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        elif (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
    return leaves, seen


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    if isinstance(outputs, (tuple, list)):
        return tuple(outputs)
    return (outputs,)


_PLAIN = (torch.Tensor, type(None), bool, int, float, str)


def map_outputs(change: Callable[[Any], Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """``outputs`` with every value replaced, those within containers too."""
    return tuple(
        [change(output) if isinstance(output, _PLAIN) else pytree.tree_map(change, output) for output in outputs]
    )


def as_function(func: Any) -> Callable[..., Any]:
    """What to call for an ``autograd.Function`` class, its ``apply``, a module or any other callable.

    Raises:
        TypeError: it cannot be called.
    """
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        return func.apply
    if not callable(func):
        raise TypeError(f"func must be an autograd.Function, a module or another callable, got {type(func).__name__}")
    return func


def functorch_is_active() -> bool:
    """Inside ``torch.func`` transforms: calls belong to their graphs, and must run in their order."""
    return peek_interpreter_stack() is not None
