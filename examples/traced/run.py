"""Training steps of the same model on the same text: alone, and in pipelines that are cut out of its capture."""

from __future__ import annotations

import time
from argparse import Namespace

import torch
from lm.data import Batches
from pipelined.history import History
from torch import Tensor

import pymoe
from pymoe.pipe import split_by_flops, split_by_time, split_into_equal_parameters
from pymoe.pipe.schedules import Record, build, mean_times, simulate

from . import model

CUTS = {"parameters": split_into_equal_parameters, "flops": split_by_flops, "time": split_by_time}


class Run:
    """A model and its optimizer; how gradients are made is what subclasses differ in."""

    name = "model alone"

    def __init__(self, options: Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.model = model.build(options.architecture, options.width, options.layers, options.context).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate)
        self.history = History()

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        """Leaves the gradients in the parameters and returns the mean loss."""
        total = 0.0
        chunks = self.options.micro_batches
        for x, y in zip(inputs.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
            share = len(x) / len(inputs)
            loss = model.cross_entropy(self.model(input_ids=x), y)
            (loss * share).backward()
            total += loss.item() * share
        return total

    def step(self, batches: Batches) -> None:
        """One optimizer step."""
        inputs, targets = batches.batch(len(self.history.loss))
        start = time.perf_counter()
        loss = self.gradients(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.seconds.append(time.perf_counter() - start)
        self.history.loss.append(loss)


class Pipelined(Run):
    """The same in a pipeline of ``stages``."""

    def __init__(self, options: Namespace, dtype: torch.dtype, stages: int) -> None:
        super().__init__(options, dtype)
        self.name = f"{stages} stages"
        rows = -(-options.rows // options.micro_batches)
        example = torch.randint(model.BYTES, (max(2, rows), options.context))
        start = time.perf_counter()
        self.pipe = pymoe.pipeline(
            self.model,
            (),
            {"input_ids": example},
            split_policy=CUTS[options.cut](stages),
            chunks=options.micro_batches,
            checkpoint=options.checkpoint,
        )
        self._last: Record | None = None
        self.capture_seconds = time.perf_counter() - start

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        losses = self.pipe.step(
            input_ids=inputs, target=targets, loss_fn=model.cross_entropy, schedule=self.options.schedule
        )
        self._last = self.pipe.last_run
        shares = [len(part) / len(inputs) for part in inputs.tensor_split(len(losses))]
        return sum(loss * share for loss, share in zip(losses.tolist(), shares, strict=True))

    @property
    def as_run(self) -> Record:
        """The last step as it went."""
        assert self._last is not None, "no step has been made"
        return self._last

    @property
    def as_planned(self) -> Record:
        """The schedule, with the times that actions took in the last step, and nothing else."""
        chunks = min(self.options.micro_batches, self.options.rows)
        plan = simulate(build(self.options.schedule, self.pipe.num_stages, chunks), mean_times(self.as_run))
        return Record(f"{plan.title}, planned", plan.placement, plan.spans)

    @property
    def parameters_of_stages(self) -> list[int]:
        """Numbers of each stage; a shared parameter counts in every stage that has it."""
        stages = map(self.pipe.get_stage_module, range(self.pipe.num_stages))
        return [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]
