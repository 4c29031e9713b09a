"""Writes the output of train_lm.py: a live view of training, then a comparison of backends, a record and a report."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from byte_lm import LanguageModel, make_optimizer, parameter_counts, train_step
from common import machine_facts
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

import pymoe
from pymoe.bench.timing import measure
from pymoe.nn import MoE

if TYPE_CHECKING:
    from train_lm import Trainer

WARM_UP = 1
LOAD_BINS = 100  # number of columns to which the load of neighbouring steps is averaged
FINAL_STEPS = 20  # steps over which the final training loss is averaged
PLAIN_LINES = 20  # over a whole run
SPEED_WINDOW = 20  # steps over which speed and load are averaged
BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows a live panel on a terminal; elsewhere it prints a plain line at intervals."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, console = trainer, Console()
        self.loads: deque[Tensor] = deque(maxlen=SPEED_WINDOW)
        self.live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        if self.live:
            self.live.start()

    def close(self) -> None:
        if self.live:
            self.live.stop()

    def step(self) -> None:
        history, step, steps = self.trainer.history, self.trainer.steps_done, self.trainer.config.steps
        if history.load:
            self.loads.append(history.load[-1])
        if not self.live and step % max(1, steps // PLAIN_LINES) and step not in (1, steps):
            return
        recent = sorted(history.seconds[-SPEED_WINDOW:])
        seconds = recent[len(recent) // 2]
        left, speed = duration(seconds * (steps - step)), f"{self.trainer.bytes_per_step / seconds:,.0f}"
        loss, bits = f"{history.loss[-1]:.3f}", f"{history.loss[-1] / math.log(2):.2f}"
        held_back = f"{history.validation_bits[-1]:.3f}" if history.validation_bits else ""
        load = torch.stack(list(self.loads)).double().sum(dim=0) if self.loads else torch.ones(0, 1)
        load = load / load.mean(dim=1, keepdim=True)  # (layers, experts): multiples of an even share
        if self.live:
            head = Table.grid(padding=(0, 2))
            bar = ProgressBar(total=steps, completed=step, width=40)
            head.add_row(f"step [bold]{step}[/]/{steps}", bar, f"[bold]{left}[/] left", f"[bold]{speed}[/] tokens/s")
            line = f"loss [bold]{loss}[/]   [bold]{bits}[/] bits/byte"
            line += f"   held-back text [bold]{held_back}[/] bits/byte" if held_back else ""
            table = Table.grid(padding=(0, 2))
            for layer, row in enumerate(load.tolist(), start=1):
                bars = "".join(BARS[min(len(BARS) - 1, int(share / 2 * len(BARS)))] for share in row)
                table.add_row(
                    f"experts of layer {layer}", f"[cyan]{bars}[/]", f"busiest {max(row):.2f}x its even share"
                )
            self.live.update(Group(head, Text.from_markup(line), *([table] if self.loads else ())))
            return
        parts = [f"step {step:>{len(str(steps))}}/{steps}", f"loss {loss}", f"{bits} bits/byte"]
        parts += [f"{speed} tokens/s", f"{left} left"]
        parts += [f"held-back text {held_back} bits/byte"] if held_back else []
        parts += [f"busiest expert {load.max():.2f}x its even share"] if self.loads else []
        print("  ".join(parts), flush=True)


def compare_backends(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Compare native and reference operators on copies of the model, with the same batches and steps in turn."""
    config = trainer.config
    models = {name: LanguageModel(replace(config, backend=name)) for name in ("native", "reference")}
    for model in models.values():
        model.load_state_dict(trainer.model.state_dict())
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
    native, reference = (seconds[name][WARM_UP:] for name in ("native", "reference"))
    ratios = [b / a for a, b in zip(native, reference, strict=True)]
    layer_ratios = layer_speedups(models, trainer, steps)
    return {
        "steps": steps,
        "native_bytes_per_second": trainer.bytes_per_step / statistics.median(native),
        "reference_bytes_per_second": trainer.bytes_per_step / statistics.median(reference),
        "step_speedup": statistics.median(ratios),  # reference seconds / native seconds, whole training step
        "step_speedup_range": (min(ratios), max(ratios)),
        "layer_speedup": statistics.median(layer_ratios),  # reference seconds / native seconds, one MoE layer
        "layer_speedup_range": (min(layer_ratios), max(layer_ratios)),
        "loss_difference": difference,  # largest difference of a step's losses, nats per byte
    }


def layer_speedups(models: dict[str, LanguageModel], trainer: Trainer, repeats: int) -> list[float]:
    """Time forward and backward of the middle MoE layer on rows from training; return reference / native ratios."""
    layers = {name: model.moe_layers()[len(model.blocks) // 2] for name, model in models.items()}
    seen: list[Tensor] = []
    hook = layers["native"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        models["native"](trainer.batches.batch(trainer.steps_done)[0])
    hook.remove()
    grad = torch.randn(seen[0].shape, generator=torch.Generator().manual_seed(0))

    def forward_backward(layer: MoE) -> None:
        layer.zero_grad(set_to_none=True)
        layer(seen[0].clone().requires_grad_()).backward(grad)

    times = measure({name: partial(forward_backward, one) for name, one in layers.items()}, rounds=(repeats, repeats))
    return [b / a for a, b in zip(times["native"].seconds, times["reference"].seconds, strict=True)]


def make_record(trainer: Trainer, **found: Any) -> dict[str, Any]:
    """Return all data that is needed to repeat the run and to draw all plots, without host names and paths."""
    config, history, build = trainer.config, trainer.history, pymoe.build_info()
    seconds = statistics.median(history.seconds)
    return {
        "what": "pymoe examples/train_lm.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "config": {**asdict(config), "text": Path(config.text).name},
        "text": {
            "name": trainer.text.name,
            "sha256": trainer.text.sha256,
            "train_bytes": trainer.text.train.numel(),
            "validation_bytes": trainer.text.validation.numel(),
        },
        "machine": machine_facts(),
        "versions": {name: build[name] for name in ("pymoe", "torch", "python", "compiler", "cpu_isa")},
        "parameters": parameter_counts(trainer.model, config),
        "steps_done": trainer.steps_done,
        "bytes_per_step": trainer.bytes_per_step,
        "final": {
            "train_bits_per_byte": statistics.fmean(history.loss[-FINAL_STEPS:]) / math.log(2),
            "validation_bits_per_byte": history.validation_bits[-1] if history.validation_bits else None,
            "tokens_per_second": trainer.bytes_per_step / seconds,
        },
        "timings": {
            "wall_seconds": found.pop("wall_seconds"),  # from start to report; in a resumed run, since it was resumed
            "training_seconds": sum(history.seconds),
            "median_step_seconds": seconds,
        },
        "loss": history.loss,
        "step_seconds": [round(value, 5) for value in history.seconds],
        "validation": {"step": history.validation_step, "bits_per_byte": history.validation_bits},
        "expert_load": binned_load(history.load),
        **found,
    }


def binned_load(load: list[Tensor]) -> dict[str, Any] | None:
    """Return the mean relative load, where 1 is an even share, for each bin of steps, layer and expert."""
    if not load:
        return None
    stacked = torch.stack(load).double()
    relative = stacked / stacked.mean(dim=-1, keepdim=True)
    bins = [part.mean(dim=0) for part in relative.tensor_split(min(LOAD_BINS, len(load)))]
    return {
        "steps": len(load),
        "relative_load": [[[round(value, 3) for value in layer] for layer in part.tolist()] for part in bins],
    }


def report(facts: dict[str, Any], written: list[Path]) -> None:
    final, timings, sample = facts["final"], facts["timings"], facts["sample"]
    if sample:
        rule = "-" * 100
        print(
            f"\nsample (temperature {sample['temperature']}, top {sample['top_k']}, seed {sample['seed']}):\n{rule}\n"
            f"{sample['text']}\n{rule}"
        )
    print(
        f"\nheld-back text: {final['validation_bits_per_byte']:.3f} bits per byte; last training batches: "
        f"{final['train_bits_per_byte']:.3f}\n"
        f"speed: {final['tokens_per_second']:,.0f} tokens/s, {duration(timings['training_seconds'])} in steps, "
        f"{duration(timings['wall_seconds'])} in all"
    )
    if compared := facts["native_against_reference"]:
        (low, high), (layer_low, layer_high) = compared["step_speedup_range"], compared["layer_speedup_range"]
        print(
            f"native against reference, {compared['steps']} steps of each in turn from the same weights:\n"
            f"  whole training step {compared['step_speedup']:.2f}x as fast (median; {low:.2f} to {high:.2f}): "
            f"{compared['native_bytes_per_second']:,.0f} and {compared['reference_bytes_per_second']:,.0f} tokens/s\n"
            f"  one MoE layer, forward and backward {compared['layer_speedup']:.2f}x as fast "
            f"({layer_low:.2f} to {layer_high:.2f})\n"
            f"  losses differ by at most {compared['loss_difference']:.1e}"
        )
    print("results: " + "\n         ".join(map(str, written)))


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
