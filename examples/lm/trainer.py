"""One run's state (model, optimizer, history) and what a step does to it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pymoe.nn import update_expert_biases

from .config import Config
from .data import Batches, Text, validation_windows
from .model import LanguageModel

VALIDATION_BATCH = 16


@dataclass
class History:
    """What the run measured, one entry a step unless it says otherwise."""

    loss: list[float] = field(default_factory=list)  # nats per byte, cross-entropy alone
    seconds: list[float] = field(default_factory=list)  # wall time of the step
    load: list[Tensor] = field(default_factory=list)  # (layers, experts) int32 slots; empty for a dense model
    validation_step: list[int] = field(default_factory=list)  # steps made when each validation ran
    validation_bits: list[float] = field(default_factory=list)  # bits per byte


class Trainer:
    def __init__(self, config: Config, text: Text) -> None:
        torch.manual_seed(config.seed)
        self.config, self.text = config, text
        self.model = LanguageModel(config)
        self.optimizer = make_optimizer(self.model, config)
        self.batches = Batches(text.train, config.context, config.batch_size, config.seed)
        self.history = History()

    @property
    def steps_done(self) -> int:
        return len(self.history.loss)

    @property
    def bytes_per_step(self) -> int:
        return self.config.batch_size * self.config.context

    def step(self) -> float:
        """Makes the next step and returns its loss in nats per byte."""
        start = time.perf_counter()
        step = self.steps_done
        loss = train_step(self.model, self.optimizer, self.config, step, *self.batches.batch(step))
        loads = self.model.loads()
        if loads is not None:
            self.history.load.append(loads)
        self.history.seconds.append(time.perf_counter() - start)
        self.history.loss.append(loss)
        return loss

    def validate(self) -> float:
        """Bits per byte over all held-back text; noted in the history once per step."""
        history = self.history
        if history.validation_step and history.validation_step[-1] == self.steps_done:
            return history.validation_bits[-1]
        bits = bits_per_byte(self.model, *validation_windows(self.text.validation, self.config.context))
        history.validation_step.append(self.steps_done)
        history.validation_bits.append(bits)
        return bits


def train_step(
    model: LanguageModel, optimizer: torch.optim.Optimizer, config: Config, step: int, inputs: Tensor, targets: Tensor
) -> float:
    """Forward, backward, clip, update. MoE layers inject their balancing losses into the gradient themselves."""
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    if config.bias_update_rate:
        update_expert_biases(model)
    return loss.item()


@torch.no_grad()
def bits_per_byte(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    total = 0.0
    for x, y in zip(inputs.split(VALIDATION_BATCH), targets.split(VALIDATION_BATCH), strict=True):
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    return total / targets.numel() / math.log(2)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
