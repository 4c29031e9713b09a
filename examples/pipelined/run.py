"""Training steps of the same model on the same micro-batches: by a plain loop, and by a pipeline."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lm.config import Config
from lm.data import Batches
from lm.trainer import make_optimizer
from torch import Tensor, nn

from pymoe.nn import MoE, set_aux_loss_scale, update_expert_biases
from pymoe.pipe import Pipe
from pymoe.pipe.schedules import Record

from .history import History
from .layers import balance, layers


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Run:
    """A model and its optimizer; how gradients are made is what subclasses differ in."""

    def __init__(self, config: Config, micro_batches: int, dtype: torch.dtype) -> None:
        torch.manual_seed(config.seed)
        self.config, self.micro_batches = config, micro_batches
        self.model = layers(config).to(dtype)
        self.optimizer = make_optimizer(self.model, config)
        self.history = History()

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        """Leaves the gradients in the parameters and returns the mean loss."""
        raise TypeError(f"{type(self).__name__} does not say how gradients are made")

    def step(self, batches: Batches) -> None:
        """One optimizer step."""
        step = len(self.history.loss)
        inputs, targets = batches.batch(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        start = time.perf_counter()
        loss = self.gradients(inputs, targets)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        update_expert_biases(self.model)
        self.history.seconds.append(time.perf_counter() - start)
        self.history.loss.append(loss)


class Plain(Run):
    """Forward and backward of one micro-batch after the other."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        set_aux_loss_scale(self.model, 1 / self.micro_batches)
        total = 0.0
        for x, y in zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True):
            loss = cross_entropy(self.model(x), y) / self.micro_batches
            loss.backward()
            total += loss.item()
        return total


class Pipelined(Run):
    """The same in a pipeline, which weights the auxiliary losses of the MoE layers by itself."""

    def __init__(self, config: Config, micro_batches: int, dtype: torch.dtype, stages: int, schedule: str) -> None:
        super().__init__(config, micro_batches, dtype)
        self.schedule = schedule
        cut = balance(len(self.model), stages)
        self.pipe = Pipe(self.model, chunks=micro_batches, checkpoint="never", balance=cut)

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        losses = self.pipe.step(inputs, target=targets, loss_fn=cross_entropy, schedule=self.schedule)
        return losses.mean().item()

    @property
    def picture(self) -> Record:
        """Of the last step, as it went."""
        record = self.pipe.last_run
        assert record is not None, "no step has been made"
        return record


@dataclass(frozen=True)
class Difference:
    """The largest difference between two runs, in absolute values."""

    loss: float
    parameter: float
    expert_bias: float


def difference(a: Run, b: Run) -> Difference:
    """Between the losses of all steps, and between the parameters and expert biases now."""
    parameters = zip(a.model.parameters(), b.model.parameters(), strict=True)
    biases = zip(expert_biases(a.model), expert_biases(b.model), strict=True)
    return Difference(
        max(abs(x - y) for x, y in zip(a.history.loss, b.history.loss, strict=True)),
        max(float((x - y).detach().abs().max()) for x, y in parameters),
        max((float((x - y).abs().max()) for x, y in biases), default=0.0),
    )


def expert_biases(model: nn.Module) -> list[Tensor]:
    """Of all MoE layers that have one."""
    found = [module.router.expert_bias for module in model.modules() if isinstance(module, MoE)]
    return [bias for bias in found if bias is not None]
