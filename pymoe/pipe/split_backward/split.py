"""The backward pass of one micro-batch in one stage, in two parts: gradients of inputs first, those of weights later.

The stage before waits for the first part alone, so a zero-bubble schedule (Qi et al., arXiv 2401.10241) fills the gaps
of a pipeline with the second. Both together are one backward pass, cut in two: they do the same work and no node's work
twice. ``graph_cut.py`` says where it is cut, ``put_off.py`` which nodes can wait with what.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pymoe.autograd.compiled_nodes import has_compiled_nodes
from pymoe.autograd.isolated_graph import differentiate
from pymoe.pipe.split_backward.graph_cut import cut_graph
from pymoe.pipe.split_backward.put_off import Recorder, can_not_put_off, can_put_off, free_saved_tensors

__all__ = ["SplitBackward"]


class SplitBackward:
    """A backward pass in two parts, on any threads: :meth:`input_gradients`, then :meth:`weight_gradients`. Each once.

    Accumulates nothing. Hooks of tensors within the graph run in one of the parts, as in a whole backward pass; those
    of leaves do not run, being for sums over all micro-batches. Hooks of nodes that are put off
    (``Node.register_hook``) see what the first part computes. The sums are those of a whole backward pass, bit for bit;
    only where the graph uses a weight three times or more, and in different ways (as it is and transposed, say), their
    order may be another.

    Args:
        roots: where the backward pass begins.
        inputs: where the graph begins. What is behind them is never run.
        leaves: all tensors within the graph whose gradients are wanted, each once.
        is_compiled: whether there are nodes of ``torch.compile``; None: it looks.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        inputs: Sequence[GradientEdge],
        leaves: Sequence[Tensor],
        *,
        is_compiled: bool | None = None,
    ) -> None:
        if is_compiled is None:
            is_compiled = has_compiled_nodes([root.node for root in roots], inputs[0].node if inputs else None)
        self._is_compiled = is_compiled
        self._graph: tuple[Sequence[GradientEdge], Sequence[GradientEdge]] | None = (roots, inputs)
        self._leaves: Sequence[Tensor] = leaves
        self._gradients: list[Tensor | None] = [None] * len(leaves)
        self._late: list[int] | None = None  # after part one: the leaves whose gradients wait
        self._recorder: Recorder | None = None
        self._late_roots: list[tuple[GradientEdge, Tensor]] = []

    def input_gradients(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The first part.

        Args:
            grads: for every root a gradient of its shape, or None.

        Returns:
            A gradient for every one of ``inputs``; None for one that the roots with gradients do not depend on.

        Raises:
            RuntimeError: it has run before. What the graph raises passes; then the second part can not be had.
        """
        if self._graph is None:
            raise RuntimeError("SplitBackward: the gradients of the inputs are computed once")
        (roots, inputs), self._graph = self._graph, None
        leaves = self._leaves
        given = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
        nodes = [root.node for root, _ in given]
        entry = inputs[0].node if inputs else None
        cut = cut_graph(
            nodes,
            [edge.node for edge in inputs],
            {id(leaf): number for number, leaf in enumerate(leaves)},
            can_not_put_off if self._is_compiled else can_put_off,
        )
        early = [number for number, late in enumerate(cut.late_leaves) if not late]
        now = [(root, grad) for (root, grad), late in zip(given, cut.late_roots, strict=True) if not late]
        with Recorder(cut.put_off) as recorder:
            found = differentiate(
                [root for root, _ in now],
                [grad for _, grad in now],
                inputs,
                [leaves[number] for number in early],
                entry,
                keep=not self._is_compiled,
            )
        for number, gradient in zip(early, found[len(inputs) :], strict=True):
            self._gradients[number] = gradient
        if not self._is_compiled:  # these are free
            kept = {put_off.node for put_off in cut.put_off}
            free_saved_tensors([node for node in cut.input_side if node not in kept])
        self._recorder = recorder
        self._late = [number for number, late in enumerate(cut.late_leaves) if late]
        self._late_roots = [pair for pair, late in zip(given, cut.late_roots, strict=True) if late]
        return found[: len(inputs)]

    def weight_gradients(self) -> tuple[Tensor | None, ...]:
        """The second part. Lets go of the graph, also if it fails.

        Returns:
            A gradient for every one of ``leaves``; None for one that the roots with gradients do not depend on.

        Raises:
            RuntimeError: it has run before, or the first part has not ended well. What the graph raises passes.
        """
        late, recorder, roots, gradients = self._late, self._recorder, self._late_roots, self._gradients
        if late is None or recorder is None:
            raise RuntimeError("SplitBackward: the gradients of the weights are computed once, after the inputs'")
        leaves = [self._leaves[number] for number in late]
        self._late = self._recorder = None
        self._late_roots, self._gradients, self._leaves = [], [], ()
        edges, values = recorder.gradients()
        found = differentiate(
            [*edges, *[root for root, _ in roots]],
            [*values, *[grad for _, grad in roots]],
            [],
            leaves,
            None,
            keep=not self._is_compiled,
        )
        for number, gradient in zip(late, found, strict=True):
            gradients[number] = gradient
        return tuple(gradients)
