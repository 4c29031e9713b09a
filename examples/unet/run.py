"""Training steps of the same network on the same micro-batches: by a plain loop, and by pipelines."""

from __future__ import annotations

import time
from argparse import Namespace

import torch
import torch.nn.functional as F
from pipelined.history import History
from torch import Tensor, nn

from pymoe.pipe import Pipe
from pymoe.pipe.balance import balance_by_time, profile_sizes
from pymoe.pipe.schedules import Record, build, mean_times, simulate

from .data import Pictures
from .model import unet


class Run:
    """A network and its optimizer; how gradients are made is what subclasses differ in."""

    name = "plain loop"

    def __init__(self, options: Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(options.seed)
        self.options, self.dtype = options, dtype
        self.model = unet(options.width, options.levels).to(dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate)
        self.history = History()

    def gradients(self, pictures: Tensor, strokes: Tensor) -> float:
        """Leaves the gradients in the parameters and returns the mean loss."""
        total = 0.0
        chunks = self.options.micro_batches
        for x, y in zip(pictures.tensor_split(chunks), strokes.tensor_split(chunks), strict=True):
            share = len(x) / len(pictures)
            loss = F.binary_cross_entropy_with_logits(self.model(x), y)
            (loss * share).backward()
            total += loss.item() * share
        return total

    def step(self, data: Pictures) -> None:
        """One optimizer step."""
        pictures, strokes = data.draw(len(self.history.loss), self.options.rows)
        start = time.perf_counter()
        loss = self.gradients(pictures.to(self.dtype), strokes.to(self.dtype))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.seconds.append(time.perf_counter() - start)
        self.history.loss.append(loss)

    @torch.no_grad()
    def predict(self, pictures: Tensor) -> Tensor:
        """Probabilities of strokes."""
        self.model.eval()
        predicted = self.model(pictures.to(self.dtype)).sigmoid()
        self.model.train()
        return predicted

    @property
    def batches_counted(self) -> set[int]:
        """By the batch norms."""
        return {int(layer.num_batches_tracked) for layer in self.model.modules() if isinstance(layer, nn.BatchNorm2d)}


class Pipelined(Run):
    """The same in a pipeline of ``stages``, whose batch norms keep the statistics of whole mini-batches."""

    def __init__(self, options: Namespace, dtype: torch.dtype, stages: int) -> None:
        super().__init__(options, dtype)
        self.name = f"{stages} stages"
        rows = -(-options.rows // options.micro_batches)
        sample = torch.zeros(rows, 1, options.size, options.size, dtype=dtype)
        self.balance = balance_by_time(stages, self.model, sample, timeout=options.profile)
        self.pipe = Pipe(
            self.model, options.micro_batches, options.checkpoint, deferred_batch_norm=True, balance=self.balance
        )
        held = iter(profile_sizes(self.model, sample))
        self.stage_bytes = [sum(next(held).activations for _ in range(layers)) for layers in self.balance]

    def gradients(self, pictures: Tensor, strokes: Tensor) -> float:
        losses = self.pipe.step(
            pictures,
            target=strokes,
            loss_fn=F.binary_cross_entropy_with_logits,
            schedule=self.options.schedule,
        )
        shares = [len(part) / len(pictures) for part in pictures.tensor_split(len(losses))]
        return sum(loss * share for loss, share in zip(losses.tolist(), shares, strict=True))

    @property
    def as_run(self) -> Record:
        """The last step as it went."""
        record = self.pipe.last_run
        assert record is not None, "no step has been made"
        return record

    @property
    def as_planned(self) -> Record:
        """The schedule, with the times that actions took in the last step, and nothing else."""
        schedule = build(self.options.schedule, len(self.pipe), min(self.options.micro_batches, self.options.rows))
        plan = simulate(schedule, mean_times(self.as_run))
        return Record(f"{plan.title}, planned", plan.placement, plan.spans)
