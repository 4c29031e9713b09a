"""The command line of pipeline_torchrun.py."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lm.command import at_least, parser_of, tell
from lm.config import Config
from lm.data import Batches, load_text

from .replicas import Place, Trained
from .run import Plain

TOLERANCE = 1e-10  # nats per byte, in float64


def main(argv: list[str], description: str) -> int:
    """Train; 0 if the losses are those of the one process."""
    options = parse(argv, description)
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


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options."""
    parser = parser_of(description)
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
    """Prints the losses beside each other; the exit status."""
    stages = int(os.environ["WORLD_SIZE"]) // options.replicas
    print(f"\n{options.replicas} x {stages} processes, {options.schedule}, float64")
    print("        loss: one process  pipeline   difference")
    for step, (one, other) in enumerate(zip(alone, losses, strict=True)):
        print(f"step {step + 1:3d}       {one:10.6f} {other:10.6f}   {abs(one - other):8.1e}")
    apart = max(abs(one - other) for one, other in zip(alone, losses, strict=True))
    print()
    return tell(
        {
            f"losses differ by at most {apart:.1e} nats (allowed: {TOLERANCE:g})": apart <= TOLERANCE,
            f"the model learns: {losses[0]:.2f} nats at first, {losses[-1]:.2f} in the end": losses[-1] < losses[0],
        }
    )
