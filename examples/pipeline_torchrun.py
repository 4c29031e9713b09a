"""Trains the language model of train_lm.py in a pipeline over processes, and compares it with one process.

    torchrun --nproc-per-node 2 examples/pipeline_torchrun.py
    torchrun --nproc-per-node 4 examples/pipeline_torchrun.py                   # four stages
    torchrun --nproc-per-node 4 examples/pipeline_torchrun.py --replicas 2      # two pipelines of two stages, and DDP

The schedule is one of torch.distributed.pipelining, over gloo. MoE layers in all stages have auxiliary losses and
expert biases, and the head shares its weight with the embedding in another process. Before it joins the others, the
first process trains the model alone; the losses must be equal, otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from byte_lm import Config, make_optimizer
from common import Batches, at_least, load_text, parser_of, tell_losses
from pipeline_moe_lm import Plain, balance, cross_entropy, layers
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from pymoe.nn import update_expert_biases
from pymoe.pipe import Pipe
from pymoe.pipe.distributed import watching


class Place:
    """The position of this process: its pipeline and its stage."""

    def __init__(self, replicas: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.replicas, self.stages = replicas, world // replicas
        self.replica, self.stage = divmod(rank, self.stages)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        pipelines = [list(range(first, first + self.stages)) for first in range(0, world, self.stages)]
        twins = [list(range(stage, world, self.stages)) for stage in range(self.stages)]
        self.pipeline, _ = dist.new_subgroups_by_enumeration(pipelines)
        self.twins, _ = dist.new_subgroups_by_enumeration(twins)  # the ranks with the same stage


class Announced(nn.Module):
    """Wraps a stage for DistributedDataParallel, which averages gradients only after a call of its forward.

    So this forward does nothing: the schedule runs the real forwards and backwards, and gradients reach the parameters
    at the end of a step.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self) -> None:
        """Tell DistributedDataParallel that a backward pass will follow."""


class Trained:
    """Trains the stage of this process."""

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
        """Make one optimizer step."""
        place = self.place
        inputs, targets = (rows.chunk(place.replicas)[place.replica] for rows in batches.batch(number))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(number)
        losses: list[Tensor] = []
        with self.watch:  # if this process fails here, the others end, too
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
        """Clip gradients by the norm over all stages; a shared parameter counts once."""
        parameters = [p for p in self.part.parameters() if p.grad is not None]
        own = [p.grad.square().sum() for p in parameters if p.grad is not None and id(p) not in self.counted_elsewhere]
        total = torch.stack([*own, torch.zeros((), dtype=torch.float64)]).sum()
        dist.all_reduce(total, group=self.place.pipeline)
        nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, total.sqrt())

    def all_losses(self) -> list[float]:
        """Return the losses of all steps, averaged over the replicas, on every process."""
        place = self.place
        found = torch.stack(self.losses) if place.is_last else torch.zeros(0, dtype=torch.float64)
        if place.is_last:
            dist.all_reduce(found, group=place.twins)
        shared: list[list[float]] = [(found / place.replicas).tolist()]
        dist.broadcast_object_list(shared, src=place.stages - 1)
        return shared[0]


TOLERANCE = 1e-10  # nats per byte, in float64


def main(argv: list[str]) -> int:
    """Train; return 0 if the losses equal those of one process."""
    options = parse(argv)
    torch.set_num_threads(1)
    micro_batches = options.replicas * options.micro_batches
    config = Config(
        width=options.width,
        ffn_size=2 * options.width,
        context=options.context,
        batch_size=micro_batches * options.rows,
        steps=options.steps,
        warmup=max(1, options.steps // 5),
        bias_update_rate=0.001,
        seed=options.seed,
    )
    data = load_text(options.text, config.context).train
    batches = Batches(data, config.context, config.batch_size, config.seed)
    alone: list[float] = []
    if int(os.environ["RANK"]) == 0:
        plain = Plain(config, micro_batches, torch.float64)
        for _ in range(options.steps):
            plain.step(batches)
        alone = plain.history.loss
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    try:
        place = Place(options.replicas)
        trained = Trained(config, place, options.micro_batches, options.schedule)
        for step in range(options.steps):
            trained.step(step, batches)
        losses = trained.all_losses()
        return report(options, alone, losses) if dist.get_rank() == 0 else 0
    finally:
        dist.destroy_process_group()


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    number = at_least(1)
    parser.add_argument("--replicas", type=number, default=1, metavar="R", help="pipelines side by side (default: 1)")
    parser.add_argument(
        "--schedule", choices=("Schedule1F1B", "ScheduleGPipe"), default="Schedule1F1B", help="(default: Schedule1F1B)"
    )
    parser.add_argument("--micro-batches", type=number, default=4, metavar="M", help="of a replica (default: 4)")
    parser.add_argument("--rows", type=number, default=2, metavar="N", help="windows of a micro-batch (default: 2)")
    parser.add_argument("--steps", type=number, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--width", type=at_least(8), default=64, metavar="H", help="of the model (default: 64)")
    parser.add_argument("--context", type=at_least(2), default=64, metavar="C", help="bytes of a window (default: 64)")
    parser.add_argument("--text", default="", metavar="FILE", help="to train on (default: the Python manual)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 (or more)")
    world = int(os.environ["WORLD_SIZE"])
    if world % options.replicas or world == options.replicas:
        parser.error(f"{world} processes are no {options.replicas} pipelines of two stages or more")
    if world // options.replicas > Config().layers + 2:
        parser.error(f"a pipeline can have {Config().layers + 2} stages at most, the number of layers")
    if options.micro_batches < world // options.replicas:
        parser.error(f"--micro-batches must be at least {world // options.replicas}, the number of stages")
    return options


def report(options: argparse.Namespace, alone: list[float], losses: list[float]) -> int:
    """Print the losses of both runs; return the exit status."""
    stages = int(os.environ["WORLD_SIZE"]) // options.replicas
    print(f"\n{options.replicas} x {stages} processes, {options.schedule}, float64")
    return tell_losses(alone, losses, "pipeline", TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
