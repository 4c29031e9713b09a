"""The record of all runs, and what it must show. It holds no host name and no path."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from lm.record import machine_facts
from pipelined.compare import are_equal, difference
from torch import Tensor

import pymoe

from .data import Pictures
from .run import Pipelined, Run

Runs = tuple[Run, Sequence[Pipelined]]  # the plain loop, and pipelines

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}  # nats per pixel
HELD_BACK = 64  # pictures of digits that were held back
FALL = 0.9


def make_record(options: Namespace, data: Pictures, exact: Runs, runs: Runs, seconds: float) -> dict[str, Any]:
    """Everything that was measured."""
    pictures, strokes = data.draw_held_back(HELD_BACK)
    return {
        "what": "pymoe examples/pipeline_unet.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "data": "scikit-learn's digits: 1437 images to draw pictures from, 360 held back",
        "machine": machine_facts(),
        "versions": {name: pymoe.build_info()[name] for name in ("pymoe", "torch", "python")},
        "seconds": seconds,
        "differences": {"float64": difference(*exact), "float32": difference(*runs)},
        "runs": {run.name: run_record(run, pictures, strokes) for run in (runs[0], *runs[1])},
    }


def run_record(run: Run, pictures: Tensor, strokes: Tensor) -> dict[str, Any]:
    """One run in float32."""
    found = {
        "loss": run.history.loss,
        "step_seconds": [round(value, 5) for value in run.history.seconds],
        "median_step_seconds": run.history.median_seconds,
        "held_back_overlap": overlap(run.predict(pictures), strokes),
        "batches_counted": sorted(run.batches_counted),
    }
    if isinstance(run, Pipelined):
        plan, ran = run.as_planned, run.as_run
        found |= {
            "balance": run.balance,
            "last_step": {
                name: {"seconds": record.makespan, "bubble": list(record.bubble), "peak_live": list(record.peak_live)}
                for name, record in (("planned", plan), ("run", ran))
            },
            "activation_bytes": {
                "of_a_micro_batch": run.stage_bytes,
                # Where micro-batches are checkpointed, all but one are there with their inputs alone.
                "peak": [live * size for live, size in zip(ran.peak_live_of_stages, run.stage_bytes, strict=True)]
                if run.pipe.checkpoint == "never"
                else None,
            },
        }
    return found


def overlap(predicted: Tensor, strokes: Tensor) -> float:
    """Pixels in both over pixels in either: 0 to 1."""
    found, true = predicted > 0.5, strokes > 0.5
    return float((found & true).sum() / (found | true).sum())


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """What the runs must show, in words, and whether they did."""
    options, runs = record["options"], record["runs"]
    steps = {"float64": options["exact_steps"], "float32": options["steps"]}
    found = are_equal(record["differences"], steps, TOLERANCES)
    for name, run in runs.items():
        first, last = run["loss"][0], run["loss"][-1]
        found[
            f"{name}: the loss fell from {first:.3f} to {last:.3f}; strokes of held-back digits are found with "
            f"{100 * run['held_back_overlap']:.0f} % overlap"
        ] = last < FALL * first
        if "balance" in run:
            found[
                f"{name}: batch norms counted {run['batches_counted'][0]} mini-batches in {options['steps']} steps"
            ] = run["batches_counted"] == [options["steps"]]
            planned, ran = (run["last_step"][one]["peak_live"] for one in ("planned", "run"))
            peak = run["activation_bytes"]["peak"]
            size = f"{sum(peak) / 2**20:.1f} MiB of activations in all stages" if peak else "inputs of checkpoints"
            found[f"{name}: at most {ran} micro-batches were held at once, {planned} by the plan ({size})"] = all(
                a <= b for a, b in zip(ran, planned, strict=True)
            )
    return found
