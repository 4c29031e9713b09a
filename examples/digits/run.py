"""One run: training steps through the mixture, all experts well or some of them not."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from pymoe.runtime import BackendStats, MixtureOfExpertBackends, Runtime
from pymoe.runtime.monitoring.statistics import PoolStats

from .model import Classifier, Digits, served_experts

SLOW, DYING = 3, 2  # which experts


@dataclass
class History:
    """What a run was like."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each training step."""
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    """(step, share of the held-back images)."""
    backends: dict[str, BackendStats] = field(default_factory=dict)
    at_death: dict[str, BackendStats] = field(default_factory=dict)
    """As ``backends`` when one died; empty in a healthy run."""
    pools: dict[str, PoolStats] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)


def run(options: Namespace, *, slow_by: float, one_dies: bool, step_done: Callable[[History], None]) -> History:
    """Train from the same beginning.

    Args:
        options: of the command line.
        slow_by: seconds that a pass of one expert takes longer.
        one_dies: whether one is dropped by its runtime after half of the steps.
        step_done: called after every step.
    """
    torch.manual_seed(options.seed)
    digits = Digits(options.seed)
    backends = served_experts(options.experts, options.width, options.expert_learning_rate)
    mixture = MixtureOfExpertBackends(
        backends,
        top_k=2,
        forward_timeout=options.timeout,
        backward_timeout=options.timeout,
        timeout_after_k_min=options.patience,
        on_too_few="fallback",  # an image both of whose experts are out goes around them
        detect_anomalies=True,
        aux_loss_coef=0.01,
    )
    model = Classifier(mixture, options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    history = History()
    with Runtime(backends, num_workers=len(backends)) as runtime:
        backends[SLOW].expert.delay = slow_by
        for step in range(options.steps):
            if one_dies and step == options.steps // 2:
                runtime.remove(backends[DYING], drain=False)
                history.at_death = mixture.stats()
            begin = time.perf_counter()
            images, labels = digits.draw(options.rows)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.seconds.append(time.perf_counter() - begin)
            history.loss.append(loss.item())
            if (step + 1) % max(1, options.steps // 20) == 0:
                history.accuracy.append((step + 1, accuracy(model, digits)))
            step_done(history)
        pools = runtime.pools
    # After the shutdown: what was under way has ended, and what came late is counted.
    history.pools = runtime.stats()
    assert len(history.pools) == len(pools)
    history.backends = mixture.stats()
    history.updates = {backend.name: backend.updates for backend in backends}
    return history


@torch.no_grad()
def accuracy(model: Classifier, digits: Digits) -> float:
    """On the held-back images, with the answers that come in time."""
    images, labels = digits.held_back
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right
