"""The record of all runs, and what it must show. It holds no host name and no path."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch
import transformers
from lm.record import machine_facts
from pipelined.compare import are_equal, difference

import pymoe

from . import model
from .run import Pipelined, Run

Runs = tuple[Run, Sequence[Pipelined]]  # the model alone, and pipelines

TOLERANCES = {"float64": 1e-12, "float32": 1e-4}
"""Nats per byte."""
FALL = 0.9


def make_record(options: Namespace, exact: Runs, runs: Runs, seconds: float) -> dict[str, Any]:
    """Everything that was measured."""
    versions = {name: pymoe.build_info()[name] for name in ("pymoe", "torch", "python")}
    return {
        "what": "pymoe examples/pipeline_traced.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(options).items() if name not in ("out", "text")},
        "model": type(runs[0].model).__name__,
        "parameters": sum(parameter.numel() for parameter in runs[0].model.parameters()),
        "machine": machine_facts(),
        "versions": {**versions, "transformers": transformers.__version__},
        "seconds": seconds,
        "differences": {"float64": difference(*exact), "float32": difference(*runs)},
        "runs": {run.name: run_record(run) for run in (runs[0], *runs[1])},
    }


def run_record(run: Run) -> dict[str, Any]:
    """One run in float32."""
    found: dict[str, Any] = {
        "loss": run.history.loss,
        "step_seconds": [round(value, 5) for value in run.history.seconds],
        "median_step_seconds": run.history.median_seconds,
    }
    if isinstance(run, Pipelined):
        found |= {
            "capture_seconds": run.capture_seconds,
            "parameters_of_stages": run.parameters_of_stages,
            "busy_seconds_of_stages": busy(run),
            "same_weights": same_weights(run),
            "same_outputs": same_outputs(run),
        }
    return found


def busy(run: Pipelined) -> list[float]:
    """How long each stage computed in the last step."""
    seconds = [0.0] * run.pipe.num_stages
    for worker in run.as_run.spans:
        for span in worker:
            seconds[span.action.stage] += span.end - span.start
    return seconds


def same_weights(run: Pipelined) -> bool:
    """Whether the pipe's state loads into a model that knows no pipe, under its names, and is the same there."""
    options = run.options
    other = model.build(options.architecture, options.width, options.layers, options.context)
    other = other.to(next(run.model.parameters()).dtype)
    other.load_state_dict(run.pipe.state_dict())
    pairs = zip(other.parameters(), run.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def same_outputs(run: Pipelined) -> float:
    """The largest difference between the outputs of the pipe and of the model, on a text of another length."""
    length = max(2, run.options.context // 2)
    shape = 2 * run.options.micro_batches + 1, length
    text = torch.randint(model.BYTES, shape, generator=torch.Generator().manual_seed(1))
    run.pipe.eval()
    ours, theirs = run.pipe(input_ids=text), run.model(input_ids=text)
    run.pipe.train()
    assert type(ours) is type(theirs), f"{type(ours).__name__} is not {type(theirs).__name__}"
    return float((ours.logits - theirs.logits).abs().max())


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """What the runs must show, in words, and whether they did."""
    options, runs = record["options"], record["runs"]
    steps = {"float64": options["exact_steps"], "float32": options["steps"]}
    found = are_equal(record["differences"], steps, TOLERANCES)
    for name, run in runs.items():
        first, last = run["loss"][0], run["loss"][-1]
        found[f"{name}: the loss fell from {first:.3f} to {last:.3f} nats a byte"] = last < FALL * first
        if "same_outputs" in run:
            found[f"{name}: its weights load into the library's model under their own names"] = run["same_weights"]
            apart = run["same_outputs"]
            found[f"{name}: outputs for another length of text differ from the model's by {apart:.1e}"] = apart <= 1e-4
    return found
