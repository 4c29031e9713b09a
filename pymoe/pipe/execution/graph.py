"""Autograd for pipelines: the graph of one micro-batch in one stage, the values that cross stage boundaries, sums of
leaf gradients, and the single autograd node that represents a pipeline in the caller's graph.

The graph begins at the stage's inputs and ends at its outputs. The stage works on aliases of the tensors that it takes:
the same memory, with a history that begins there. Aliases share the version counters of these tensors, so a stage that
has saved a tensor for its backward notices in-place changes by any stage. A tensor that leaves a stage is detached from
its history; its :class:`BoundaryTensor` records where its gradient has to go.

An ``IsolatedCall`` (:mod:`pymoe.autograd.isolated_graph`) has a graph of its own, too, and uses the same functions to
find, differentiate and keep nodes. The two differ in what precedes the graph. The aliases of a call are connected to
the caller's graph, for tensors that leave the call other than as outputs, and all calls of a map share one entry node.
The aliases of a stage are connected to nothing, so a gradient that passes them is an error, and every micro-batch has
an entry node of its own.

The inputs of the pipeline's node are the tensors given to the pipeline and all leaves that its stages use. So autograd
adds to each parameter once, and calls its hooks once, for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import (
    foreach_add_,
    get_current_graph_task_keep_graph,
    pytree,
    run_backward,
    unsafe_set_version_counter,
)
from pymoe._transforms import has_tangent
from pymoe.autograd.graph_nodes import (
    ANCHOR,
    add_gradients,
    apply_directly,
    are_compiled,
    edge_of,
    find_leaves_and_nodes,
    make_edge,
    once_only,
    version_of,
)
from pymoe.autograd.isolated_graph import SECOND_BACKWARD
from pymoe.autograd.random_streams import RandomStream
from pymoe.pipe.loss_graph import LossReading
from pymoe.pipe.python_values import value_in_cell
from pymoe.pipe.stages import Whole

_PAST = (
    "pymoe.pipe: a backward pass went past the beginning of a stage's graph: a tensor of another stage, or of an "
    "earlier micro-batch, was used that had not come as an argument (inside of an object, or kept in an attribute)"
)


class GradAccumulator:
    """Sums the gradients of the boundary tensors that one stage makes. The tensors are numbered in order."""

    __slots__ = ("grads",)

    def __init__(self) -> None:
        self.grads: list[torch.Tensor | None] = []  # the sum so far for each tensor; None if it has no gradient yet

    def cross(self, tensor: torch.Tensor) -> BoundaryTensor:
        """Return ``tensor`` as a boundary tensor. If it requires gradients, detach it, and sum its gradients here."""
        self.grads.append(None)
        if not tensor.requires_grad:
            return BoundaryTensor(tensor)
        return BoundaryTensor(tensor.detach(), self, len(self.grads) - 1, is_fixed(tensor))

    def add_gradient(self, number: int, grad: torch.Tensor) -> None:
        before = self.grads[number]
        self.grads[number] = grad if before is None else add_gradients(before, grad)


class BoundaryTensor:
    """A tensor that crosses a stage boundary.

    ``accumulator`` sums its gradients under ``number``; None: it needs no gradient. ``is_fixed``: it is a leaf or a
    view of one, so it must not be changed in place. ``taken_until``: the last stage on other ranks that takes the same
    memory; -1: none.
    """

    __slots__ = ("accumulator", "is_fixed", "number", "taken_until", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, accumulator: GradAccumulator | None = None, number: int = 0, is_fixed: bool = False
    ) -> None:
        self.tensor = tensor
        self.accumulator = accumulator
        self.number = number
        self.is_fixed = is_fixed
        self.taken_until = -1
        self.version = -1 if tensor.is_inference() else tensor._version  # the same as version_of(tensor), inlined


class StageValue:
    """A value that crosses a stage boundary: its pytree leaves, with tensors as boundary tensors, and its structure.

    The structure is None if the value is a tensor or of a class in ``_LEAVES``, so that it is a single leaf.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        self.leaves = leaves
        self.structure = structure


_LEAVES = {LossReading, type(None), bool, int, float, str}
"""Classes of values that are single pytree leaves and contain no tensors with a history."""
_WITHOUT_TENSORS = {BoundaryTensor, *_LEAVES}


def flatten_value(value: Any, cross: Callable[[torch.Tensor], BoundaryTensor]) -> StageValue:
    """Return the leaves and structure of ``value``, with ``cross(tensor)`` in place of every tensor."""
    if isinstance(value, torch.Tensor):
        return StageValue([cross(value)], None)
    if type(value) in _LEAVES:
        return StageValue([value], None)
    leaves, structure = pytree.tree_flatten(value)
    return StageValue([cross(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)


def boundaries_of(values: Iterable[StageValue]) -> list[BoundaryTensor]:
    """Return the boundary tensors among the leaves of ``values``."""
    return [leaf for value in values for leaf in value.leaves if type(leaf) is BoundaryTensor]


def unflatten_value(leaves: list[Any], structure: Any) -> Any:
    """Return the value with these leaves and this structure."""
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)


def is_fixed(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a leaf or a view of one: if such a tensor requires gradients, torch refuses in-place
    changes of it.
    """
    return tensor.is_leaf or (tensor._is_view() and tensor._base.is_leaf)  # type: ignore[union-attr]


_EDITED = (
    "a tensor that goes to several stages, or is an output of the model, was changed in place by a stage, "
    "which autograd could not tell the others (micro-batches, too, share the memory of the pipe's input); "
    "change a copy there (inplace=False, for example)"
)


def refuse_unseen_edit(boundary: BoundaryTensor, stage: int) -> None:
    """Raise RuntimeError if ``stage`` has changed a tensor in place that a later stage on another rank takes."""
    if stage < boundary.taken_until and boundary.version != version_of(boundary.tensor):
        raise RuntimeError(_EDITED)


def receive(boundary: BoundaryTensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor of ``boundary``, moved to ``device`` unless ``device`` is None.

    Raises:
        RuntimeError: another stage has changed the tensor in place.
    """
    tensor = boundary.tensor
    if boundary.version != (-1 if tensor.is_inference() else tensor._version):
        raise RuntimeError(_EDITED)
    return tensor if device is None else moved(tensor, device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``. Wait for a copy to the CPU to be complete, but not for other copies."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def receive_value(value: StageValue, device: torch.device | None) -> Any:
    """Return the value with its tensors as :func:`receive` returns them."""
    leaves = [receive(leaf, device) if type(leaf) is BoundaryTensor else leaf for leaf in value.leaves]
    return unflatten_value(leaves, value.structure)


class _StageInputs(torch.autograd.Function):
    """Returns an alias of ``anchor``, to keep this node alive, and aliases of ``sources``.

    Backward passes end at the edges of this node. A pass that goes further runs the node, which raises RuntimeError.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, fixed: Sequence[bool], *sources: torch.Tensor) -> Any:
        aliases = [source.detach() for source in sources]
        if True in fixed:
            # Torch refuses in-place changes of views that a custom Function has made.
            aliases = [alias.view_as(alias) if own else alias for alias, own in zip(aliases, fixed, strict=True)]
        return anchor.detach(), *aliases

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(_PAST)


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a tensor without its history. A backward pass through the alias raises RuntimeError."""
    return apply_directly(_StageInputs, ANCHOR, [False], tensor)[1]


class Graph:
    """Records the graph of a stage that runs between :meth:`begin` and :meth:`end`: its edges, roots and leaves."""

    __slots__ = (
        "_aliases",
        "_device",
        "_guard",
        "_sources",
        "accumulators",
        "edges",
        "entry",
        "is_compiled",
        "leaves",
        "roots",
        "stream",
    )

    def __init__(self, stream: RandomStream | None = None, device: torch.device | None = None) -> None:
        """Prepare to record a graph.

        ``stream``: the stage's random numbers. ``device``: the stage's device; None: tensors stay where they are.
        """
        self.stream: Any = stream  # the backward continues the forward's random numbers
        self.entry: Node | None = None  # the entry node of the graph, if it has inputs
        self.edges: list[GradientEdge] = []  # edges of the entry, one for each input that needs gradients
        # For each edge: the accumulator that sums its gradient, the index of the sum, and the device to move it to.
        self.accumulators: list[tuple[GradAccumulator, int, torch.device | None]] = []
        self.roots: list[GradientEdge | None] = []  # one for each tensor sent; None if it needs no gradient
        self.leaves: Sequence[torch.Tensor] = ()
        self.is_compiled = False  # true if torch.compile made nodes, which free the graph in its last backward
        self._device = device
        self._sources: list[torch.Tensor] = []
        self._aliases: Sequence[torch.Tensor] = ()
        self._guard: torch.Tensor | None = None  # an alias that keeps the graph's entry node alive

    def begin(self, received: Sequence[StageValue]) -> list[Any]:
        """Return the arguments for the stage's function. Tensors that need gradients are replaced by aliases."""
        device, sources = self._device, self._sources
        arguments: list[Any] = []
        nested: list[tuple[int, list[Any], Any]] = []  # for each argument with a structure: index, leaves, structure
        places: list[tuple[list[Any], int]] = []
        fixed: list[bool] = []
        for value in received:
            row = arguments
            if value.structure is not None:
                row = []
                nested.append((len(arguments), row, value.structure))
                arguments.append(None)
            for leaf in value.leaves:
                if type(leaf) is BoundaryTensor:
                    tensor = receive(leaf, device)
                    if leaf.accumulator is not None:
                        places.append((row, len(row)))
                        sources.append(tensor)
                        fixed.append(leaf.is_fixed)
                        home = None if device is None else leaf.tensor.device
                        self.accumulators.append((leaf.accumulator, leaf.number, home))
                    row.append(tensor)
                else:
                    row.append(leaf)
        if sources:
            # ANCHOR requires gradients, so autograd records the node, and all aliases require gradients.
            aliases = apply_directly(_StageInputs, ANCHOR, fixed, *sources)
            self._aliases, self._guard = aliases, aliases[0]
            self.entry = entry = aliases[0].grad_fn
            for number, (row, position) in enumerate(places, 1):
                row[position] = aliases[number]
                self.edges.append(make_edge(GradientEdge, (entry, number, None)))
        for position, row, structure in nested:
            arguments[position] = unflatten_value(row, structure)
        return arguments

    def end(self, outputs: Sequence[Any], accumulator: GradAccumulator) -> list[StageValue]:
        """End the stage's run. Return ``outputs`` as values to send, whose gradients ``accumulator`` sums."""
        self.close()
        roots = self.roots
        nodes: list[Node] = []

        def cross(tensor: torch.Tensor) -> BoundaryTensor:
            if not tensor.requires_grad:
                roots.append(None)
                return BoundaryTensor(tensor)
            root = edge_of(tensor)
            roots.append(root)
            nodes.append(root.node)
            return BoundaryTensor(tensor.detach(), accumulator, len(roots) - 1, is_fixed(tensor))

        sent: list[StageValue] = []
        for output in outputs:  # a plain loop, for speed: every micro-batch comes here
            sent.append(
                StageValue([cross(output)], None) if isinstance(output, torch.Tensor) else flatten_value(output, cross)
            )
        self.refuse_hidden_tensors(sent)
        self.leaves, reached = find_leaves_and_nodes(nodes, self.entry)
        self.is_compiled = are_compiled(reached)
        return sent

    def refuse_hidden_tensors(self, sent: Sequence[StageValue]) -> None:
        """Raise TypeError if an object in ``sent`` hides a tensor whose history begins at the stage's inputs."""
        if self.entry is None:
            return
        for value in sent:
            for leaf in value.leaves:
                if type(leaf) not in _WITHOUT_TENSORS and any(
                    self.entry in find_leaves_and_nodes([tensor.grad_fn], None)[1] for tensor in _tensors_inside(leaf)
                ):
                    raise TypeError(
                        f"a stage sends a {type(leaf).__qualname__} with a tensor inside that needs gradients, which "
                        "pipes cannot find there: register the class with torch.utils._pytree.register_pytree_node "
                        "(for dataclasses register_dataclass), or send tensors, tuples, lists or dicts"
                    )

    def close(self) -> None:
        """Release the stage's inputs and their aliases.

        Raises:
            RuntimeError: the stage has changed an input in place that shares memory with another of its inputs.
        """
        sources, aliases, entry = self._sources, self._aliases[1:], self.entry
        self._sources, self._aliases = [], ()
        for source, alias in zip(sources, aliases, strict=True):
            if alias.grad_fn is not entry and [memory_of(other) for other in sources].count(memory_of(source)) > 1:
                raise RuntimeError(
                    "a stage has changed an input in place that shares its memory with another of its inputs: across "
                    "stages their common history cannot be kept; make one of them a copy"
                )

    def deliver(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to the accumulators of :attr:`edges`. ``grads``: one per edge; further items are ignored."""
        for (accumulator, number, home), grad in zip(self.accumulators, grads, strict=False):
            if grad is not None:
                accumulator.add_gradient(number, grad if home is None else moved(grad, home))


def _tensors_inside(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the tensors in ``value`` that require gradients. Search attributes, items and closures, ``depth`` deep."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
        return
    if value is None or isinstance(value, (int, float, str, bytes, type, nn.Module)) or not depth:
        return
    inside = [*value.values()] if isinstance(value, dict) else []
    inside += [*value] if isinstance(value, (list, tuple, set, frozenset)) else []
    inside += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    inside += [*getattr(value, "__dict__", {}).values()]
    inside += [value_in_cell(cell, None) for cell in getattr(value, "__closure__", None) or ()]
    inside += [getattr(value, name, None) for name in ("__self__", "func", "args", "keywords")]
    for one in inside:
        yield from _tensors_inside(one, depth - 1)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies the memory of a tensor. Strided tensors with the same storage have the same
    number; any other tensor has a number of its own.
    """
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def have_tangents(values: Any, *modules: nn.Module) -> bool:
    """Return whether a tensor in ``values``, or a parameter or buffer of the modules, has a tangent.

    Tangents of forward-mode differentiation (``torch.autograd.forward_ad``) would be lost at boundaries, where tensors
    are cut off from their history.
    """
    if forward_ad._current_level < 0:
        return False
    leaves = [leaf.value if isinstance(leaf, Whole) else leaf for leaf in pytree.tree_leaves(values)]
    leaves = [
        *pytree.tree_leaves(leaves),
        *[x for module in modules for x in (*module.parameters(), *module.buffers())],
    ]
    return any(isinstance(x, torch.Tensor) and has_tangent(x) for x in leaves)


# Leaf gradients, and the pipeline's node in the caller's graph.

_NUMBER = torch.zeros((), device="cpu")  # its value is never used
FOREACH_FROM = 4
"""With at least this many leaves, one ``_foreach`` call is faster than one call per leaf."""
Grads = Sequence[torch.Tensor | None]
Backward = Callable[[Grads, bool], Grads]


class LeafSums:
    """Sums the gradients of each leaf, in the order in which they are added."""

    __slots__ = ("_numbers", "_own", "leaves", "sums")

    def __init__(self) -> None:
        canaries.graphs()
        self.leaves: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        # The dtype of each sum to which there is no other reference, so that it may be changed in place; None for the
        # other sums. (A sum of only one gradient is that gradient, which autograd may have passed to others, too.)
        self._own: list[torch.dtype | None] = []

    def add(self, leaves: Sequence[torch.Tensor], grads: Grads) -> None:
        """Add the gradients of one micro-batch."""
        numbers, sums, own = self._numbers, self.sums, self._own
        many = len(leaves) >= FOREACH_FROM
        changed: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            number = numbers.get(id(leaf))
            if number is None:
                numbers[id(leaf)] = len(sums)
                self.leaves.append(leaf)
                sums.append(grad)
                own.append(None)
            elif own[number] is grad.dtype and _is_plain(grad):
                if many:
                    changed.append(sums[number])
                    added.append(grad)
                else:
                    sums[number].add_(grad)
            else:
                result = sums[number] = add_gradients(sums[number], grad)
                own[number] = result.dtype if _is_plain(result) else None
        if changed:
            foreach_add_(changed, added)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def total(
    parts: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], float]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all leaves in ``parts``, each once, and the weighted sums of their gradients, in the order of the parts.

    A part consists of leaves, their gradients (possibly received from other ranks on another device), and the weight of
    these gradients.
    """
    sums = LeafSums()
    for leaves, grads, weight in parts:
        here = [grad.to(leaf.device) for leaf, grad in zip(leaves, grads, strict=True)]
        sums.add(leaves, here if weight == 1.0 else [grad * weight for grad in here])
    return sums.leaves, sums.sums


class WeightedSums:
    """Sums the gradients of one stage separately for each micro-batch size, so that they can be weighted afterwards.

    If losses are means, the weight of a micro-batch is its share of the mini-batch's rows. The number of rows, and
    whether losses are means, are known only at the end of a step.
    """

    def __init__(self) -> None:
        self._of_rows: dict[int, LeafSums] = {}

    def of(self, rows: int) -> LeafSums:
        """Return the object that sums the gradients of micro-batches with ``rows`` rows."""
        return self._of_rows.setdefault(rows, LeafSums())

    def total(self, weight_of: dict[int, float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves and their summed gradients, those of micro-batches of n rows weighted by ``weight_of[n]``.

        Release the sums.
        """
        parts, self._of_rows = self._of_rows, {}
        return total(
            (part.leaves, part.sums, weight_of[rows])
            for rows, part in ((rows, parts.pop(rows)) for rows in sorted(parts, reverse=True))
        )


class _PipeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backward: Backward, outputs: Sequence[torch.Tensor], tied: Collection[int], *tensors: torch.Tensor
    ) -> Any:
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        made = [output.detach() for output in outputs]
        for number in tied:
            # Torch refuses in-place changes of views that a custom Function has made. This output shares its memory
            # with other tensors, whose saved values such a change would spoil unnoticed.
            made[number] = made[number].view_as(made[number])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.run_backward is None:
            raise RuntimeError(SECOND_BACKWARD)
        keep = get_current_graph_task_keep_graph()
        backward = ctx.run_backward
        if not keep:
            ctx.run_backward = None
        found = backward(grads, keep)
        return None, None, None, *(once_only("Pipe", found) if torch.is_grad_enabled() else found)


class _Edited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "Pipe: a stage has changed an input of the pipe in place, and the history of the result is not kept: use "
            "the input only before the pipe, or give the pipe a copy"
        )


def attach(
    backward: Backward,
    outputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    tied: Collection[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Return aliases of ``outputs``, tensors without history. The aliases share one node, whose inputs are ``tensors``.

    ``backward(grads, keep)`` takes the gradients of the outputs and returns those of ``tensors``; ``keep``: it may be
    called again. ``tied``: indices of outputs that must not be changed in place.
    """
    made: tuple[torch.Tensor, ...] = apply_directly(_PipeOutputs, backward, outputs, tied, *tensors)
    return made


def end_history(edited: Sequence[torch.Tensor]) -> None:
    """Make backward passes through ``edited``, the inputs that stages have changed in place, raise RuntimeError."""
    with torch.enable_grad():
        for tensor in edited:
            version = tensor._version
            apply_directly(_Edited, tensor)
            # Marking the tensor as dirty has bumped its version, although its contents have not changed.
            unsafe_set_version_counter((tensor,), (version,))


def accumulate(tensors: Sequence[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    """Backpropagate gradients through the histories of the tensors; for leaves, add them to ``.grad``.

    Empties ``grads``: autograd would have to copy gradients to which there is another reference.
    """
    kept = [tensor for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
    grads[:] = [grad for grad in grads if grad is not None]
    if not kept:
        return

    def hand_over(_: Grads, keep: bool) -> Grads:
        handed = tuple(grads)
        grads.clear()
        return handed

    with torch.enable_grad():
        (start,) = attach(hand_over, (_NUMBER,), kept)
    run_backward((start,), (_NUMBER,), False, False, (), allow_unreachable=True, accumulate_grad=True)
