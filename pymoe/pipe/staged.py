"""A model that was cut into stages: what a ``Pipe`` runs, in one process or across several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pymoe.pipe.auxiliary import with_auxiliary_losses
from pymoe.pipe.execution.shared_layers import StageLock
from pymoe.pipe.micro_batches import MicroBatches, join, mean, split
from pymoe.pipe.stages import Pipeline, Source, Stage
from pymoe.pipe.structure import Structure

Function = Callable[..., Sequence[Any]]
Call = tuple[Sequence[Any], dict[str, Any]]


class StagedModel(ABC):
    """A pipeline, and how a call of the model becomes values of its inputs, and values of its outputs the result.

    Copies (``copy.deepcopy``, ``pickle``) run their own modules.
    """

    module: nn.Module
    """The model: parameters and buffers have its names."""
    parts: tuple[nn.Module, ...]
    """For every stage the module whose parameters and buffers it uses; they are the model's own."""
    devices: tuple[torch.device | None, ...]
    """Where the stages are; None: where the model was."""

    loss_spec: Any = None
    """Where in the model's output the loss is, as far as the user has said."""
    hooks_are_pipes = False
    """Whether hooks of ``module`` are those of a call of the pipe, as nothing else calls them."""

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The stages and edges of the model as it is by now: in its present mode, with its present layers.

        Raises:
            RuntimeError: the model has other layers, and its stages are not cut for them.
        """

    @property
    def loss(self) -> int | None:
        """Which of the pipeline's outputs is the loss; None: the model returns none, as far as is known."""
        return None

    @abstractmethod
    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of the pipeline's inputs for a call of the model with one micro-batch.

        Raises:
            TypeError: the model has no such arguments.
            ValueError: an argument has a shape or a value that does not fit.
        """

    @abstractmethod
    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        """Return what the model returns, made of the values of the pipeline's outputs."""

    def present_parts(self) -> tuple[nn.Module, ...]:
        """Return ``parts``, with the layers that the model has by now.

        Raises:
            RuntimeError: the model has other layers, and its stages are not cut for them.
        """
        return self.parts

    def stages_of(
        self, functions: Iterable[Function], inputs: Iterable[tuple[Source, ...]], outputs: Iterable[int]
    ) -> tuple[Stage, ...]:
        """Return the stages that run ``functions`` of the parts, which may inject losses."""
        weighted = [with_auxiliary_losses(function, part) for function, part in zip(functions, self.parts, strict=True)]
        devices = self.devices or (None,) * len(self.parts)
        return tuple(
            Stage(function, sources, count, (part,), device)
            for function, sources, count, part, device in zip(
                weighted, inputs, outputs, self.parts, devices, strict=True
            )
        )

    def micro_batches(
        self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Any] = ()
    ) -> MicroBatches:
        """Return the values of the pipeline's inputs for every micro-batch, then ``others``, split the same way."""
        parts = split((*args, *kwargs.values(), *others), chunks)
        last = len(args) + len(kwargs)
        values = [[*self.flatten_inputs(*_call(part, args, kwargs)), *part[last:]] for part in parts.values]
        return MicroBatches(values, parts.rows)

    def arguments(self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        """Return the arguments of the model for every micro-batch."""
        return [_call(part, args, kwargs) for part in split((*args, *kwargs.values()), chunks).values]

    def output(self, outputs: Sequence[Sequence[Any]], weights: Sequence[float]) -> Any:
        """Return the output of a mini-batch, from those of its micro-batches and the weight of each."""
        loss = self.loss
        columns = enumerate(zip(*outputs, strict=True))
        return self.unflatten_outputs(
            [mean(column, weights) if number == loss else join(column) for number, column in columns]
        )

    def minimised(self, values: Sequence[Any]) -> Any:
        """Return what a step without a loss function minimises: the model's own loss, or what the model returns."""
        loss = self.loss
        return self.unflatten_outputs(values) if loss is None else values[loss]

    @property
    def has_loss(self) -> bool:
        """Whether the model computes a loss that a training step minimises."""
        return False

    def code(self, stage: int) -> str:
        """Return what a stage does, as text for people."""
        return f"# stage {stage}\n{self.parts[stage]!r}"

    def extra_repr(self) -> str:
        """Return how the model is cut, for ``repr`` of the pipe."""
        return f"stages={len(self.parts)}"


class LayersAsStages(StagedModel):
    """A model with its layers as stages, or several of them as one. A layer that is replaced later is run."""

    module: nn.Sequential | nn.ModuleList

    def __init__(self, module: nn.Sequential | nn.ModuleList) -> None:
        self.module = module
        self._one_at_a_time = StageLock()  # threads that find a layer replaced
        self._stand()

    @property
    def pipeline(self) -> Pipeline:
        """The stages and edges, of the layers that the model has by now."""
        if self._made is None or self._structure.has_changed():
            with self._one_at_a_time:
                if self._made is None or self._structure.has_changed():
                    self._structure.refuse_other_names()
                    self._structure.refuse_edited_stages()
                    self._stand()
        assert self._made is not None
        return self._made

    def present_parts(self) -> tuple[nn.Module, ...]:
        """Return ``parts``, with the layers that the model has by now."""
        _ = self.pipeline
        return self.parts

    def _stand(self) -> None:
        """Make the pipeline of the present layers; what was found out about others is forgotten with their stages."""
        self._made: Pipeline | None = None
        made = self._fill()
        self._structure = Structure(self.module, self.parts, made)
        self._made = self._make_pipeline()

    @abstractmethod
    def _fill(self) -> Sequence[tuple[nn.Module, nn.Module]]:
        """Have ``parts`` hold the model's present layers.

        Returns those of them that are not the model's own modules, each with the module that has its layers.
        """

    @abstractmethod
    def _make_pipeline(self) -> Pipeline:
        """Return the stages and edges."""


def _call(part: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the arguments of a micro-batch, given as values in the order of those of the mini-batch."""
    first, last = len(args), len(args) + len(kwargs)
    return part[:first], dict(zip(kwargs, part[first:last], strict=True))
