"""The command line of pipeline_moe_lm.py, the runs that it asks for, and what they must show."""

from __future__ import annotations

import argparse
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lm.command import INTERRUPTED, at_least, parser_of, tell
from lm.config import Config
from lm.data import Batches, load_text
from lm.record import machine_facts, write_record

import pymoe
from pymoe.pipe.schedules import names, png, text

from .run import Difference, Pipelined, Plain, Run, difference

TOLERANCES = {"float64": 1e-12, "float32": 1e-4}
"""Nats per byte. In float32, rounding may change an expert that a byte is sent to, and losses from there on."""


def main(argv: list[str], description: str) -> int:
    """Train; 0 if all checks hold."""
    options = parse(argv, description)
    torch.set_num_threads(1)  # for each stage, and for the plain loop
    start = time.perf_counter()
    config = Config(
        width=options.width,
        ffn_size=2 * options.width,
        context=options.context,
        batch_size=options.micro_batches * options.rows,
        steps=options.steps,
        warmup=max(1, options.steps // 5),
        bias_update_rate=0.001,
        seed=options.seed,
    )
    data = load_text(options.text, config.context).train
    batches = Batches(data, config.context, config.batch_size, config.seed)
    runs: dict[str, tuple[Plain, Pipelined]] = {}
    try:
        for dtype, steps in ((torch.float64, options.exact_steps), (torch.float32, options.steps)):
            runs[str(dtype).removeprefix("torch.")] = both(config, batches, options, dtype, steps)
    except KeyboardInterrupt:
        print("\nstopped")
        return INTERRUPTED
    return report(options, runs, time.perf_counter() - start)


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options."""
    parser = parser_of(description)
    number = at_least(1)
    parser.add_argument("--stages", type=number, default=2, metavar="P", help="of the pipeline, 6 at most (default: 2)")
    parser.add_argument("--schedule", choices=names(), default="1f1b", help="(default: 1f1b)")
    parser.add_argument("--micro-batches", type=number, default=8, metavar="M", help="of a step (default: 8)")
    parser.add_argument("--rows", type=number, default=2, metavar="N", help="windows of a micro-batch (default: 2)")
    parser.add_argument("--steps", type=number, default=24, metavar="N", help="in float32 (default: 24)")
    parser.add_argument("--exact-steps", type=number, default=4, metavar="N", help="in float64 (default: 4)")
    parser.add_argument("--width", type=at_least(8), default=64, metavar="H", help="of the model (default: 64)")
    parser.add_argument(
        "--context", type=at_least(2), default=128, metavar="C", help="bytes of a window (default: 128)"
    )
    parser.add_argument("--text", default="", metavar="FILE", help="to train on (default: the Python manual)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline_moe_lm"), metavar="DIR", help="for the results")
    options = parser.parse_args(argv)
    if options.stages > Config().layers + 2:
        parser.error(f"--stages must be at most {Config().layers + 2}, the number of layers, got {options.stages}")
    if options.width % 8:
        parser.error(f"--width must be a multiple of 8, got {options.width}")
    return options


def both(
    config: Config, batches: Batches, options: argparse.Namespace, dtype: torch.dtype, steps: int
) -> tuple[Plain, Pipelined]:
    """The same steps by both, in turns."""
    plain = Plain(config, options.micro_batches, dtype)
    pipelined = Pipelined(config, options.micro_batches, dtype, options.stages, options.schedule)
    print(f"\n{str(dtype).removeprefix('torch.')}   loss: plain loop  pipeline   difference   step: plain  pipeline")
    for step in range(steps):
        pair: tuple[Run, Run] = (plain, pipelined) if step % 2 else (pipelined, plain)
        for run in pair:
            run.step(batches)
        if step in (0, steps - 1) or (step + 1) % 5 == 0:
            a, b = plain.history, pipelined.history
            apart = abs(a.loss[-1] - b.loss[-1])
            print(
                f"step {step + 1:3d}         {a.loss[-1]:10.6f} {b.loss[-1]:10.6f}   {apart:8.1e}"
                f"      {a.seconds[-1] * 1e3:6.0f} ms {b.seconds[-1] * 1e3:6.0f} ms"
            )
    return plain, pipelined


def report(options: argparse.Namespace, runs: dict[str, tuple[Plain, Pipelined]], seconds: float) -> int:
    """Prints and writes what was found; the exit status."""
    found = {name: difference(*pair) for name, pair in runs.items()}
    plain, pipelined = runs["float32"]
    record = pipelined.picture
    print(f"\nthe last step, {record.summary()}\n\n{text(record)}\n")
    checks = {}
    for name, one in found.items():
        tolerance = TOLERANCES[name]
        words = f"{name}: losses differ by at most {one.loss:.1e} nats in {len(runs[name][0].history.loss)} steps"
        checks[f"{words} (allowed: {tolerance:g})"] = one.loss <= tolerance
    checks[f"float64: parameters differ by at most {found['float64'].parameter:.1e} afterwards (allowed: 1e-10)"] = (
        found["float64"].parameter <= 1e-10
    )
    checks["float64: the expert biases of all MoE layers are equal"] = found["float64"].expert_bias == 0
    losses = pipelined.history.loss
    checks[f"the model learns: {losses[0]:.2f} nats at first, {losses[-1]:.2f} in the end"] = losses[-1] < losses[0]
    one, other = plain.history.median_seconds, pipelined.history.median_seconds
    print(
        f"a step takes {one * 1e3:.0f} ms by the plain loop on one thread, {other * 1e3:.0f} ms in the pipeline of "
        f"{options.stages} stages: {one / other:.2f} times as fast ({seconds:.0f} s in all)"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    picture = png(options.out / "last_step.png", record)
    print(f"{write_record(as_record(options, runs, found, checks), options.out)}\n{picture}\n")
    return tell(checks)


def as_record(
    options: argparse.Namespace,
    runs: dict[str, tuple[Plain, Pipelined]],
    found: dict[str, Difference],
    checks: dict[str, bool],
) -> dict[str, Any]:
    """What was measured, for the JSON file."""
    asked = {name: value for name, value in vars(options).items() if name not in ("out", "text")}
    return {
        "what": "pymoe examples/pipeline_moe_lm.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": asked,
        "machine": machine_facts(),
        "versions": {name: pymoe.build_info()[name] for name in ("pymoe", "torch", "python")},
        "differences": {name: vars(one) for name, one in found.items()},
        "runs": {
            f"{dtype} {name}": {
                "loss": run.history.loss,
                "step_seconds": [round(value, 5) for value in run.history.seconds],
                "median_step_seconds": run.history.median_seconds,
            }
            for dtype, pair in runs.items()
            for name, run in zip(("plain", "pipeline"), pair, strict=True)
        },
        "checks": checks,
    }
