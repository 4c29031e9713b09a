"""``Pipe``: a model whose stages work at the same time, each on another micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pymoe.pipe.deferred_batch_norm import convert_deferred_batch_norm
from pymoe.pipe.devices import place, refuse_moves
from pymoe.pipe.execution.checkpoint import Checkpoints
from pymoe.pipe.execution.forward import run_forward, run_in_one_graph
from pymoe.pipe.execution.plan import Plan, Timed
from pymoe.pipe.execution.run import Run
from pymoe.pipe.execution.step import Losses, run_step
from pymoe.pipe.execution.turns import turns_of
from pymoe.pipe.execution.workers import Workers
from pymoe.pipe.loss import with_loss
from pymoe.pipe.micro_batches import MicroBatches, join, split
from pymoe.pipe.schedules import Kind, Record, Schedule, as_run, build
from pymoe.pipe.sequential import cut, sequential_pipeline
from pymoe.pipe.stages import Pipeline
from pymoe.runtime.left_to_python import left_to_python
from pymoe.runtime.parallel import random_streams
from pymoe.runtime.parallel.isolated import graphs_are_made
from pymoe.runtime.parallel.together import functorch_is_active

__all__ = ["Pipe"]

CHECKPOINT = ("always", "except_last", "never")
ALL, FORWARD, BACKWARD = frozenset(Kind), frozenset({Kind.FORWARD}), frozenset({Kind.BACKWARD})
REMEMBERED = 64  # schedules, and plans made of them


class Pipe(nn.Module):
    """A sequential model, cut into stages that work at the same time, each on another micro-batch.

    ::

        model = nn.Sequential(*layers)
        pipe = Pipe(model, chunks=8, balance=[3, 4])
        losses = pipe.step(x, target=y, loss_fn=nn.functional.cross_entropy)    # forward and backward in the pipeline
        optimizer.step()

    Parameters stay those of the model (optimizers, ``state_dict`` keys and hooks know no pipe), and so do gradients:
    those of ``loss_fn(model(x), y).backward()`` for a loss that is a mean over rows, but for layers that look at a
    batch as a whole (a batch norm sees micro-batches) and random numbers (every micro-batch draws from its own stream
    in every stage: results depend on the seed, never on threads).

    Args:
        module: the model. Its layers may be ``@skippable`` (:mod:`pymoe.pipe.skip`) and share parameters.
        chunks: into how many micro-batches a mini-batch is cut, along dimension 0. Sizes differ by one at most; of
            fewer rows there are fewer micro-batches.
        checkpoint: which micro-batches of a training pass keep their inputs alone and are run again for their
            backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"`` none. In evaluation none is.
        deferred_batch_norm: replace the model's batch norms by such as keep the statistics of mini-batches.
        balance: the number of layers of every stage; see :mod:`pymoe.pipe.balance`. None: every layer is a stage.
        devices: a device for every stage, to which its layers are moved. None: they stay where they are.

    Every stage has a persistent thread (the first that of the caller), which runs in the caller's state: grad mode,
    autocast, inference mode, context variables, profiler. A stage's layers run for one micro-batch after the other.
    Values between layers are tensors, nested structures of them, or anything.

    Raises:
        TypeError: the model is no ``nn.Sequential``; skips do not match; an argument is of the wrong kind.
        ValueError: an argument does not fit the model.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: Sequence[int] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
    ) -> None:
        super().__init__()
        self.chunks = _count("chunks", chunks)
        if checkpoint not in CHECKPOINT:
            raise ValueError(f"Pipe: checkpoint must be one of {', '.join(CHECKPOINT)}, got {checkpoint!r}")
        self.checkpoint = checkpoint
        if deferred_batch_norm and isinstance(module, nn.Sequential):
            module = convert_deferred_batch_norm(module)
        self._parts = tuple(cut(module, balance))
        self.devices = tuple(place(self._parts, devices))
        self._pipeline = sequential_pipeline(module, self._parts, self.devices)
        self._checkpoints = tuple(
            [Checkpoints(stage.modules, turns_of(stage.function)) for stage in self._pipeline.stages]
        )
        self._workers = Workers()
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._plans: dict[tuple[int, frozenset[Kind]], Plan] = {}
        self._last: tuple[Schedule, list[Timed]] | None = None
        self._modules.update(module._modules)  # under the model's names, whatever attributes a pipe has
        self.training = module.training

    @left_to_python
    def forward(self, input: Any) -> Any:
        """The model's output, from which ``loss.backward()`` can start.

        All micro-batches go forward now, and backward when autograd asks for it. Their outputs are put together along
        dimension 0. Inside ``torch.func`` transforms stages run one after the other.

        Args:
            input: a tensor or any nested structure; its tensors have the rows of the mini-batch in dimension 0.
                :class:`pymoe.pipe.Whole` keeps one from being cut.

        Raises:
            ValueError: tensors have different numbers of rows; outputs of micro-batches cannot be put together.
            BaseException: what a stage raised first, with a note of stage and micro-batch.
        """
        micro_batches = split([input], self.chunks)
        if functorch_is_active():
            return join([values[0] for values in run_in_one_graph(self._pipeline, micro_batches)])
        run = self._run(self._pipeline, micro_batches, graphs_are_made())
        schedule = self._schedule("gpipe", len(micro_batches.rows))
        outputs = run_forward(
            run,
            lambda run: self._perform(run, schedule, FORWARD),
            lambda run: self._perform(run, schedule, BACKWARD),
        )
        return join([values[0] for values in outputs])

    @left_to_python
    def step(
        self,
        *inputs: Any,
        target: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        schedule: str | Schedule = "1f1b",
        chunks: int | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Forward, loss and backward in the pipeline; gradients are added to ``.grad`` as ``loss.backward()`` would.

        Micro-batches count by their rows, so uneven ones leave the gradients of the whole mini-batch. Gradients
        accumulate over steps until they are zeroed. Hooks of parameters are called once a step, with the sum. If
        anything fails no gradient is added. With gradients off (``torch.no_grad``) losses are computed, and no more.

        Args:
            inputs: what the model takes; tensors have the rows of the mini-batch in dimension 0.
            target: cut like the inputs; None: ``loss_fn`` takes the output alone.
            loss_fn: ``loss_fn(output, target)`` of a micro-batch, a tensor with one element. It runs in the last stage;
                a module's parameters get gradients, too. None: the model's output is the loss.
            schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved-1f1b"``, ``"zero-bubble"``, ``"zero-bubble-greedy"``, any
                other registered name, or a :class:`pymoe.pipe.schedules.Schedule` of as many stages and micro-batches.
            chunks: other than the pipe's own.
            reduction: what ``loss_fn`` does with rows: ``"mean"`` or ``"sum"``.

        Returns:
            (micro-batches,): the loss of each, detached.

        Raises:
            TypeError: the number of inputs is wrong.
            ValueError: an argument is out of range, or tensors have different numbers of rows.
            RuntimeError: the loss does not require gradients.
            BaseException: what a stage raised first, with a note of stage and micro-batch.
        """
        if len(inputs) != self._pipeline.inputs:
            raise TypeError(f"Pipe.step: the model takes {self._pipeline.inputs} inputs, got {len(inputs)}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"Pipe.step: reduction must be 'mean' or 'sum', got {reduction!r}")
        has_target = target is not None
        values = (*inputs, target) if has_target else inputs
        micro_batches = split(values, self.chunks if chunks is None else _count("chunks", chunks))
        count, graphs = len(micro_batches.rows), graphs_are_made()
        planned = self._schedule(schedule, count)
        losses = Losses(micro_batches.weights if reduction == "mean" else [1.0] * count, graphs)
        pipeline = with_loss(self._pipeline, loss_fn, has_target, lambda values: values[0])
        run = self._run(pipeline, micro_batches, graphs, losses.arrive)
        run_step(run, lambda run: self._perform(run, planned, ALL if graphs else FORWARD))
        return losses.all()

    @property
    def last_run(self) -> Record | None:
        """When every action of the last :meth:`step`, forward or backward pass started and ended; None before."""
        return None if self._last is None else as_run(*self._last)

    def __len__(self) -> int:
        """The number of stages."""
        return len(self._parts)

    def __getitem__(self, index: int) -> nn.Sequential:
        """The layers of a stage."""
        return self._parts[index]

    def __iter__(self) -> Iterator[nn.Sequential]:
        """The layers of every stage."""
        return iter(self._parts)

    def train(self, mode: bool = True) -> Pipe:
        """As of any module."""
        for part, checkpoints in zip(self._parts, self._checkpoints, strict=True):
            part.training = mode
            checkpoints.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        refuse_moves(itertools.chain(self.parameters(), self.buffers()), fn)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has plans of its own (and threads, as ``Workers`` see to)."""
        return {**self.__dict__, "_plans": {}, "_last": None}

    def extra_repr(self) -> str:
        """Chunks, checkpointing and layers of the stages."""
        balance = [len(part) for part in self._parts]
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, balance={balance}"

    def _run(self, pipeline: Pipeline, micro_batches: MicroBatches, graphs: bool, on_output: Any = None) -> Run:
        random_streams.install()
        count = len(micro_batches.rows)
        checkpointed = {"always": count, "except_last": count - 1, "never": 0}[self.checkpoint] if self.training else 0
        return Run(
            pipeline,
            micro_batches,
            graphs=graphs,
            checkpoints=self._checkpoints,
            checkpointed=range(checkpointed),
            on_output=on_output,
        )

    def _schedule(self, schedule: str | Schedule, micro_batches: int) -> Schedule:
        stages = len(self._pipeline.stages)
        if isinstance(schedule, str):
            key = schedule, micro_batches
            if (built := self._schedules.get(key)) is None:
                built = build(schedule, stages, micro_batches)
                _remember(self._schedules, key, built)
            return built
        if (schedule.stages, schedule.micro_batches) != (stages, micro_batches):
            raise ValueError(
                f"Pipe.step: the schedule is for {schedule.stages} stages and {schedule.micro_batches} micro-batches, "
                f"there are {stages} and {micro_batches}"
            )
        return schedule

    def _perform(self, run: Run, schedule: Schedule, kinds: frozenset[Kind]) -> None:
        key = id(schedule), kinds
        plan = self._plans.get(key)
        if plan is None or plan.schedule is not schedule:
            plan = Plan(schedule, kinds)
            _remember(self._plans, key, plan)
        # On a thread of autograd's own for a device the stages could not get at that device's nodes.
        here = kinds is BACKWARD and not run.is_on_host
        self._last = schedule, self._workers.run(plan, run.perform, here=here)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to ``known``, and forgets what is oldest."""
    while len(known) >= REMEMBERED:
        known.pop(next(iter(list(known))), None)
    known[key] = value


def _count(name: str, number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"Pipe: {name} must be an integer from 1 up, got {number!r}")
    return number
