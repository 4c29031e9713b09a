"""A pipeline over processes, and several such pipelines that share the rows of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lm.config import Config
from lm.data import Batches
from lm.trainer import make_optimizer
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from pymoe.nn import update_expert_biases
from pymoe.pipe import Pipe
from pymoe.pipe.distributed import watching

from .layers import balance, layers
from .run import cross_entropy


class Place:
    """Where this process is: which stage of which pipeline."""

    def __init__(self, replicas: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.replicas, self.stages = replicas, world // replicas
        self.replica, self.stage = divmod(rank, self.stages)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        pipelines = [list(range(first, first + self.stages)) for first in range(0, world, self.stages)]
        twins = [list(range(stage, world, self.stages)) for stage in range(self.stages)]
        self.pipeline, _ = dist.new_subgroups_by_enumeration(pipelines)
        self.twins, _ = dist.new_subgroups_by_enumeration(twins)  # who has the same stage


class Announced(nn.Module):
    """A stage for DistributedDataParallel, which averages gradients in a backward pass that a forward has announced.

    The forward here does nothing else: a schedule runs forwards and backwards by itself, and gradients reach the
    parameters at the end of its step.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self) -> None:
        """A backward pass will come."""


class Trained:
    """What one process does for the training of a model."""

    def __init__(self, config: Config, place: Place, micro_batches: int, schedule: str) -> None:
        torch.manual_seed(config.seed)
        model = layers(config).double()
        pipe = Pipe(model, balance=balance(len(model), place.stages), checkpoint="never")
        stage = pipe.build_stage(place.stage, "cpu", place.pipeline)
        self.config, self.place = config, place
        self.part = pipe[place.stage]
        self.counted_elsewhere = {id(p) for earlier in list(pipe)[: place.stage] for p in earlier.parameters()}
        self.schedule = getattr(schedules, schedule)(stage, micro_batches, loss_fn=cross_entropy)
        self.watch = watching(place.pipeline)
        self.parallel = None
        if place.replicas > 1:
            self.watch.add(place.twins)
            self.parallel = DistributedDataParallel(Announced(self.part), process_group=place.twins)
        self.optimizer = make_optimizer(self.part, config)
        self.losses: list[Tensor] = []

    def step(self, number: int, batches: Batches) -> None:
        """One optimizer step."""
        place = self.place
        inputs, targets = (rows.chunk(place.replicas)[place.replica] for rows in batches.batch(number))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(number)
        losses: list[Tensor] = []
        with self.watch:  # a process that fails here ends the others
            if self.parallel is not None:
                self.parallel()
            arguments = [inputs] if place.is_first else []
            keywords = {"target": targets, "losses": losses} if place.is_last else {}
            self.schedule.step(*arguments, **keywords, return_outputs=False)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        update_expert_biases(self.part, place.twins)
        if place.is_last:
            self.losses.append(torch.stack(losses).detach().mean())

    def clip(self) -> None:
        """By the norm of the gradients of all stages, in which a shared parameter counts once."""
        parameters = [p for p in self.part.parameters() if p.grad is not None]
        own = [p.grad.square().sum() for p in parameters if p.grad is not None and id(p) not in self.counted_elsewhere]
        total = torch.stack([*own, torch.zeros((), dtype=torch.float64)]).sum()
        dist.all_reduce(total, group=self.place.pipeline)
        nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, total.sqrt())

    def all_losses(self) -> list[float]:
        """Of all steps, means over the replicas, in every process."""
        place = self.place
        found = torch.stack(self.losses) if place.is_last else torch.zeros(0, dtype=torch.float64)
        if place.is_last:
            dist.all_reduce(found, group=place.twins)
        shared: list[list[float]] = [(found / place.replicas).tolist()]
        dist.broadcast_object_list(shared, src=place.stages - 1)
        return shared[0]
