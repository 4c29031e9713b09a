"""``Pipe``: runs a model's stages at the same time, each on a different micro-batch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from pymoe._common.names import also_called, explain_arguments
from pymoe._torch_private import BatchNormBase
from pymoe._transforms import torch_func_is_active
from pymoe.autograd.compiler_disable import compiler_disable
from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.context import has_capacity
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.execution.graph import have_tangents
from pymoe.pipe.execution.plan import Engine, run_in_one_graph
from pymoe.pipe.execution.step_state import recomputed
from pymoe.pipe.loss import LossWrapper, Objective, Reduction, weigh
from pymoe.pipe.schedules import Record, Schedule
from pymoe.pipe.sequential import OwnStages, SequentialModel, Taken
from pymoe.pipe.stages import (
    ALL_HOOKS,
    CALL_HOOKS,
    ByStage,
    Call,
    PipeInfo,
    StagedModel,
    StageInfo,
    outermost,
    refuse_moves,
    shared_parameters,
)
from pymoe.pipe.traced.model import SplitPolicy, Trace, TracedModel
from pymoe.pipe.traced.partition import Spec
from pymoe.pipe.traced.split_points import SplitPoint, was_annotated_in_vain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pymoe.pipe.distributed import RankStage

CheckpointMode = Literal["always", "except_last", "never"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"]
CHECKPOINT = get_args(CheckpointMode)

ABSENT = {
    "split_gm": "get_stage_module(0) is the module of a stage, info().graph has the stages as a graph, and "
    "print_readable() prints what each does",
    "executor": "a pipe runs its stages itself, pipe(x) and pipe.step(x, target=y, loss_fn=f), and last_run tells when "
    "each of them ran",
}
"""Attributes of PiPPy's and ``torch.distributed.pipelining``'s pipes, and their replacements here."""


class Pipe(nn.Module):
    """A sequential model, cut into stages that work at the same time, each on a different micro-batch.

    The pipe uses the model's own parameters, so optimizers, ``state_dict`` keys and hooks need no change. Layers of the
    model may be replaced later, at any depth: the pipe runs the new ones. Gradients are those of ``loss_fn(model(x),
    y).backward()``, with two exceptions: layers that use a batch as a whole (a batch norm gets single micro-batches),
    and random numbers (every micro-batch draws from its own stream in every stage: results depend on the seed, never on
    threads). Losses that are not means over rows are refused where the step can tell; see ``reduction`` of
    :meth:`step`.

    Args:
        module: the model. Its layers may be ``@skippable`` (:mod:`pymoe.pipe.skip`) and share parameters.
        chunks: the number of micro-batches into which a mini-batch is cut, along dimension 0. Sizes differ by one at
            most. With fewer rows than ``chunks`` there is one micro-batch per row.
        checkpoint: the micro-batches of a training pass that keep only their inputs, and are run again for their
            backward: ``"always"`` all, ``"except_last"`` all except the last, ``"never"`` none. In evaluation mode none
            is recomputed. The first run also builds an autograd graph, so that modules can compute gradients inside it;
            the graph is released when the run ends, unless the forward has changed something that cannot be restored
            for a second run.
        deferred_batch_norm: whether to convert the model's batch norms, in place, so that their running statistics
            follow mini-batches (:func:`pymoe.pipe.convert_deferred_batch_norm`).
        balance: the number of layers of every stage; see :mod:`pymoe.pipe.balance`. None: every layer is a stage.
        devices: a device for every stage, to which its layers are moved. None: they stay where they are. Inputs in
            page-locked memory must not change before their GPU has read them, as with ``Tensor.to(non_blocking=True)``.

    Every worker has a persistent thread (the first worker uses the caller's thread). All threads run in the caller's
    state: grad mode, autocast, inference mode, context variables, profiler. A stage runs one micro-batch at a time. If
    stages share a layer that writes to its own state in its forward, they run in the model's order, one micro-batch
    after the other. Values between layers may be tensors, nested structures of them, or any other objects; an object
    of a class that is not registered with ``torch.utils._pytree`` must not contain tensors that need gradients.

    A recomputed forward sees the state that the modules had in the first run; the page docs/concepts/determinism.md
    says which state is restored, and which stages and pipes may share layers that they change.

    Raises:
        TypeError: the model is not an ``nn.Sequential``; skips do not match; an argument is of the wrong kind.
        ValueError: an argument does not fit the model.
        RuntimeError: raised by calls and steps: another pipe ran at the same time, and one of the two wrote to state
            that they share; or a forward wrote to state that several stages share, and the stages did not run in order.

    Warns:
        UserWarning: a stage's forward changes an object that cannot be restored, so the stage keeps its graphs (given
            in its first such step). Or a batch norm, or an ``MoE`` with a capacity, gets micro-batches instead of the
            mini-batch (given for the first such layer, once in training and once in evaluation mode, in the first call
            or step with several micro-batches).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> pipe = pymoe.Pipe(model, chunks=4, balance=[2, 1])
        >>> x, y = torch.randn(16, 8), torch.randn(16, 8)
        >>> losses = pipe.step(x, target=y, loss_fn=torch.nn.functional.mse_loss)  # forward and backward
        >>> len(losses), model[0].weight.grad.shape
        (4, torch.Size([32, 8]))
    """

    @explain_arguments(num_chunks="chunks", n_microbatches="chunks", num_microbatches="chunks")
    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: Sequence[int] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
    ) -> None:
        _refuse_a_pipe("Pipe", module)
        super().__init__()
        self._choose(chunks, checkpoint)
        self._stand_on(SequentialModel(module, balance, devices, deferred_batch_norm))

    @classmethod
    def of(cls, staged: StagedModel, chunks: int = 1, checkpoint: str = "except_last") -> Pipe:
        """Return a pipe for a model that is already cut into stages.

        Args:
            staged: the model.
            chunks: the number of micro-batches into which a mini-batch is cut.
            checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.

        Raises:
            ValueError: an argument is out of range.
        """
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        pipe._choose(chunks, checkpoint)
        pipe._stand_on(staged)
        return pipe

    @classmethod
    @also_called(mod="module")
    def from_tracing(
        cls,
        module: nn.Module,
        example_args: tuple[Any, ...] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
        **options: Any,
    ) -> Pipe:
        """Return a pipe of any model that can be captured. :func:`pymoe.pipeline` documents what a capture fixes.

        Args:
            module: the model.
            example_args: example arguments for one micro-batch.
            example_kwargs: example keyword arguments.
            split_policy: a function that adds boundaries to the captured graph and returns the graph; None: the model
                is cut where its code calls :func:`pymoe.pipe_split`.
            options: ``split_spec``, ``chunks``, ``checkpoint``, ``devices``, ``multi_use_param_spec``,
                ``output_loss_value_spec``, ``dynamic_shapes`` and ``opaque`` of :func:`pymoe.pipeline`.

        Raises:
            CaptureError: the model cannot be captured; the message names the line of its code.
            TypeError: an argument is of the wrong kind.
            ValueError: an argument does not fit the model.
        """
        return pipeline(module, example_args, example_kwargs, split_policy=split_policy, **options)

    @classmethod
    def from_stages(
        cls,
        stages: Sequence[nn.Module],
        takes: Sequence[Sequence[Taken]] | None = None,
        outputs: Taken | Sequence[Taken] | None = None,
        *,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        devices: Sequence[torch.device | str | int] | None = None,
    ) -> Pipe:
        """Return a pipe whose stages are the given modules.

        ::

            pipe = Pipe.from_stages([encoder, middle, decoder], takes=[[Source(INPUT, 0)], [0], [1, Source(0, 1)]])

        A parameter's name is the index of its stage, followed by its name in the stage: ``0.weight``.

        Args:
            stages: the modules, in an order in which they can run. Later changes of a list have no effect. Stages may
                be replaced later in an ``nn.ModuleList``, or through the pipe (``setattr(pipe, "1", module)``): the
                pipe runs the new ones.
            takes: the positional arguments of every stage: ``n`` for what stage n returns, ``Source(n, k)`` for item k
                of it, ``Source(INPUT, k)`` for argument k of the pipe. None: every stage takes what the stage before it
                returns, and the first takes the pipe's only argument.
            outputs: what the pipe returns, in the same notation, one value or several. None: what the last stage
                returns.
            chunks: the number of micro-batches into which a mini-batch is cut.
            checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.
            devices: a device for every stage, to which it is moved. None: they stay where they are.

        Raises:
            TypeError: the stages are not modules, or there are none.
            ValueError: a stage takes a value that no earlier stage makes, ``takes`` does not have one entry per stage,
                or an argument is out of range.
        """
        return cls.of(OwnStages(stages, takes, outputs, devices), chunks, checkpoint)

    def _choose(self, chunks: int, checkpoint: str) -> None:
        self.chunks = _count("chunks", chunks)
        if checkpoint not in CHECKPOINT:
            raise ValueError(f"Pipe: checkpoint must be one of {', '.join(CHECKPOINT)}, got {checkpoint!r}")
        self.checkpoint = checkpoint

    def _stand_on(self, staged: StagedModel) -> None:
        self.staged = staged
        self._engine = Engine()
        self._has_stepped = False
        self._modes_seen: set[bool] = set()
        module = staged.module
        # Share the model's own dictionaries, so that the pipe has all its names, and sees modules that are replaced
        # later.
        for kind in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[kind] = module.__dict__[kind]
        self.training = module.training
        if staged.hooks_are_pipes:
            for kind in ALL_HOOKS:
                self.__dict__[kind] = module.__dict__[kind]

    @compiler_disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, from which ``loss.backward()`` can start.

        The forwards of all micro-batches run now, and their backwards when autograd requests them. The micro-batches'
        outputs are concatenated along dimension 0. Inside ``torch.func`` transforms, and for tensors with tangents of
        forward-mode differentiation, stages run one after the other. Hooks of an ``nn.Sequential``
        (``register_forward_hook`` and others) are called with whole mini-batches, as in the model's own call. Hooks of
        layers are called with micro-batches.

        Args:
            args: the model's arguments (one for an ``nn.Sequential``): tensors and nested structures. Tensors have the
                rows of the mini-batch in dimension 0. An argument in :class:`pymoe.pipe.Whole` is not cut.
            kwargs: the model's keyword arguments.

        Raises:
            TypeError: the model does not take these arguments, or its ``forward`` has been replaced.
            RuntimeError: layers of the model were appended, inserted or deleted, or replaced in a stage but not in the
                model.
            ValueError: tensors have different numbers of rows; outputs of micro-batches differ in structure, or are
                scalar tensors or different values that are not tensors; the model's own loss is not a mean over rows.
            BaseException: the first exception that a stage raised, with a note that names stage and micro-batch.
        """
        micro_batches = self.staged.micro_batches(self.chunks, args, kwargs)
        self._look_at_layers(len(micro_batches.rows))
        pipeline = self.staged.pipeline
        if torch_func_is_active() or have_tangents((args, kwargs), self):
            outputs = run_in_one_graph(pipeline, micro_batches)
        else:
            outputs = self._engine.forward(
                pipeline, micro_batches, self._recomputed(len(micro_batches.rows)), self.staged.loss
            )
        return self.staged.output(outputs, micro_batches.weights)

    @compiler_disable
    def step(
        self,
        *inputs: Any,
        target: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        schedule: ScheduleName | str | Schedule = "1f1b",
        chunks: int | None = None,
        reduction: Reduction = "mean",
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run forward, loss and backward in the pipeline; add gradients to ``.grad`` as ``loss.backward()`` would.

        Micro-batches are weighted by their numbers of rows, so micro-batches of different sizes also give the gradients
        of the whole mini-batch. Gradients accumulate over steps until they are zeroed. Hooks of parameters are called
        once per step, with the sum. If a forward, the loss or a backward fails, no gradient is added. Under
        ``torch.no_grad`` only losses are computed. The first step of a pipe warns if no two of its stages can run at
        the same time, and if the model itself has hooks, which a step does not call.

        Args:
            inputs: the model's arguments; tensors have the rows of the mini-batch in dimension 0.
            target: cut like the inputs; None: ``loss_fn`` takes only the output.
            loss_fn: ``loss_fn(output, target)`` of a micro-batch, a tensor with one element. It runs after the last
                stage, once for each micro-batch in their order, and is never recomputed, so it may be stateful; its
                parameters get gradients, too. None: the model's own loss, or its output, is minimised.
            schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved-1f1b"``, ``"zero-bubble"``, any other registered name,
                or a :class:`pymoe.pipe.schedules.Schedule` of as many stages and micro-batches.
                Torch's spellings ("GPipe", "1F1B", "Interleaved1F1B") are accepted.
            chunks: the number of micro-batches of this step; None: the pipe's own.
            reduction: ``"mean"``: losses are means over rows. ``"sum"``: they are sums. A function of a micro-batch's
                target: it returns the number (or tensor with one element) by which ``loss_fn`` divides its sum, for
                example the number of tokens that are not padding (``lambda target: (target != -100).sum()``). Without
                a target the function gets the model's arguments. A micro-batch for which it returns 0 has no
                weight: ``loss_fn`` is not called for it, and its loss is 0. (If it returns 0 for all micro-batches,
                their losses are added up.) For torch's own losses, bare or in a ``functools.partial``, the step takes
                sums, ``ignore_index`` and class weights into account by itself. The graph of any other loss is checked
                before gradients are added: each term of a mean over rows must depend on one row only. The page
                docs/tutorials/pipeline_sequential.md lists what is checked and what is not.
            kwargs: the model's keyword arguments.

        Returns:
            The losses of the micro-batches, detached, of shape (micro-batches,).

        Raises:
            TypeError: the model does not take these arguments, or ``reduction`` does not return numbers.
            ValueError: an argument is out of range, tensors have different numbers of rows, the loss is not a tensor
                with one element, or ``reduction`` is "mean" and the check finds losses that are not means over rows.
            RuntimeError: the loss does not require gradients, or the model's layers have changed (see :meth:`forward`).
            NotImplementedError: tensors have tangents of forward-mode differentiation, which a step does not propagate.
            BaseException: the first exception that a stage raised, with a note that names stage and micro-batch.
        """
        if not callable(reduction) and reduction not in ("mean", "sum"):
            raise ValueError(f"Pipe.step: reduction must be 'mean' or 'sum', or a function, got {reduction!r}")
        if have_tangents((inputs, target, kwargs), self):
            raise NotImplementedError(
                "Pipe.step: forward-mode differentiation is not supported, and tangents would get lost; call the pipe "
                "itself, pipe(x), which keeps them"
            )
        has_target = target is not None
        chunks = self.chunks if chunks is None else _count("chunks", chunks)
        staged = self.staged
        try:
            micro_batches = staged.micro_batches(chunks, inputs, kwargs, (target,) * has_target)
        except TypeError as error:
            if has_target or len(inputs) < 2 or kwargs:
                raise
            raise TypeError(f"{error}; a step takes target= and loss_fn= by name") from None
        count = len(micro_batches.rows)
        weighed: list[Call] = [((values[-1],), {}) for values in micro_batches.values] if has_target else []
        if callable(reduction) and not has_target:
            weighed = staged.arguments(chunks, inputs, kwargs)
        weights = weigh(micro_batches, reduction, loss_fn if has_target else None, weighed)
        self._look_at_layers(count)
        planned = self._engine.schedule(schedule, len(self), count)
        if not self._has_stepped:
            self._has_stepped = True
            warn_of_no_gain(planned, count < chunks, staged.module if staged.hooks_are_pipes else None)
        unflatten = staged.minimised if loss_fn is None else staged.unflatten_outputs
        pipeline = staged.pipeline  # read first: this may capture the model anew, and so change staged.loss
        objective = Objective(loss_fn, has_target, unflatten, staged.loss or 0)
        return self._engine.step(pipeline, micro_batches, planned, self._recomputed(count), objective, weights)

    def _look_at_layers(self, micro_batches: int) -> None:
        if micro_batches > 1 and self.training not in self._modes_seen:
            warn_of_micro_batches(self.staged.module)
            self._modes_seen.add(self.training)

    @also_called(stage_index="index")
    def build_stage(self, index: int, device: torch.device | str, group: ProcessGroup | None = None) -> RankStage:
        """Return a stage that this process runs with the schedules of ``torch.distributed.pipelining``.

        See :func:`pymoe.pipe.distributed.build_stage`.

        Args:
            index: the index of the stage, from 0 (``stage_index`` is accepted, too).
            device: where the stage runs; its modules are moved there.
            group: the processes that share the stages; None: the default group.

        Raises:
            ValueError: there is no stage ``index``.
        """
        from pymoe.pipe.distributed import build_stage

        return build_stage(self, index, device, group)

    @property
    def last_run(self) -> Record | None:
        """Return a record of when each action of the last successful step, forward or backward pass ran; None before
        the first.
        """
        return self._engine.last_run

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Return the attribute that ``nn.Module`` has under this name: whether the backward hooks are full backward
        hooks; None without backward hooks. If the pipe has the model's hooks, this is the model's attribute.
        """
        return self._owner_of_hooks().__dict__.get("_is_full_backward_hook")

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, is_full: bool | None) -> None:
        if is_full is not None:  # nn.Module.__init__ sets None
            self._owner_of_hooks().__dict__["_is_full_backward_hook"] = is_full

    def _owner_of_hooks(self) -> nn.Module:
        staged = self.__dict__.get("staged")
        return staged.module if staged is not None and staged.hooks_are_pipes else self

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.staged.parts)

    @also_called(stage_idx="stage", stage_index="stage")
    def get_stage_module(self, stage: int) -> nn.Module:
        """Return the module of a stage: the part of the model that the stage uses, with the model's names (in a pipe of
        :meth:`from_stages`, without the stage's index).

        It can be compiled in place: ``get_stage_module(0).compile()``. The module of captured stage n takes the values
        of ``info().stages[n].takes`` as positional arguments and returns a list, even of a single value. It is not an
        ``fx.GraphModule``, because it has a separate graph for every capture.

        Args:
            stage: the index of the stage, from 0.

        Raises:
            ValueError: the stage is out of range.
        """
        if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < self.num_stages:
            raise ValueError(
                f"get_stage_module: invalid stage index, expected 0 to {self.num_stages - 1}, got {stage!r}"
            )
        return self.staged.present_parts()[stage]

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT:
            raise AttributeError(f"a Pipe has no {name}: {ABSENT[name]}")
        return super().__getattr__(name)

    @property
    def has_loss_and_backward(self) -> bool:
        """Return whether the model computes its own loss, which ``step()`` minimises if it gets no ``loss_fn``."""
        return self.staged.has_loss

    @property
    def loss_spec(self) -> Any:
        """Return where the loss is in the output: ``output_loss_value_spec`` of a captured model, else None."""
        return self.staged.loss_spec

    @property
    def replicated_params(self) -> list[dict[int, str]]:
        """Return, for every parameter that several stages share, its name in each of them, by stage index.

        PiPPy's names of stages are accepted as keys, too: ``replicated_params[0]["submod_0"]``.
        """
        return list(map(ByStage, shared_parameters(self.staged.present_parts())))

    def info(self) -> PipeInfo:
        """Return the stages and the edges between them; ``print(pipe.info())`` draws them."""
        staged, pipeline = self.staged, self.staged.pipeline
        stages = []
        for part, stage in zip(staged.parts, pipeline.stages, strict=True):
            parameters = sum(parameter.numel() for parameter in part.parameters())
            stages.append(StageInfo(outermost(part, staged.module), parameters, stage.inputs, stage.outputs))
        return PipeInfo(tuple(stages), pipeline.outputs, pipeline.inputs, staged.has_loss)

    def print_readable(self) -> None:
        """Print what the stages do."""
        for stage in range(self.num_stages):
            print(self.staged.code(stage))

    def __len__(self) -> int:
        """Return the number of stages."""
        return len(self.staged.parts)

    def __getitem__(self, index: int) -> nn.Module:
        """Return the module of a stage (the layers of a sequential model). As in any sequence, -1 is the last."""
        return self.staged.present_parts()[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the modules of the stages."""
        return iter(self.staged.present_parts())

    @property
    def devices(self) -> tuple[torch.device | None, ...]:
        """Return the device of every stage; None for a stage that stays where the model was."""
        return self.staged.devices

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.parameters())
        where = "" if None in self.devices else f", devices={[str(device) for device in self.devices]}"
        return f"{type(self).__name__}({self.extra_repr()}{where}, parameters={parameters:,})"

    def extra_repr(self) -> str:
        """Return chunks, checkpoint mode and stages as text."""
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, {self.staged.extra_repr()}"

    def train(self, mode: bool = True) -> Pipe:
        """Switch all modules to training or evaluation mode. In evaluation no micro-batch is checkpointed.

        Args:
            mode: whether to train.
        """
        for module in (self.staged.module, *self.staged.parts):
            module.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        refuse_moves(itertools.chain(self.parameters(), self.buffers()), fn)
        return super()._apply(fn, recurse)

    def _recomputed(self, micro_batches: int) -> range:
        return recomputed(self.checkpoint, micro_batches) if self.training else range(0)


def _count(name: str, number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"Pipe: {name} must be a positive integer, got {number!r}")
    return number


def _refuse_a_pipe(function: str, module: object) -> None:
    if isinstance(module, Pipe):
        raise TypeError(
            f"{function}: the model must not be a Pipe, which is cut already: give the model it was made of"
        )


@explain_arguments(
    example_args="mb_args", example_kwargs="mb_kwargs", n_microbatches="chunks", num_microbatches="chunks"
)
def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    chunks: int = 1,
    checkpoint: str = "except_last",
    devices: Sequence[torch.device | str | int] | None = None,
    multi_use_param_spec: Spec = None,
    output_loss_value_spec: Any = None,
    dynamic_shapes: Any = None,
    opaque: Sequence[type[nn.Module] | str] = (),
) -> Pipe:
    """Capture a model and cut it into stages; return a :class:`pymoe.Pipe` that computes what the model computes.

    The model is cut where its code calls :func:`pymoe.pipe_split` (or the function of that name in
    ``torch.distributed.pipelining``), and where ``split_spec`` or ``split_policy`` say. Without a boundary there is one
    stage. Boundaries at the very beginning or end, or next to each other, make no additional stage. The model shares
    its parameters and buffers with the pipe; apart from moves to ``devices``, it is not changed.

    The model's Python code runs when the model is captured, not when the pipe runs. What the code reads is watched: if
    it has changed, the next call captures the model again. Modules with side effects are called uncut. Code that a
    graph cannot represent is refused. The page docs/tutorials/pipeline_any_model.md lists what is watched, called
    uncut, refused, or fixed at capture.

    Args:
        module: any model that can be captured by ``torch.export``.
        mb_args: example arguments for one micro-batch; sizes of at least 2 in every dimension that is to stay dynamic.
        mb_kwargs: example keyword arguments. Values that are not tensors, here and in ``mb_args``, are constants of the
            pipe: a call with another value (``pipe(x, k=2.0)`` after ``k=1.0``) raises ValueError. Pass such a value as
            a tensor, or make a pipe for each value.
        split_spec: maps the qualified name of a submodule to a :class:`SplitPoint`: a stage begins or ends there.
        split_policy: a function that adds boundaries to the captured graph (a ``torch.fx.GraphModule``) and returns the
            graph, such as :func:`pymoe.pipe.split_into_equal_parameters`. Your own can call
            :func:`pymoe.pipe.mark_boundary` or insert calls of ``pipe_split``.
        chunks: the number of micro-batches into which a mini-batch is cut, as in :class:`pymoe.Pipe`.
        checkpoint: the micro-batches that are run again for their backward, ``"always"``, ``"except_last"`` or
            ``"never"``, as in :class:`pymoe.Pipe`.
        devices: a device for every stage, to which its parameters and buffers are moved. None: they stay where they
            are.
        multi_use_param_spec: how stages that use the same parameter get it: a :class:`MultiUseParameterConfig`, or a
            dict of them by the parameter's qualified name. None: it is replicated on one device, and transmitted
            between devices.
        output_loss_value_spec: where the loss is in the output: a structure like the output, with True at the loss and
            False elsewhere; for a dictionary, the loss's key is enough: ``{"loss": True}``. ``step()`` then minimises
            this loss. It must be a mean over rows, unless ``step(reduction=...)`` says otherwise.
        dynamic_shapes: which dimensions are dynamic, as for ``torch.export.export``; by default every one that the
            model's code does not fix.
        opaque: modules, by type or qualified name, that are called uncut.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of its code.
        TypeError: an argument is of the wrong kind.
        ValueError: an argument does not fit the model.

    Warns:
        UserWarning: there is only one stage in spite of ``split_spec`` or ``split_policy``; the model was given to
            :func:`pymoe.pipe.annotate_split_points`, whose result was dropped; a module is called uncut because it
            changes its attributes; the model is captured again and again.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        >>> split = {"layers.2": pymoe.SplitPoint.BEGINNING}
        >>> pipe = pymoe.pipeline(model, (torch.randn(2, 5, 16),), split_spec=split, chunks=4)
        >>> pipe(torch.randn(8, 5, 16)).shape, pipe.num_stages
        (torch.Size([8, 5, 16]), 2)
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError("pipeline: split_spec or split_policy, not both")
    if split_policy is not None and not callable(split_policy):
        raise TypeError(
            f"pipeline: split_policy must be a function of the captured graph, such as "
            f"pymoe.pipe.split_into_equal_parameters(2) for two stages, got {split_policy!r}"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"pipeline: the model must be an nn.Module, got {type(module).__name__}")
    _refuse_a_pipe("pipeline", module)
    if not isinstance(mb_args, (tuple, list)):
        raise TypeError(
            f"pipeline: mb_args, the example of the model's arguments, must be a tuple, (x,) for a model that takes x; "
            f"got {type(mb_args).__name__}"
        )
    if was_annotated_in_vain(module) and split_spec is None and split_policy is None:
        warnings.warn(
            "pipeline: the model was given to annotate_split_points, which leaves it as it is and returns a marked "
            "copy, and that copy was dropped: capture what annotate_split_points returns",
            stacklevel=stack_level(),
        )
    if output_loss_value_spec is None and isinstance(module, LossWrapper):
        output_loss_value_spec = module.loss_spec
    trace = Trace(split_spec, split_policy, dynamic_shapes, opaque or ())
    arguments = tuple(mb_args), dict(mb_kwargs or {})
    staged = TracedModel(module, *arguments, trace, multi_use_param_spec, output_loss_value_spec, devices)
    if len(staged.parts) == 1 and (why := trace.why_one_stage()) is not None:
        warnings.warn(f"pipeline: the model is one stage: {why}", stacklevel=stack_level())
    return Pipe.of(staged, chunks, checkpoint)


# Warnings.


def warn_of_micro_batches(model: nn.Module) -> None:
    """Give a UserWarning, at the line of the user's code, for the first batch norm, or ``MoE`` with a capacity, whose
    results for a row depend on the other rows of its micro-batch.
    """
    for name, layer in model.named_modules():
        # Do not warn of a DeferredBatchNorm, which the user has chosen, or of a batch norm that normalises by running
        # statistics, as in evaluation mode.
        is_plain = isinstance(layer, BatchNormBase) and not isinstance(layer, DeferredBatchNorm)
        if is_plain and (layer.training or layer.running_mean is None):
            does = "normalises each micro-batch by itself"
            remedy = "take LayerNorm or GroupNorm; pymoe.pipe.convert_deferred_batch_norm(model) corrects the running "
            remedy += "statistics alone"
        elif has_capacity(layer):
            does, remedy = "may drop tokens past the capacity of each micro-batch", "take capacity_factor=None"
        else:
            continue
        warnings.warn(
            f"Pipe: {type(layer).__name__} {name!r} {does}, so outputs and gradients may not be those of the "
            f"whole mini-batch: {remedy}",
            UserWarning,
            stacklevel=stack_level(),
        )
        return


def warn_of_no_gain(schedule: Schedule, rows_are_few: bool, model: nn.Module | None) -> None:
    """Give a UserWarning, at the line of the user's code that calls the step, if no two stages can run at the same
    time. Give another if ``model`` itself has hooks, because a step does not call them.

    ``rows_are_few``: whether the mini-batch has fewer rows than the requested number of micro-batches. ``model``: None
    if there are no hooks to check.
    """
    stages, messages = schedule.stages, []
    if stages == 1:
        messages.append(
            "the pipe has one stage, so nothing runs at the same time: cut the model into more, by balance=[...] with "
            "the number of layers of each stage, or by more split points"
        )
    elif schedule.workers == 1:
        messages.append(
            f"the schedule {schedule.name!r} has one worker run all {stages} stages, so nothing runs at the same time: "
            "cut the model into more stages than a worker has, or take schedule='1f1b'"
        )
    elif schedule.micro_batches == 1:
        chunks = f"give the pipe, or the step, chunks={4 * stages}, say: several for each stage"
        remedy = "give it more rows" if rows_are_few else chunks
        messages.append(f"there is one micro-batch, so {stages} stages wait for each other: {remedy}")
    if model is not None and any(model.__dict__[kind] for kind in CALL_HOOKS):
        messages.append(
            "hooks of the model itself are not called, as they see whole mini-batches and a step has micro-batches "
            "alone: register them on its layers, or call the pipe, pipe(x)"
        )
    for message in messages:
        warnings.warn(f"Pipe.step: {message}", UserWarning, stacklevel=stack_level())
