"""A traced model as stages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from pymoe.pipe.auxiliary import with_auxiliary_losses
from pymoe.pipe.capture import Captured
from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.devices import place
from pymoe.pipe.execution.turns import Turns, taking_turns
from pymoe.pipe.micro_batches import MicroBatches, Whole
from pymoe.pipe.staged import StagedModel
from pymoe.pipe.stages import Pipeline, Stage
from pymoe.pipe.traced.boundaries import CONSTANT
from pymoe.pipe.traced.cut import Computed, Cut, cut
from pymoe.pipe.traced.loss_spec import find_loss
from pymoe.pipe.traced.module_calls import modules_as_arguments
from pymoe.pipe.traced.shared_state import Spec, State, by_first_name
from pymoe.pipe.traced.stage_module import StageModule, has, plant
from pymoe.pipe.traced.trace import Trace

__all__ = ["TracedModel"]


class TracedModel(StagedModel):
    """Any model that can be captured, cut at its markers.

    A capture holds for the modes of all modules, training or evaluation, for their hooks, and for the values of Python
    that the model's code has read. When one of them changes the model is captured again, at the next call, and cut at
    the same places; every capture is kept.

    Args:
        module: the model, whose parameters and buffers the stages share.
        args: examples of its arguments, of a micro-batch.
        kwargs: examples of its arguments by name.
        trace: how it is captured.
        multi_use: how several stages come by one parameter.
        loss_spec: where in the output the loss is; None: there is none.
        devices: for every stage; None: they stay where they are.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trace: Trace,
        *,
        multi_use: Spec = None,
        loss_spec: Any = None,
        devices: Sequence[torch.device | str | int] | None = None,
    ) -> None:
        self.module = module
        self.parts: tuple[StageModule, ...] = ()
        self.devices: tuple[torch.device | None, ...] = ()
        if devices is not None:
            self.devices = tuple(torch.device(device) for device in devices)
        self.loss_spec = loss_spec
        self._trace = trace
        self._multi_use = by_first_name(multi_use, module)
        self._variants: list[_Variant] = []
        self._changes: list[str] = []  # why it was captured again, but for modes
        self._uses: list[dict[str, None]] = []  # of every stage, in any mode
        self._constants: list[dict[str, torch.Tensor]] = []
        self._is_planted_in_part = False
        self._is_chosen = False  # for the call whose micro-batches were made last
        self._one_at_a_time = Turns()  # threads that find that it must be captured again
        first = trace(module, args, kwargs)
        self._example = first.arguments
        self._now = self._add(first)
        if devices is None:
            self.devices = (None,) * len(self.parts)

    @property
    def pipeline(self) -> Pipeline:
        """That of the model as it is now, or at the micro-batches that have just been made."""
        is_chosen, self._is_chosen = self._is_chosen, False
        return self._now.pipeline if is_chosen else self._choose().pipeline

    @property
    def loss(self) -> int | None:
        """Which of the pipeline's outputs is the loss."""
        return self._now.loss

    @property
    def has_loss(self) -> bool:
        """Whether somebody has said where it is."""
        return self.loss_spec is not None

    def micro_batches(
        self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Any] = ()
    ) -> MicroBatches:
        """As of any staged model, of the capture that holds for the call."""
        leaves = self._now.arguments.flatten(tuple(args), dict(kwargs))
        self._choose([leaf.value if isinstance(leaf, Whole) else leaf for leaf in leaves])
        made = super().micro_batches(chunks, args, kwargs, others)
        self._is_chosen = True
        return made

    def enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of the arguments."""
        leaves = self._now.arguments.flatten(tuple(args), dict(kwargs))
        self._now.fits.check(leaves)
        return leaves

    def leave(self, values: Sequence[Any]) -> Any:
        """The model's output."""
        variant = self._now
        computed = iter(values)
        leaves = [next(computed) if leaf is Computed else leaf for leaf in variant.leaves]
        return _pytree.tree_unflatten(leaves, variant.out_spec)

    def code(self, stage: int) -> str:
        """The graph of a stage as Python, for the model as it is now."""
        return self.parts[stage].code(self._choose().number)

    def _choose(self, leaves: Sequence[Any] | None = None) -> _Variant:
        """The capture that holds by now, a new one if there is none."""
        if self._now.guards.broken(leaves) is not None:
            with self._one_at_a_time:
                self._choose_another(leaves)
        return self._now

    def _choose_another(self, leaves: Sequence[Any] | None) -> None:
        change = self._now.guards.broken(leaves)
        if change is None:  # another thread was faster
            return
        others = (variant for variant in self._variants if variant.guards.broken(leaves) is None)
        found = next(others, None)
        if found is None:
            self._warn_of(change)
            args, kwargs = self._example.example(self._dtypes(leaves), leaves or ())
            found = self._add(self._trace(self.module, args, kwargs))
        elif self._is_planted_in_part:
            self._plant()
        self._now = found

    def _dtypes(self, leaves: Sequence[Any] | None) -> list[torch.dtype | None]:
        """Those of the tensors of a call; None: of the example, in the model's precision as it is now."""
        if leaves is not None:
            return [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        before, now = self._now.guards.moved() or (None, None)
        dtypes = [getattr(leaf, "dtype", None) for leaf in self._now.arguments.examples]
        return [now if dtype == before else dtype for dtype in dtypes]

    def _warn_of(self, change: str) -> None:
        """What changes again and again costs a capture every time."""
        if "mode" not in change:
            self._changes.append(change)
            count = len(self._changes)
            if count >= 8 and count & (count - 1) == 0:
                warnings.warn(
                    f"the model is captured again for the {count}th time, now because {change} has changed: every "
                    "value of Python needs a capture of its own, which takes time and memory. A value that changes "
                    "often belongs into a buffer, or its module into `opaque=`",
                    stacklevel=stack_level(),
                )

    def _add(self, captured: Captured) -> _Variant:
        """A new capture."""
        graph, number = captured.graph.graph, len(self._variants)
        modules_as_arguments(graph)
        parameters = frozenset(name for name, _ in self.module.named_parameters())
        state = State(parameters, self._multi_use, apart=len(set(self.devices)) > 1)
        made = cut(graph, state, self.devices)
        self._check_number(len(made.pieces))
        if not self.parts:
            self.parts = tuple(StageModule(stage) for stage in range(len(made.pieces)))
            self._uses = [{} for _ in self.parts]
            self._constants = [{} for _ in self.parts]
        for piece, uses, constants in zip(made.pieces, self._uses, self._constants, strict=True):
            for node in piece.graph.nodes:
                if node.op == "get_attr" and str(node.target).startswith(CONSTANT):
                    name = f"{node.target}_{number}"
                    constants[name] = getattr(captured.graph, str(node.target))
                    node.target = name
            uses.update(dict.fromkeys(name for name in piece.state if not name.startswith(CONSTANT)))
        self._plant()
        for part, piece in zip(self.parts, made.pieces, strict=True):
            part.add(piece.graph, captured.training)
            part.training = captured.training
        if devices := [device for device in self.devices if device is not None]:
            place(self.parts, devices)
            for part in self.parts:
                part.give_back()
        variant = _Variant(
            number,
            self.module,
            captured,
            made,
            self._pipeline(number, made, captured),
            self._find_loss(captured, made),
        )
        self._variants.append(variant)
        return variant

    def _plant(self) -> None:
        """Give the stages what they use of the model, in any capture, as far as the model still has it."""
        uses = [[name for name in of_stage if has(self.module, name)] for of_stage in self._uses]
        self._is_planted_in_part = list(map(len, uses)) != list(map(len, self._uses))
        plant(self.parts, self.module, uses, self._constants)

    def _check_number(self, stages: int) -> None:
        if self.parts and stages != len(self.parts):
            raise ValueError(
                f"the model has {len(self.parts)} stages in one of its modes (training, evaluation), or with other "
                f"values of its attributes, and {stages} in another: its boundaries must be the same in all"
            )
        if self.devices and stages != len(self.devices):
            raise ValueError(f"Pipe: devices: expected one device per stage ({stages}), got {len(self.devices)}")

    def _pipeline(self, number: int, made: Cut, captured: Captured) -> Pipeline:
        functions = [with_auxiliary_losses(_Call(part, number), part) for part in self.parts]
        devices = self.devices or (None,) * len(self.parts)
        stages = [
            Stage(function, piece.inputs, piece.outputs, (part,), device)
            for function, piece, part, device in zip(
                taking_turns(functions, self.parts), made.pieces, self.parts, devices, strict=True
            )
        ]
        return Pipeline(tuple(stages), len(captured.arguments.names), made.outputs)

    def _find_loss(self, captured: Captured, made: Cut) -> int | None:
        if self.loss_spec is None:
            return None
        try:
            leaf = find_loss(self.loss_spec, captured.out_spec)
        except ValueError:
            if self._variants:
                return None  # many models return a loss in training alone
            raise
        if made.leaves[leaf] is not Computed:
            raise ValueError(f"output_loss_value_spec names {made.leaves[leaf]!r}, which is no tensor")
        return sum(other is Computed for other in made.leaves[:leaf])


class _Call:
    """The function of a stage, in one of the modes."""

    def __init__(self, part: StageModule, variant: int) -> None:
        self._part = part
        self._variant = variant

    def __call__(self, *values: Any) -> Sequence[Any]:
        self._part.borrow()
        outputs: Sequence[Any] = self._part(*values, variant=self._variant)
        return outputs


class _Variant:
    """What there is of a capture once it was cut."""

    def __init__(
        self, number: int, model: nn.Module, captured: Captured, made: Cut, pipeline: Pipeline, loss: int | None
    ) -> None:
        self.number = number
        self.arguments = captured.arguments
        self.fits = captured.fits
        self.guards = captured.guards.on(model)
        self.out_spec = captured.out_spec
        self.leaves = made.leaves
        self.pipeline = pipeline
        self.loss = loss
