"""A run from its first line on the screen to its last: train, save, validate, sample, compare, draw, report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import write_record

from . import checkpoint, plots, record
from .compare import Comparison, compare_backends
from .model import parameter_counts
from .progress import duration, open_display
from .sample import generate
from .stop import StopRequest
from .trainer import Trainer


def announce(trainer: Trainer, folder: Path) -> None:
    settings, text, counts = trainer.config, trainer.text, parameter_counts(trainer.model, trainer.config)
    ffn = (
        f"dense FFNs of {settings.dense_ffn_size}"
        if settings.ffn == "dense"
        else f"{settings.num_experts} experts of {settings.ffn_size} a layer, top {settings.top_k}, {settings.backend}"
    )
    if settings.ffn == "moe" and settings.shared_experts:
        ffn += f", {settings.shared_experts} shared"
    todo = f"steps {trainer.steps_done + 1} to {settings.steps} of {trainer.bytes_per_step:,} bytes"
    if trainer.steps_done == settings.steps:
        todo = f"all {settings.steps} steps are made"
    print(
        f"text: {text.name}, {text.train.numel():,} bytes to train on, the last {text.validation.numel():,} held back\n"
        f"model: {settings.layers} layers of width {settings.width}, {ffn}; {counts['total']:,} parameters, "
        f"{counts['active_per_byte']:,} of them at work on a byte\n"
        f"run: {todo}, {settings.threads} thread{'s' * (settings.threads != 1)}, results in {folder}; "
        f"Ctrl-C saves and stops",
        flush=True,
    )


def train(trainer: Trainer, folder: Path, arguments: argparse.Namespace) -> bool:
    """Makes the remaining steps; False if it was asked to stop before the last one.

    The run is saved either way, but not where a step broke off in the middle: then the last whole save stays.
    """
    steps = trainer.config.steps
    limit = min(steps, arguments.stop_after or steps)
    display = open_display(trainer)
    try:
        with StopRequest() as stop:
            while trainer.steps_done < limit and not stop.made:
                trainer.step()
                done = trainer.steps_done
                if done == steps or done % arguments.eval_every == 0:
                    trainer.validate()
                display.step()
                if done % arguments.checkpoint_every == 0:
                    checkpoint.save(trainer, folder)
            checkpoint.save(trainer, folder)
    finally:
        display.close()
    return trainer.steps_done == steps


def finish(trainer: Trainer, folder: Path, arguments: argparse.Namespace, started: float) -> None:
    sample = make_sample(trainer, arguments)
    comparison = None
    if arguments.compare_steps and trainer.config.ffn == "moe":
        print("timing native and reference side by side ...", flush=True)
        comparison = compare_backends(trainer, arguments.compare_steps)
    wall = time.perf_counter() - started
    facts = record.make_record(trainer, wall_seconds=wall, comparison=comparison, sample=sample)
    written = [folder / checkpoint.FILE_NAME, write_record(facts, folder)]
    written.append(plots.plot_loss(facts, folder / "loss.png"))
    if facts["expert_load"]:
        written.append(plots.plot_expert_load(facts, folder / "experts.png"))
    report(facts, comparison, written)


def make_sample(trainer: Trainer, arguments: argparse.Namespace) -> dict[str, Any] | None:
    if not arguments.sample_bytes:
        return None
    print(f"writing a sample of {arguments.sample_bytes} bytes ...", flush=True)
    settings = {"temperature": arguments.temperature, "top_k": arguments.sample_top_k, "seed": trainer.config.seed}
    text = generate(trainer.model, arguments.prompt, arguments.sample_bytes, context=trainer.config.context, **settings)
    return {"prompt": arguments.prompt, **settings, "text": text}


def report(facts: dict[str, Any], comparison: Comparison | None, written: list[Path]) -> None:
    final, timings = facts["final"], facts["timings"]
    if facts["sample"]:
        rule = "-" * 100
        print(
            f"\nsample (temperature {facts['sample']['temperature']}, top {facts['sample']['top_k']}, seed "
            f"{facts['sample']['seed']}):\n{rule}\n{facts['sample']['text']}\n{rule}"
        )
    print(
        f"\nheld-back text: {final['validation_bits_per_byte']:.3f} bits per byte; last training batches: "
        f"{final['train_bits_per_byte']:.3f}\n"
        f"speed: {final['tokens_per_second']:,.0f} tokens/s, {duration(timings['training_seconds'])} in steps, "
        f"{duration(timings['wall_seconds'])} in all"
    )
    if comparison:
        low, high = comparison.step_speedup_range
        layer_low, layer_high = comparison.layer_speedup_range
        print(
            f"native against reference, {comparison.steps} steps of each in turn from the same weights:\n"
            f"  whole training step {comparison.step_speedup:.2f}x as fast (median; {low:.2f} to {high:.2f}): "
            f"{comparison.native_bytes_per_second:,.0f} and {comparison.reference_bytes_per_second:,.0f} tokens/s\n"
            f"  one MoE layer, forward and backward {comparison.layer_speedup:.2f}x as fast "
            f"({layer_low:.2f} to {layer_high:.2f})\n"
            f"  losses differ by at most {comparison.loss_difference:.1e}"
        )
    print("results: " + "\n         ".join(str(path) for path in written))
