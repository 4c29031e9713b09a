"""One mini-batch on its way through a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from pymoe.autograd.random_streams import Source as RandomSource
from pymoe.autograd.random_streams import Stream, with_stream
from pymoe.autograd.thread_state import current
from pymoe.pipe.context import MicroBatch, in_pipeline
from pymoe.pipe.execution.activation import Activation
from pymoe.pipe.execution.checkpoint import Checkpoints
from pymoe.pipe.execution.leaf_sums import LeafSums, over_stages
from pymoe.pipe.execution.values import Crossing, Origin, Sent, is_fixed, pack
from pymoe.pipe.micro_batches import MicroBatches
from pymoe.pipe.schedules.action import Action, Kind
from pymoe.pipe.stages import INPUT, Pipeline, Source

__all__ = ["Inputs", "Run"]

Result = TypeVar("Result")
FORWARD, BACKWARD, BACKWARD_INPUT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT  # found faster
OnOutput = Callable[[int, Sequence[Sent]], None]


class Inputs(Origin):
    """The tensors that a run was given and that need gradients."""

    __slots__ = ("_versions", "tensors")

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self._versions: list[int] = []

    def cross(self, tensor: torch.Tensor) -> Crossing:
        """The tensor for the stages."""
        if not tensor.requires_grad:
            return Crossing(tensor)
        self.tensors.append(tensor)
        self._versions.append(tensor._version)
        self.grads.append(None)
        return Crossing(tensor.detach(), self, len(self.tensors) - 1, is_fixed(tensor))

    def edited(self) -> list[torch.Tensor]:
        """Those of the tensors that have been changed in place since."""
        return [
            tensor for tensor, version in zip(self.tensors, self._versions, strict=True) if tensor._version != version
        ]


class Run:
    """The actions of a schedule, for one mini-batch: :meth:`perform` does one, on any thread.

    For one micro-batch and stage they come in the order of the pipeline, for one stage and kind in the order of the
    micro-batches. So all sums are made in an order that threads do not change.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: MicroBatches,
        *,
        graphs: bool,
        checkpoints: Sequence[Checkpoints],
        checkpointed: range,
        on_output: OnOutput | None = None,
    ) -> None:
        """
        Args:
            pipeline: the stages.
            micro_batches: the values of its inputs.
            graphs: whether there will be backward passes.
            checkpoints: for every stage.
            checkpointed: the micro-batches whose forward is repeated.
            on_output: called with the number of a micro-batch and what its last stage has sent, on the stage's thread.
        """
        self.inputs = Inputs()
        self.sums = [LeafSums() for _ in pipeline.stages]
        self._pipeline = pipeline
        self._checkpoints = checkpoints
        self._checkpointed = checkpointed
        self._graphs = graphs
        self._on_output = on_output
        self._state = current()
        self._random = RandomSource()
        count = len(micro_batches.rows)
        self._weights = micro_batches.weights
        cross = self.inputs.cross if graphs else Crossing
        self._uses, self._made = pipeline.uses, pipeline.made
        given = [(number, Source(INPUT, number)) for number in range(pipeline.inputs)]
        given = [(number, source) for number, source in given if self._uses[source]]
        self._sent: list[dict[Source, Sent]] = [
            {source: pack(values[number], cross) for number, source in given} for values in micro_batches.values
        ]
        self._left: list[dict[Source, int]] = [{} for _ in range(count)]
        self._activations: list[list[Activation | None]] = [[None] * count for _ in pipeline.stages]
        self._keep = False
        if checkpointed:
            for checkpoint in checkpoints:
                checkpoint.begin()

    def around(self, part: Callable[..., Result], *args: Any) -> Result:
        """``part(*args)``, in which a thread performs actions."""
        return in_pipeline(with_stream, Stream(self._random, -1), part, *args)

    def perform(self, action: Action) -> None:
        """Do one action, within :meth:`around`."""
        stage, micro_batch, kind = action
        if kind is FORWARD:
            self._forward(stage, micro_batch)
            return
        activation = self._activations[stage][micro_batch]
        assert activation is not None
        if kind is BACKWARD:
            activation.backward(self.sums[stage], self._keep)
        elif kind is BACKWARD_INPUT:
            activation.backward_input()
            return
        else:
            activation.backward_weight(self.sums[stage])
        if not self._keep:
            self._activations[stage][micro_batch] = None

    def outputs(self) -> list[list[Sent]]:
        """After all forwards: for every micro-batch the pipeline's outputs, which are let go of here."""
        sent, self._sent = self._sent, []
        return [[values[source] for source in self._pipeline.outputs] for values in sent]

    def leaves(self) -> list[torch.Tensor]:
        """After all forwards: the leaves that backwards will add to, each once. Of checkpointed ones, the stages'
        parameters.
        """
        found: dict[int, torch.Tensor] = {}
        for stage, activations in zip(self._pipeline.stages, self._activations, strict=True):
            for activation in activations:
                if activation is None:
                    continue
                if activation.is_checkpointed:
                    parameters = [p for module in stage.modules for p in module.parameters() if p.requires_grad]
                    found.update((id(parameter), parameter) for parameter in parameters)
                found.update((id(leaf), leaf) for leaf in activation.leaves)
        return list(found.values())

    @property
    def is_on_host(self) -> bool:
        """Whether nothing of its graphs needs a thread of autograd's own."""
        tensors = [*self.inputs.tensors, *(p for s in self._pipeline.stages for m in s.modules for p in m.parameters())]
        return all(tensor.is_cpu or tensor.is_meta for tensor in tensors)

    def begin_backward(self, keep: bool) -> None:
        """Before the backwards, if there may be several of them. ``keep``: there will be another."""
        self._keep = keep
        self.sums = [LeafSums() for _ in self._pipeline.stages]
        self.inputs.grads = [None] * len(self.inputs.tensors)

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """After all backwards: the leaves that have gradients, and these."""
        return over_stages(self.sums)

    def release(self) -> None:
        """Let go of everything, whatever state it is in."""
        self._sent, self._activations, self._on_output = [], [], None
        self.sums = []
        self.inputs = Inputs()

    def _forward(self, number: int, index: int) -> None:
        stages, here, uses = self._pipeline.stages, self._sent[index], self._uses
        stage = stages[number]
        sent = [*map(here.__getitem__, stage.inputs)]
        about = MicroBatch(index, len(self._weights), self._weights[index], False, False, number)
        stream = functools.partial(Stream, self._random, index * len(stages) + number)
        activation = Activation(stage, about, stream, self._state)
        if not self._graphs:
            made = activation.evaluate(sent)
        else:
            if index in self._checkpointed and self._checkpoints[number].have_use(sent):
                made = activation.forward_checkpointed(sent, self._checkpoints[number])
            else:
                made = activation.forward(sent)
            self._activations[number][index] = activation
        del sent
        for source in stage.inputs:
            if uses[source] > 1:
                left = self._left[index]
                left[source] = left.get(source, uses[source]) - 1
                if left[source]:
                    continue
            del here[source]
        if self._on_output is not None and number == len(stages) - 1:
            self._on_output(index, made)
        for source, value in zip(self._made[number], made, strict=False):
            if uses[source]:
                here[source] = value
