"""Trains the language model of train_lm.py in a pipeline of stages, and compares it with a plain loop.

    python examples/pipeline_moe_lm.py                 # less than a minute on two cores
    python examples/pipeline_moe_lm.py --stages 3 --schedule zero-bubble
    python -m pymoe.pipe.schedules                     # what each schedule plans

The model is an nn.Sequential of an embedding, blocks with MoE layers, and a head that shares the embedding's weight. It
is cut into stages, each with its own thread. MoE layers in all stages have auxiliary losses and expert biases. Both
runs start from the same weights and read the same micro-batches, first in float64, then in float32; their losses must
be equal. At the end the program checks the results, and exits with status 1 if a check fails. It writes a record and a
picture of the last step to runs/pipeline_moe_lm.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "matplotlib"))

import argparse
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from byte_lm import Block, Config, LanguageModel, make_optimizer
from common import INTERRUPTED, Batches, History, at_least, load_text, machine_facts, parser_of, tell, write_record
from torch import Tensor, nn

import pymoe
from pymoe.nn import MoE, set_aux_loss_scale, update_expert_biases
from pymoe.pipe import Pipe
from pymoe.pipe.schedules import Record, names, png, text


class PositionedBlock(nn.Module):
    """A block that holds the rotary tables, so that it takes one tensor and returns one."""

    def __init__(self, block: Block, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.block(x, self.cos[:length], self.sin[:length])


class Head(nn.Module):
    """Applies the last norm, and computes logits with the embedding's transpose."""

    def __init__(self, norm: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = norm
        self.weight = embedding.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def layers(config: Config) -> nn.Sequential:
    """Return a new model, from bytes (B, C) int64 to logits (B, C, 256)."""
    model = LanguageModel(config)
    blocks = [PositionedBlock(block, model.cos.clone(), model.sin.clone()) for block in model.blocks]
    return nn.Sequential(model.embedding, *blocks, Head(model.norm, model.embedding))


def balance(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, as equal as possible; embedding and head count as layers."""
    size, rest = divmod(layers, stages)
    return [size + (number < rest) for number in range(stages)]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all bytes, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Run:
    """Trains a model; subclasses compute gradients in different ways."""

    def __init__(self, config: Config, micro_batches: int, dtype: torch.dtype) -> None:
        torch.manual_seed(config.seed)
        self.config, self.micro_batches = config, micro_batches
        self.model = layers(config).to(dtype)
        self.optimizer = make_optimizer(self.model, config)
        self.history = History()

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        """Leave the gradients in the parameters, and return the mean loss."""
        raise TypeError(f"{type(self).__name__} does not say how gradients are made")

    def step(self, batches: Batches) -> None:
        """Make one optimizer step."""
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
    """Runs forward and backward of one micro-batch after another."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        set_aux_loss_scale(self.model, 1 / self.micro_batches)
        total = 0.0
        for x, y in zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True):
            loss = cross_entropy(self.model(x), y) / self.micro_batches
            loss.backward()
            total += loss.item()
        return total


class Pipelined(Run):
    """Trains in a pipeline, which also weights the auxiliary losses of the MoE layers."""

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
        """Return the record of the last step."""
        record = self.pipe.last_run
        assert record is not None, "no step has been made"
        return record


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between two runs."""

    loss: float
    parameter: float
    expert_bias: float


def difference(a: Run, b: Run) -> Difference:
    """Return the differences of all steps' losses, and of the current parameters and expert biases."""
    parameters = zip(a.model.parameters(), b.model.parameters(), strict=True)
    biases = zip(expert_biases(a.model), expert_biases(b.model), strict=True)
    return Difference(
        max(abs(x - y) for x, y in zip(a.history.loss, b.history.loss, strict=True)),
        max(float((x - y).detach().abs().max()) for x, y in parameters),
        max((float((x - y).abs().max()) for x, y in biases), default=0.0),
    )


def expert_biases(model: nn.Module) -> list[Tensor]:
    """Return the expert biases of all MoE layers that have one."""
    found = [module.router.expert_bias for module in model.modules() if isinstance(module, MoE)]
    return [bias for bias in found if bias is not None]


TOLERANCES = {"float64": 1e-12, "float32": 1e-4}
"""Permitted differences of losses, in nats per byte. In float32, rounding may change the expert that a byte is sent to,
and so all later losses."""


def main(argv: list[str]) -> int:
    """Train; return 0 if all checks hold."""
    options = parse(argv)
    torch.set_num_threads(1)  # one thread for each stage and for the plain loop
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


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
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
    """Run the same steps in both runs, in turn."""
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
    """Print and write the results; return the exit status."""
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
    """Return the record for the JSON file."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
