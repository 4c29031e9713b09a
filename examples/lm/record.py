"""The JSON record of a run: enough to repeat it and to draw every plot. It holds no host name and no path."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from common import machine_facts
from torch import Tensor

import pymoe

from .compare import Comparison
from .model import parameter_counts
from .trainer import Trainer

LOAD_BINS = 100  # the load of neighbouring steps is averaged down to this many columns
FINAL_STEPS = 20  # steps over which the final training loss is averaged


def make_record(
    trainer: Trainer, *, wall_seconds: float, comparison: Comparison | None, sample: dict[str, Any] | None
) -> dict[str, Any]:
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
            "wall_seconds": wall_seconds,  # from start to report; of a resumed run, its last part
            "training_seconds": sum(history.seconds),
            "median_step_seconds": seconds,
        },
        "loss": history.loss,
        "step_seconds": [round(value, 5) for value in history.seconds],
        "validation": {"step": history.validation_step, "bits_per_byte": history.validation_bits},
        "expert_load": binned_load(history.load),
        "native_against_reference": comparison.as_dict() if comparison else None,
        "sample": sample,
    }


def binned_load(load: list[Tensor]) -> dict[str, Any] | None:
    """Mean relative load (1 = an even share) per bin of steps, layer and expert."""
    if not load:
        return None
    stacked = torch.stack(load).double()
    relative = stacked / stacked.mean(dim=-1, keepdim=True)
    bins = [part.mean(dim=0) for part in relative.tensor_split(min(LOAD_BINS, len(load)))]
    return {
        "steps": len(load),
        "relative_load": [[[round(value, 3) for value in layer] for layer in part.tolist()] for part in bins],
    }
