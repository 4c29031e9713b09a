"""Measure steps of fine-tuning: all weights, LoRA on attention, LoRA on experts, over bfloat16 and over 4 bits.

    python -m benchmarks.finetune [--models olmoe,qwen3] [--trainings full,attention,experts] [--layers N] [--tokens N]
                                  [--rank N] [--steps N] [--rounds N] [--threads N] [--output DIR]

A step is forward, backward and AdamW, of a model with a few layers of a published model's sizes and a small vocabulary.
Weights are random. Every way runs in a process of its own, all of them once a round; the first step of a process is not
counted. "4 bits" are experts in 4 bits and dense layers in 8. The peak of memory is that of the steps above what the
process had before the model was built, so it counts the model, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.children import ROOT
from benchmarks.common.run import Run, as_report, measured, names_of, parser_of, show_sections, spread_of
from benchmarks.common.targets import checked_target, targets_table
from benchmarks.models.configurations import PUBLISHED
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles

Record = dict[str, Any]
VOCABULARY = 1024
"""Tokens of the models' vocabulary: embedding and head are not what is measured."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TRAININGS = {"full": "all weights", "attention": "LoRA on attention", "experts": "LoRA on experts"}


class Way(NamedTuple):
    """Describes how a step is computed."""

    training: str
    weights: str
    """"bf16" or "4 bits"."""
    experts: str
    """An implementation of experts; "pymoe, by PEFT" is pymoe's with the copy of all experts that PEFT makes."""


BY_PEFT = "pymoe, by PEFT"
WAYS = [
    *(Way(training, "bf16", experts) for training in TRAININGS for experts in ("pymoe", "eager", "grouped_mm")),
    Way("experts", "bf16", BY_PEFT),
    Way("attention", "4 bits", "pymoe"),
    Way("experts", "4 bits", "pymoe"),
]


def main() -> int:
    """Measure, write and show the tables; return 1 if a way failed."""
    options = parse()
    if options.way is not None:
        print(json.dumps(work(options, Way(*options.way))))
        return 0
    names = ("layers", "tokens", "rank", "steps", "rounds", "threads")
    run = Run("finetune", options.output, {name: getattr(options, name) for name in names}, steps=[], errors={})
    ways = [way for way in WAYS if way.training in options.trainings]
    for _ in range(options.rounds):
        for model in options.models:
            for way in ways:
                try:
                    run.result["steps"].append({"model": model, "way": way, **in_process(options, model, way)})
                except subprocess.CalledProcessError as error:
                    run.result["errors"][f"{model}: {', '.join(way)}"] = error.stderr.strip().splitlines()[-1]
                run.keep(markdown)
    show_sections(sections(run.result))
    for place, reason in run.result["errors"].items():
        print(f"{place}: {reason}")
    return int(bool(run.result["errors"]))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("finetune", __doc__ or "")
    parser.add_argument("--models", type=names_of(PUBLISHED), default=["olmoe", "qwen3"], metavar="NAME,...")
    parser.add_argument("--trainings", type=names_of(TRAININGS), default=list(TRAININGS), metavar="NAME,...")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of a step (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, metavar="N", help="of adapters (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of a process (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of a way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--shrink", type=int, default=1, help=argparse.SUPPRESS)  # for the test of this program
    parser.add_argument("--way", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(options: argparse.Namespace, model: str, way: Way) -> Record:
    """Measure a way in a process of its own."""
    numbers = ("layers", "tokens", "rank", "steps", "threads", "shrink")
    arguments = [part for name in numbers for part in (f"--{name}", str(getattr(options, name)))]
    command = [sys.executable, "-m", "benchmarks.finetune", "--models", model, *arguments, "--way", *way]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    record: Record = json.loads(run.stdout.splitlines()[-1])
    return record


def work(options: argparse.Namespace, way: Way) -> Record:
    """Measure steps of one way in this process."""
    torch.set_num_threads(options.threads)
    import transformers  # noqa: F401  # memory counts after these imports

    import peft  # isort: skip

    import pymoe.integrations.transformers  # noqa: F401

    before = memory("VmRSS")
    (model,) = options.models
    trained = adapted(built(PUBLISHED[model], options, way), options, way)
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    tokens = torch.randint(VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    if way.experts == BY_PEFT:
        kind = peft.tuners.lora.layer.ParamWrapper
        kind._activate_lora = kind._activate_lora.__wrapped__
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in memory
    record: Record = {"seconds": [], "processor": [], "losses": []}
    for _ in range(options.steps + 1):
        train_step(trained, optimizer, tokens, record)
    record["peak"] = memory("VmHWM") - before
    return record | {"seconds": record["seconds"][1:], "processor": record["processor"][1:]}


def built(published: Any, options: argparse.Namespace, way: Way) -> Any:
    """Return the model whose weights are trained or adapted."""
    from transformers import AutoModelForCausalLM

    from pymoe.nn import quantize_experts, quantize_linears

    config = published.build(options.layers)
    config.vocab_size = VOCABULARY
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, getattr(config, name) // options.shrink)
    torch.manual_seed(0)
    implementation = "pymoe" if way.experts == BY_PEFT else way.experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    if way.weights == "4 bits":
        model.eval()
        quantize_experts(model, 4)
        quantize_linears(model, 8)
    return model.train()


def adapted(model: Any, options: argparse.Namespace, way: Way) -> Any:
    """Return the model with adapters, or as it is to train all weights."""
    import peft

    if way.training == "full":
        return model
    targets: Record = {"target_modules": ATTENTION}
    if way.training == "experts":
        targets = {"target_modules": [], "target_parameters": EXPERTS}
    return peft.get_peft_model(model, peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, **targets))


def train_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, record: Record) -> None:
    """Train on tokens, (1, T), and add the step's seconds, processor time and loss to the lists of a record."""
    start, used = time.perf_counter(), processor()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    record["seconds"].append(time.perf_counter() - start)
    record["processor"].append(processor() - used)
    record["losses"].append(loss.item())


def memory(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


def processor() -> float:
    """Return the seconds of processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# The report.


def found(result: Record, model: str, way: Way, what: str) -> list[float]:
    """Return all figures of a way, over its rounds."""
    records = [one for one in result["steps"] if one["model"] == model and tuple(one["way"]) == way]
    return [value for one in records for value in (one[what] if isinstance(one[what], list) else [one[what]])]


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return a table for each model, and the targets."""
    heading = ["trained", "weights", "experts", "ms", "processor, ms", "peak, MB", "loss after the steps"]
    tables = []
    for model in dict.fromkeys(one["model"] for one in result["steps"]):
        rows = []
        for way in WAYS:
            if losses := found(result, model, way, "losses"):
                times = (Quartiles.of(found(result, model, way, what)) for what in ("seconds", "processor"))
                cells = [spread_of(asdict(one), "{:,.0f}", 1e3) for one in times]
                peak = Quartiles.of(found(result, model, way, "peak")).median
                names = [TRAININGS[way.training], way.weights, way.experts]
                rows.append([*names, *cells, f"{peak / 1e6:,.0f}", f"{losses[-1]:.4f}"])
        tables.append((PUBLISHED[model].title, Table(heading, rows, frozenset(heading[:3]))))
    return [*tables, ("Targets", targets_table(targets(result)))]


def targets(result: Record) -> list[Record]:
    """Return the targets for every model."""
    rows, by_peft = Way("experts", "bf16", "pymoe"), Way("experts", "bf16", BY_PEFT)
    few_bits = Way("experts", "4 bits", "pymoe")
    return [
        checked_target(f"{PUBLISHED[model].title}: {what}", relation, limit, ratio(result, model, *ways))
        for model in dict.fromkeys(one["model"] for one in result["steps"])
        for what, relation, limit, ways in (
            ("processor time, PEFT's way to rows", ">=", 3.5, (by_peft, rows)),
            ("processor time, LoRA over 4 bits to over bf16", "<=", 1.3, (few_bits, rows)),
        )
    ]


def ratio(result: Record, model: str, over: Way, under: Way) -> Record | None:
    """Return the ratio of two ways' processor time, with its quartiles over the steps of both."""
    pairs = zip(found(result, model, over, "processor"), found(result, model, under, "processor"), strict=False)
    ratios = [one / other for one, other in pairs]
    return asdict(Quartiles.of(ratios)) if ratios else None


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    settings = result["settings"]
    about = (
        f"Steps of {settings['tokens']} tokens, a vocabulary of {VOCABULARY}, rank {settings['rank']}; number of layers: "
        f"{settings['layers']}. Medians and quartiles; number of processes: {settings['rounds']}, of steps in each: "
        f"{settings['steps']}. Experts in 4 bits have dense layers in 8 next to them."
    )
    failed = [f"{place}: {reason}" for place, reason in result["errors"].items()]
    first = [measured(result, about, f"{settings['threads']} torch threads"), *failed]
    return as_report(first, sections(result))


if __name__ == "__main__":
    raise SystemExit(main())
