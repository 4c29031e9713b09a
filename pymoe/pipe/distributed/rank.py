"""Runs the stages of a pipe that are in this process, one mini-batch after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pymoe.autograd import random_streams
from pymoe.pipe.distributed.messages import Key, Subject, describe_tensors, read_tensors
from pymoe.pipe.distributed.plan import Plan
from pymoe.pipe.distributed.rank_step import RankStep
from pymoe.pipe.distributed.tied import Tied
from pymoe.pipe.distributed.transport import Transport
from pymoe.pipe.distributed.watchdog import watching
from pymoe.pipe.execution.gradients import accumulate, total
from pymoe.pipe.execution.recompute import StageRecompute, recomputed
from pymoe.pipe.execution.shared_layers import turns_of
from pymoe.pipe.loss_graph import Words, check_mean_over_rows
from pymoe.pipe.staged import StagedModel
from pymoe.pipe.stages import Pipeline
from pymoe.pipe.traced.stage_module import StageModule

SCHEDULE = Words(
    "pymoe.pipe",
    "Let loss_fn divide a sum by that number for the whole mini-batch, and give the schedule scale_grads=False",
    "give the schedule scale_grads=False",
)


class Rank:
    """The stages of a pipe that were built in this process, and what they share."""

    def __init__(self, staged: StagedModel, checkpoint: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.staged = staged
        self._checkpoint = checkpoint
        self._devices: dict[int, torch.device] = {}
        self.rank = dist.get_rank(group)
        self.failure_detector = watching(group)
        self.transport = Transport(group, device)
        self.failure_detector.add(*self.transport.groups)
        self.step: RankStep | None = None
        self._plans: dict[tuple[int, tuple[int, ...]], _Planned] = {}
        self._copies_are_equal = False
        self._begun: set[int] = set()
        self._steps = 0

    def place(self, index: int, device: torch.device) -> None:
        """Add a stage to this rank. Its modules are moved to ``device``, and later what it takes."""
        self._devices[index] = device
        self._move(self.staged.pipeline, index)
        self._plans.clear()

    def _move(self, pipeline: Pipeline, index: int) -> None:
        for module in pipeline.stages[index].modules:
            module.to(self._devices[index])
            if isinstance(module, StageModule):
                module.update_model()

    def begin(self, stage: int) -> None:
        """Begin a step. Schedules say so for each of their stages."""
        if self._begun and stage not in self._begun:
            self._begun.add(stage)
            return
        self._begun = {stage}
        self._steps += 1
        self.step = None

    def open(self, rank_of: Sequence[int], count: int, graphs: bool, is_certain: bool) -> RankStep:
        """Begin the forwards of a step of ``count`` micro-batches, after which there will be backwards if ``graphs``.

        ``rank_of``: the rank of every stage. ``is_certain``: ``count`` is known, rather than guessed from several
        schedules.
        """
        random_streams.install()
        self.failure_detector.begin()
        planned = self._plan(tuple(rank_of))
        if not self._copies_are_equal:
            self._make_copies_equal(planned.tied)
        if is_certain:
            for peer, messages in planned.plan.messages(count, graphs).items():
                self.transport.expect(peer, messages)
        planned.find_shared_state()
        training = [self.staged.parts[stage].training for stage in planned.plan.stages]
        in_backward = recomputed(self._checkpoint, count) if any(training) and graphs else range(0)
        self.step = RankStep(
            planned.plan, planned.tied, self.transport, self._steps, graphs, planned.recompute, in_backward, count
        )
        return self.step

    def reduce(self, stage: int, is_mean: bool, module: nn.Module) -> None:
        """Sum the gradients of a stage whose backwards have run. After the rank's last one, add them to ``.grad``.

        ``is_mean``: the loss of a micro-batch is a mean over its rows rather than a sum. ``module``: that of the stage;
        a ``DistributedDataParallel`` around it averages the gradients that are added.

        Raises:
            ValueError: losses are seen not to be means over rows, and ``is_mean`` says so.
        """
        step = self.step
        assert step is not None
        if is_mean and stage == len(step.plan.rank_of) - 1:
            read = sorted(step.readings)
            check_mean_over_rows([step.readings[one] for one in read], [step.rows[one] for one in read], SCHEDULE)
        rows = sum(step.rows.values())
        weight_of = {size: size / rows if is_mean and rows else 1.0 for size in step.rows.values()}
        leaves, grads = step.totals[stage] = step.sums[stage].total(weight_of)
        by_leaf = {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True)}
        for (own, rank), shared in step.tied.sent.items():
            if own == stage:
                sums = [by_leaf.get(id(step.tied.of(stage, one))) for one in shared]
                step.send(rank, Subject.TIED_GRADIENTS, stage, 0, *describe_tensors(sums))
        if isinstance(module, DistributedDataParallel):
            step.replicated.append(module)
        if len(step.totals) == len(step.plan.stages):
            self._add_up(step, weight_of)
            self.finish(step)

    def _add_up(self, step: RankStep, weight_of: dict[int, float]) -> None:
        found, step.totals = step.totals, {}
        for stage, shared in step.tied.received.items():
            message = step.receive(step.plan.rank_of[stage], Subject.TIED_GRADIENTS, stage, 0)
            grads = read_tensors(message.described, message.tensors)
            pairs = [(step.tied.own(one), grad) for one, grad in zip(shared, grads, strict=True) if grad is not None]
            found[stage] = [parameter for parameter, _ in pairs], [grad for _, grad in pairs]
        tensors, totals = total((*found.pop(stage), 1.0) for stage in sorted(found))
        sums: list[torch.Tensor | None] = [grad.to(leaf.device) for leaf, grad in zip(tensors, totals, strict=True)]
        totals.clear()
        for micro_batch, inputs in step.inputs.items():
            weight = weight_of[step.rows[micro_batch]]
            tensors += inputs.tensors
            sums += [None if grad is None else grad * weight for grad in inputs.grads]
        for module in step.replicated:
            module.reducer.prepare_for_backward([])
        accumulate(tensors, sums)

    def finish(self, step: RankStep) -> None:
        """End a step."""
        self.step = None
        step.advance_generator()
        self.transport.flush()
        self.failure_detector.end()

    def _plan(self, rank_of: tuple[int, ...]) -> _Planned:
        pipeline = self.staged.pipeline
        key = id(pipeline), rank_of
        found = self._plans.get(key)
        if found is None or found.made_for is not pipeline:
            for index in self._devices:  # layers may have been replaced
                self._move(pipeline, index)
            stages = [
                replace(stage, device=self._devices[number]) if number in self._devices else stage
                for number, stage in enumerate(pipeline.stages)
            ]
            plan = Plan(Pipeline(tuple(stages), pipeline.inputs, pipeline.outputs), rank_of, self.rank)
            recompute = [StageRecompute(stage.modules) for stage in stages]
            self._compare(plan)
            found = self._plans[key] = _Planned(pipeline, plan, Tied(self.staged.parts, rank_of, self.rank), recompute)
            self._copies_are_equal = False
        elif not found.tied.holds():
            found = self._plans[key] = found._replace(tied=Tied(self.staged.parts, rank_of, self.rank))
            self._copies_are_equal = False
        return found

    def _compare(self, plan: Plan) -> None:
        """Raise ValueError unless the ranks that make a plan in this step have cut the same model in the same way."""
        stages = plan.pipeline.stages
        modules = [[name for name, _ in part.named_modules()] for part in self.staged.parts]
        parameters = [[name for name, _ in part.named_parameters()] for part in self.staged.parts]
        edges = [(stage.inputs, stage.outputs) for stage in stages], plan.pipeline.inputs, plan.pipeline.outputs
        whole = repr((plan.rank_of, modules, parameters, edges))
        mine = hashlib.sha256(whole.encode()).digest(), list(map(len, modules)), self.rank
        first = self.failure_detector.first(f"cut {self.transport.tag} {self._steps}", mine)
        if first is not None and first[0] != mine[0]:
            raise ValueError(
                f"build_stage: every process must make the same pipe, of the same model and cut in the same way, got "
                f"stages of {mine[1]} modules on rank {self.rank} and of {first[1]} on rank {first[2]}"
                + (", and they differ in names or edges" if first[1] == mine[1] else "")
            )

    def _make_copies_equal(self, tied: Tied) -> None:
        """Copy shared parameters from the rank of their first stage to the others."""
        key = Key(self._steps, Subject.COPY, 0, 0)
        for rank, shared in tied.copied_to.items():
            self.transport.send(rank, key, *describe_tensors([tied.own(one).detach() for one in shared]))
        with torch.no_grad():
            for rank, shared in tied.copied_from.items():
                message = self.transport.receive(rank, key)
                for one, tensor in zip(shared, message.tensors, strict=True):
                    tied.own(one).copy_(tensor)
        self.transport.flush()
        self._copies_are_equal = True


class _Planned(NamedTuple):
    """How a pipeline runs on these ranks. A model may have a pipeline for training and one for evaluation."""

    made_for: Pipeline
    plan: Plan
    tied: Tied
    recompute: list[StageRecompute]

    def find_shared_state(self) -> None:
        """Begin a step, in which no forward may write to what several stages share: ranks have copies of it."""
        found = turns_of(
            [stage.held.look().layout for stage in self.recompute], [stage.turns for stage in self.recompute]
        )
        for stage, turns in zip(self.recompute, found, strict=True):
            stage.turns = turns
        for turns in {turns for turns in found if turns is not None}:
            turns.begin_step(())


_ranks: WeakKeyDictionary[nn.Module, dict[dist.ProcessGroup, Rank]] = WeakKeyDictionary()


def rank_of_pipe(pipe: Any, group: dist.ProcessGroup, device: torch.device) -> Rank:
    """Return the rank that all stages of a pipe which are built for a group share."""
    ranks = _ranks.setdefault(pipe, {})
    if group not in ranks:
        ranks[group] = Rank(pipe.staged, pipe.checkpoint, group, device)
    return ranks[group]
