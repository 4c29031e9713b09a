"""Trains the language model of train_lm.py with experts spread over processes, and compares it with one process.

    torchrun --nproc-per-node 2 examples/expert_parallel_lm.py                       # experts over two processes
    torchrun --nproc-per-node 4 examples/expert_parallel_lm.py --ep 2                # two groups of two, and DDP
    torchrun --nproc-per-node 4 examples/expert_parallel_lm.py --ep 2 --kind fsdp    # ..., and FSDP
    torchrun --nproc-per-node 4 examples/expert_parallel_lm.py --save runs/spread    # a checkpoint at the end
    torchrun --nproc-per-node 2 examples/expert_parallel_lm.py --resume runs/spread  # continue on fewer processes
    torchrun --nproc-per-node 4 examples/expert_parallel_lm.py --move 3 --clones 1   # hot experts: moved, and cloned

Each process has its share of every batch. Layers have a shared expert and expert biases. Before it joins the others,
the first process trains the model alone; the losses must be equal, otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_lm import Config, LanguageModel, make_optimizer
from common import Batches, at_least, load_text, parser_of, tell_losses
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from pymoe import ep
from pymoe.ep.placement import place
from pymoe.nn import update_expert_biases

TOLERANCE = 1e-9  # nats per byte, in float64


class Trained:
    """A model, its optimizer, and its training step."""

    def __init__(self, config: Config, options: argparse.Namespace | None = None) -> None:
        """Prepare a run in one process or, with ``options``, a run that is spread over all processes."""
        torch.manual_seed(config.seed)
        self.config, self.model = config, LanguageModel(config).double()
        self.called: nn.Module = self.model
        if options is not None:
            world = dist.get_world_size()
            mesh = init_device_mesh("cpu", (world // options.ep, options.ep), mesh_dim_names=("edp", "ep"))
            ep.shard(self.model, mesh["ep"], chunks=options.chunks, clones=options.clones, min_rows_to_clone=1)
            blocks = {"blocks": list(self.model.blocks)} if options.kind == "fsdp" else {}
            self.called = ep.data_parallel(self.model, mesh, kind=options.kind, **blocks)
        # If some parameters are DTensors and others are not, AdamW must update them one by one.
        self.optimizer = make_optimizer(self.model, config, fused=False, foreach=False)

    def step(self, number: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Make one optimizer step; return the loss of these rows."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(number)
        loss = F.cross_entropy(self.called(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        ep.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        update_expert_biases(self.model)
        return loss.detach()

    def move_experts(self, ranks: int) -> None:
        """Place experts by their loads in the last step, summed over all processes."""
        placements = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, ep.ShardedMoE):
                load = layer.stats.load
                dist.all_reduce(load)
                placements[name] = place(load, ranks)
        ep.redistribute(self.model, placements, self.optimizer)

    def state(self, steps: int) -> dict[str, Any]:
        """Return the contents of a checkpoint, with whole parameters under the model's names on any number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": steps}

    def load(self, folder: str) -> None:
        """Continue from a checkpoint, which any number of processes may have saved."""
        state = self.state(0)
        dcp.load(state, checkpoint_id=folder)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def main(argv: list[str]) -> int:
    """Train; return 0 if the losses equal those of one process."""
    options = parse(argv)
    torch.set_num_threads(1)
    config = Config(
        width=options.width,
        ffn_size=2 * options.width,
        context=options.context,
        batch_size=options.batch,
        steps=options.planned,
        warmup=max(1, options.planned // 5),
        shared_experts=1,
        aux_loss_coef=0.0,  # the biases balance
        bias_update_rate=0.001,
        seed=options.seed,
    )
    data = load_text(options.text, config.context).train
    batches = Batches(data, config.context, config.batch_size, config.seed)
    steps = range(first := steps_in(options.resume), first + options.steps)
    alone: list[float] = []
    if int(os.environ["RANK"]) == 0:  # before the group exists, since biases would be updated over it
        one = Trained(config)
        alone = [one.step(number, *batches.batch(number)).item() for number in range(steps.stop)][first:]
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    try:
        spread = Trained(config, options)
        if options.resume:
            spread.load(options.resume)
        losses = []
        for number in steps:
            losses.append(share_of_step(spread, number, batches))
            if options.move and number % options.move == 0:
                spread.move_experts(options.ep)
        if options.save:
            dcp.save(spread.state(steps.stop), checkpoint_id=options.save)
        return report(options, steps, alone, losses) if dist.get_rank() == 0 else 0
    finally:
        dist.destroy_process_group()


def share_of_step(spread: Trained, number: int, batches: Batches) -> float:
    """Train on this process's share of a batch; return the mean loss of all processes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    loss = spread.step(number, *(rows.chunk(world)[rank] for rows in batches.batch(number)))
    dist.all_reduce(loss)
    return loss.item() / world


def steps_in(folder: str) -> int:
    """Return the number of steps in a checkpoint; 0 without one."""
    state = {"steps": 0}
    if folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns in a process without a group
            dcp.load(state, checkpoint_id=folder, no_dist=True)
    return int(state["steps"])


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    number = at_least(1)
    parser.add_argument("--ep", type=number, metavar="R", help="processes that share experts (default: all)")
    parser.add_argument("--kind", choices=("ddp", "fsdp"), default="ddp", help="what averages gradients (default: ddp)")
    parser.add_argument("--chunks", type=number, default=2, metavar="N", help="exchanges of a layer (default: 2)")
    parser.add_argument("--clones", type=at_least(0), default=0, metavar="N", help="of hot experts, a process")
    parser.add_argument("--move", type=number, metavar="N", help="steps after which experts move to even processes")
    parser.add_argument("--save", default="", metavar="FOLDER", help="where to leave a checkpoint")
    parser.add_argument("--resume", default="", metavar="FOLDER", help="a checkpoint to go on from")
    parser.add_argument("--steps", type=number, default=10, metavar="N", help="to make now (default: 10)")
    parser.add_argument("--planned", type=number, default=20, metavar="N", help="of all runs together (default: 20)")
    parser.add_argument("--batch", type=number, default=8, metavar="N", help="windows of a batch (default: 8)")
    parser.add_argument("--width", type=at_least(8), default=64, metavar="H", help="of the model (default: 64)")
    parser.add_argument("--context", type=at_least(2), default=64, metavar="C", help="bytes of a window (default: 64)")
    parser.add_argument("--text", default="", metavar="FILE", help="to train on (default: the Python manual)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 (or more)")
    world = int(os.environ["WORLD_SIZE"])
    options.ep = options.ep or world
    if world % options.ep:
        parser.error(f"{world} processes are no groups of {options.ep}")
    if options.batch % world:
        parser.error(f"a batch of {options.batch} windows has no equal shares for {world} processes")
    return options


def report(options: argparse.Namespace, steps: range, alone: list[float], losses: list[float]) -> int:
    """Print the losses of both runs; return the exit status."""
    groups = int(os.environ["WORLD_SIZE"]) // options.ep
    print(f"\n{groups} x {options.ep} processes, {options.kind}, float64")
    return tell_losses(alone, losses, "spread", TOLERANCE, steps.start + 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
