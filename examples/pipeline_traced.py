"""Trains a model of the transformers library in pipelines of two and four stages, and compares it with the model alone.

    python examples/pipeline_traced.py                 # about a minute on two cores
    python examples/pipeline_traced.py --architecture gpt2 --cut flops --schedule zero-bubble
    python -m pymoe.pipe.schedules                     # what each schedule plans

The model is a small one of the library, built from a configuration; nothing is downloaded, and no code of the model is
changed. pymoe.pipeline captures it, and a split policy chooses the cuts. All stages use Llama's rotary tables from the
first stage, and the head shares the embedding's weight. All runs start from the same weights and read the same bytes of
the Python manual, first in float64, then in float32; their losses must be equal. At the end the program checks the
results, and exits with status 1 if a check fails. It writes a record and pictures to runs/pipeline_traced.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "matplotlib", "transformers"))

import argparse
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from common import (
    INTERRUPTED,
    Batches,
    InPipeline,
    TextError,
    Training,
    are_equal,
    at_least,
    difference,
    load_text,
    machine_facts,
    parser_of,
    print_step_times,
    take_turns,
    tell,
    write_record,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import pymoe
from pymoe.pipe import split_by_flops, split_by_time, split_into_equal_parameters
from pymoe.pipe.schedules import names, png

matplotlib.use("Agg")

BYTES = 256
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES = ("llama", "gpt2", "qwen3")


def new_model(architecture: str, width: int, layers: int, context: int) -> nn.Module:
    """Return a new model, whose head shares the embedding's weight; ``model(input_ids).logits`` is (rows, context,
    256).
    """
    if architecture == "gpt2":
        sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": width // 16, "n_positions": context}
        sizes |= NO_DROPOUT
    else:
        sizes = {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 16,
            "num_key_value_heads": width // 32,
            "head_dim": 16,
            "max_position_embeddings": context,
        }
    config = AutoConfig.for_model(
        architecture,
        vocab_size=BYTES,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config)


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Return the loss of the model's output: the mean over all bytes, in nats."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


CUTS = {"parameters": split_into_equal_parameters, "flops": split_by_flops, "time": split_by_time}


class Run(Training):
    """Trains the library's model without a pipeline."""

    def __init__(self, options: Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(options.seed)
        model = new_model(options.architecture, options.width, options.layers, options.context).to(dtype)
        super().__init__(options, model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate))

    def batch(self, data: Batches, step: int) -> tuple[Tensor, Tensor]:
        return data.batch(step)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(input_ids=inputs), targets)


class Pipelined(InPipeline, Run):
    """Trains the library's model in a pipeline of ``stages`` stages."""

    def __init__(self, options: Namespace, dtype: torch.dtype, stages: int) -> None:
        super().__init__(options, dtype)
        self.name = f"{stages} stages"
        rows = -(-options.rows // options.micro_batches)
        example = torch.randint(BYTES, (max(2, rows), options.context))
        start = time.perf_counter()
        self.pipe = pymoe.pipeline(
            self.model,
            (),
            {"input_ids": example},
            split_policy=CUTS[options.cut](stages),
            chunks=options.micro_batches,
            checkpoint=options.checkpoint,
        )
        self.capture_seconds = time.perf_counter() - start

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.pipe.step(input_ids=inputs, target=targets, loss_fn=cross_entropy, schedule=self.options.schedule)

    @property
    def parameters_of_stages(self) -> list[int]:
        """Return the number of parameters of each stage; a shared parameter counts in every stage that has it."""
        stages = map(self.pipe.get_stage_module, range(self.pipe.num_stages))
        return [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]


Runs = tuple[Run, Sequence[Pipelined]]  # the model alone, and pipelines

TOLERANCES = {"float64": 1e-12, "float32": 1e-4}
"""Nats per byte."""
FALL = 0.9


def make_record(options: Namespace, exact: Runs, runs: Runs, seconds: float) -> dict[str, Any]:
    """Return all measurements."""
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
    """Return the measurements of one run in float32."""
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
    """Return each stage's seconds of computing in the last step."""
    seconds = [0.0] * run.pipe.num_stages
    for worker in run.as_run.spans:
        for span in worker:
            seconds[span.action.stage] += span.end - span.start
    return seconds


def same_weights(run: Pipelined) -> bool:
    """Return whether the pipe's state loads into a plain model, under the model's names and with equal values."""
    options = run.options
    other = new_model(options.architecture, options.width, options.layers, options.context)
    other = other.to(next(run.model.parameters()).dtype)
    other.load_state_dict(run.pipe.state_dict())
    pairs = zip(other.parameters(), run.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def same_outputs(run: Pipelined) -> float:
    """Return the largest difference between the outputs of pipe and model, on a text of another length."""
    length = max(2, run.options.context // 2)
    shape = 2 * run.options.micro_batches + 1, length
    text = torch.randint(BYTES, shape, generator=torch.Generator().manual_seed(1))
    run.pipe.eval()
    ours, theirs = run.pipe(input_ids=text), run.model(input_ids=text)
    run.pipe.train()
    assert type(ours) is type(theirs), f"{type(ours).__name__} is not {type(theirs).__name__}"
    return float((ours.logits - theirs.logits).abs().max())


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the runs: for each a sentence and its result."""
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


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind eyes


def plot(record: dict[str, Any], path: Path) -> Path:
    """Draw the losses of all runs, which coincide; below them, each stage's share of parameters and of time."""
    runs = record["runs"]
    figure, (curves, bars) = plt.subplots(2, 1, figsize=(7.5, 6.2), layout="constrained", height_ratios=(3, 2))
    for number, (name, one) in enumerate(runs.items()):
        label = f"{name}: {1e3 * one['median_step_seconds']:.0f} ms a step"
        style = ("-", "--", ":", "-.")[number % 4]
        curves.plot(one["loss"], style, lw=4 - min(number, 3), color=COLORS[number % 4], label=label)
    curves.set_title(f"{record['model']} on the Python manual, {record['parameters']:,} parameters", fontsize=10)
    curves.set_xlabel(f"training step ({record['options']['rows']} x {record['options']['context']} bytes each)")
    curves.set_ylabel("loss (nats per byte)")
    curves.legend(frameon=False, fontsize=8)
    lines = [
        (f"{name}: {what}", one[key])
        for name, one in runs.items()
        if "parameters_of_stages" in one
        for what, key in (("parameters", "parameters_of_stages"), ("time", "busy_seconds_of_stages"))
    ]
    for height, (_, values) in enumerate(lines):
        left = 0.0
        for stage, value in enumerate(values):
            share = value / sum(values)
            bars.barh(height, share, left=left, color=COLORS[stage % 4], edgecolor="white")
            bars.text(left + share / 2, height, f"{share:.0%}", ha="center", va="center", color="white", fontsize=8)
            left += share
    bars.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=8)
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.set_xticks([])
    bars.set_title(f"shares of the stages, cut by {record['options']['cut']}", fontsize=10)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    curves.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main(argv: list[str]) -> int:
    """Train; return 0 if all checks hold."""
    options = parse(argv)
    torch.set_num_threads(1)  # one thread for each stage and for the model alone
    start = time.perf_counter()
    try:
        data = load_text(options.text, options.context).train
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    batches = Batches(data, options.context, options.rows, options.seed)
    try:
        exact = train(options, batches, torch.float64, options.exact_steps)
        plain, pipelines = train(options, batches, torch.float32, options.steps)
    except KeyboardInterrupt:
        print("\nstopped")
        return INTERRUPTED
    for run in pipelines:
        show(run)
    record = make_record(options, exact, (plain, pipelines), time.perf_counter() - start)
    found = checks(record)
    record["checks"] = found
    options.out.mkdir(parents=True, exist_ok=True)
    files = [write_record(record, options.out), plot(record, options.out / "losses.png")]
    files += [png(options.out / f"{run.pipe.num_stages}_stages.png", run.as_planned, run.as_run) for run in pipelines]
    print("\n" + "\n".join(map(str, files)) + "\n")
    print_step_times(record)
    return tell(found)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    number = at_least(1)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama", help="(default: llama)")
    parser.add_argument("--cut", choices=CUTS, default="parameters", help="what stages share (default: parameters)")
    parser.add_argument("--stages", type=at_least(2), nargs="+", default=[2, 4], metavar="P", help="(default: 2 4)")
    parser.add_argument("--schedule", choices=names(), default="1f1b", help="(default: 1f1b)")
    parser.add_argument(
        "--checkpoint", choices=("always", "except_last", "never"), default="never", help="(default: never)"
    )
    parser.add_argument("--micro-batches", type=number, default=8, metavar="M", help="of a step (default: 8)")
    parser.add_argument("--rows", type=number, default=20, metavar="N", help="windows of a step (default: 20)")
    parser.add_argument("--steps", type=number, default=40, metavar="N", help="in float32 (default: 40)")
    parser.add_argument("--exact-steps", type=number, default=3, metavar="N", help="in float64 (default: 3)")
    parser.add_argument("--width", type=at_least(32), default=96, metavar="H", help="of the model (default: 96)")
    parser.add_argument("--layers", type=number, default=6, metavar="L", help="of the model (default: 6)")
    parser.add_argument("--context", type=at_least(4), default=96, metavar="C", help="bytes of a window (default: 96)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, metavar="LR", help="(default: 3e-3)")
    parser.add_argument("--text", default="", metavar="FILE", help="to train on (default: the Python manual)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline_traced"), metavar="DIR", help="for the results")
    options = parser.parse_args(argv)
    if options.width % 32:
        parser.error(f"--width must be a multiple of 32, got {options.width}")
    if options.rows < 2 * options.micro_batches:  # the library's code treats a batch of one row differently
        parser.error(f"--rows must be at least 2 for each of {options.micro_batches} micro-batches, got {options.rows}")
    return options


def train(options: argparse.Namespace, batches: Batches, dtype: torch.dtype, steps: int) -> tuple[Run, list[Pipelined]]:
    """Train the model alone and every pipeline on the same steps, in turn."""
    pipelines = [Pipelined(options, dtype, stages) for stages in options.stages]
    alone = Run(options, dtype)
    take_turns([alone, *pipelines], batches, dtype, steps)
    return alone, pipelines


def show(run: Pipelined) -> None:
    """Print the cuts, and draw the schedule as planned and as run."""
    print(f"\n{run.name}, cut by {run.options.cut}; captured in {run.capture_seconds:.1f} s")
    print(run.pipe.info())
    run.show_schedule()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
