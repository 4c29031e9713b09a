"""Native against reference, side by side: the same weights, the same batches, steps of both in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from pymoe.nn import MoE

from .model import LanguageModel
from .trainer import Trainer, make_optimizer, train_step

WARM_UP = 1


@dataclass(frozen=True)
class Comparison:
    steps: int
    native_bytes_per_second: float
    reference_bytes_per_second: float
    step_speedup: float  # median over pairs of reference seconds / native seconds, whole training step
    step_speedup_range: tuple[float, float]
    layer_speedup: float  # the same for forward and backward of one MoE layer alone
    layer_speedup_range: tuple[float, float]
    loss_difference: float  # largest |native - reference| loss over the steps, nats per byte

    def as_dict(self) -> dict:
        return asdict(self)


def compare_backends(trainer: Trainer, steps: int) -> Comparison:
    """Continues from the trainer's weights with both backends, on copies; the trainer itself is left as it is."""
    config = trainer.config
    models = {name: _copy(trainer, name) for name in ("native", "reference")}
    optimizers = {name: make_optimizer(model, config) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    difference = 0.0
    for step in range(WARM_UP + steps):
        batch = trainer.batches.batch(trainer.steps_done + step)
        losses = {}
        for name, model in models.items():
            start = time.perf_counter()
            losses[name] = train_step(model, optimizers[name], config, config.steps // 2, *batch)
            seconds[name].append(time.perf_counter() - start)
        difference = max(difference, abs(losses["native"] - losses["reference"]))
    ratios = _ratios(seconds)
    layer_ratios = _ratios(_layer_seconds(models, trainer, steps))
    return Comparison(
        steps=steps,
        native_bytes_per_second=trainer.bytes_per_step / statistics.median(seconds["native"][WARM_UP:]),
        reference_bytes_per_second=trainer.bytes_per_step / statistics.median(seconds["reference"][WARM_UP:]),
        step_speedup=statistics.median(ratios),
        step_speedup_range=(min(ratios), max(ratios)),
        layer_speedup=statistics.median(layer_ratios),
        layer_speedup_range=(min(layer_ratios), max(layer_ratios)),
        loss_difference=difference,
    )


def _copy(trainer: Trainer, backend: str) -> LanguageModel:
    model = LanguageModel(replace(trainer.config, backend=backend))
    model.load_state_dict(trainer.model.state_dict())
    return model


def _layer_seconds(models: dict[str, LanguageModel], trainer: Trainer, repeats: int) -> dict[str, list[float]]:
    """Forward and backward of the middle MoE layer, on the rows that it gets in training."""
    x, grad = _layer_input(models["native"], trainer)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM_UP + repeats):
        for name, model in models.items():
            layer = model.moe_layers()[len(model.blocks) // 2]
            seconds[name].append(_timed(lambda layer=layer: _forward_backward(layer, x, grad)))
    return seconds


def _layer_input(model: LanguageModel, trainer: Trainer) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []
    layer = model.moe_layers()[len(model.blocks) // 2]
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        model(trainer.batches.batch(trainer.steps_done)[0])
    hook.remove()
    x = seen[0]
    return x, torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def _forward_backward(layer: MoE, x: Tensor, grad: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    layer(x.clone().requires_grad_()).backward(grad)


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _ratios(seconds: dict[str, list[float]]) -> list[float]:
    pairs = zip(seconds["native"], seconds["reference"], strict=True)
    return [reference / native for native, reference in list(pairs)[WARM_UP:]]
