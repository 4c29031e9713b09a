"""Fine-tune a model whose 16-bit weights are larger than the memory: LoRA on attention and experts, over 4 bits.

    python -m benchmarks.finetune_large [--model NAME] [--layers N] [--steps N] [--tokens N] [--rank N] [--rate R]
                                        [--limit GIB] [--folder DIR] [--keep] [--output DIR]

The first process draws random weights in a published model's sizes, Qwen3-30B-A3B's by default, layer by layer, rounds
experts to 4 bits and dense layers to 8, and saves the model: its 16-bit weights are never together in memory or on
the disk. The second process loads the saved model, which maps the packed weights, and trains adapters on the bytes of
the Python manual with AdamW. Every step sees other bytes; the mean loss of the first and of the last steps is reported.

``--limit`` is for the resident memory of the second process, pages of mapped files included, at its peak.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.children import ROOT
from benchmarks.common.run import Run, as_report, measured, parser_of, show_sections, spread_of
from benchmarks.common.targets import checked_target, targets_table
from benchmarks.finetune import ATTENTION, EXPERTS, memory, train_step
from benchmarks.models.configurations import MODELS
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles

Record = dict[str, Any]


def main() -> int:
    """Make the model, train its adapters, and write and show the tables; return 1 if a target is missed."""
    options = parse()
    if options.part is not None:
        print(json.dumps({"made": made, "trained": trained}[options.part](options)))
        return 0
    settings = {"model": MODELS[options.model].title, "of": MODELS[options.model].layers}
    settings |= {name: getattr(options, name) for name in ("layers", "steps", "tokens", "rank", "rate", "limit")}
    run = Run("finetune_large", options.output, settings)
    try:
        for part in ("made", "trained"):
            if part == "made" and (options.folder / "config.json").exists():
                continue
            command = [sys.executable, "-m", "benchmarks.finetune_large", *sys.argv[1:], "--part", part]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            run.result[part] = json.loads(done.stdout.splitlines()[-1])
    finally:
        if not options.keep:
            shutil.rmtree(options.folder, ignore_errors=True)
    run.keep(markdown)
    show_sections(sections(run.result))
    return int(any(not one["met"] for one in targets(run.result)))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("finetune_large", __doc__ or "")
    models = [name for name in MODELS if name.endswith(("olmoe", "qwen3"))]
    parser.add_argument("--model", choices=models, default="qwen3", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--layers", type=int, metavar="N", help="default: those of the published model")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of a step (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=4, metavar="N", help="of adapters (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, metavar="R", help="of AdamW (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=23.0, metavar="GIB", help="of memory (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/finetune_large/model"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep the model, and use it if it is there already")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.layers = options.layers or MODELS[options.model].layers
    options.folder = options.folder.resolve()
    return options


def made(options: argparse.Namespace) -> Record:
    """Save a model of random weights whose experts have 4 bits and whose dense layers have 8."""
    from transformers import AutoModelForCausalLM

    import pymoe.integrations.transformers  # noqa: F401  # quantize_experts finds the experts
    from pymoe.nn import quantize_experts, quantize_linears

    start = time.perf_counter()
    config = MODELS[options.model].build(options.layers)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="pymoe").eval()
    initialise = model._init_weights
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for layer in model.model.layers:
        layer.to_empty(device="cpu").apply(initialise)
        quantize_experts(layer, 4)
    for module in model.modules():
        if any(tensor.is_meta for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            module.to_empty(device="cpu", recurse=False)
            initialise(module)
    quantize_linears(model, 8)
    model.save_pretrained(options.folder)
    written = sum(file.stat().st_size for file in options.folder.iterdir())
    return {"seconds": time.perf_counter() - start, "whole": whole, "written": written}


def trained(options: argparse.Namespace) -> Record:
    """Train adapters of the saved model."""
    from pydoc_data.topics import topics

    import peft
    from transformers import AutoModelForCausalLM

    import pymoe.integrations.transformers  # noqa: F401  # from_pretrained reads the packed weights

    start = time.perf_counter()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(options.folder)
    adapters = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=ATTENTION, target_parameters=EXPERTS
    )
    model = peft.get_peft_model(base, adapters).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.rate)
    text = "\n".join(topics.values()).encode()[: options.steps * options.tokens]
    record: Record = {
        **{"loaded": time.perf_counter() - start, "seconds": [], "processor": [], "losses": []},
        "parameters": sum(parameter.numel() for parameter in parameters),
    }
    for tokens in torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(options.tokens):
        train_step(model, optimizer, tokens[None], record)
        print(f"loss {record['losses'][-1]:.3f}, {record['seconds'][-1]:.1f} s", file=sys.stderr, flush=True)
    return record | {"peak": memory("VmHWM"), "anonymous": memory("RssAnon")}


# The report.


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return the table of the run, the table of losses, and the targets."""
    run, losses = result["trained"], result["trained"]["losses"]
    times = (spread_of(asdict(Quartiles.of(run[what])), "{:.1f}") for what in ("seconds", "processor"))
    heading = ["trained numbers", "step, s", "processor time, s", "resident memory at the peak, GB", "anonymous, GB"]
    cells = [f"{run['parameters']:,}", *times, f"{run['peak'] / 1e9:.2f}", f"{run['anonymous'] / 1e9:.2f}"]
    steps = range(0, len(losses), max(len(losses) // 10, 1))
    by_step = Table(["step", *(str(step + 1) for step in steps)], [["loss", *(f"{losses[one]:.2f}" for one in steps)]])
    return [
        ("Fine-tuning", Table(heading, [cells])),
        ("Losses", by_step),
        ("Targets", targets_table(targets(result))),
    ]


def targets(result: Record) -> list[Record]:
    """Return the targets: memory, and a falling loss."""
    run, losses = result["trained"], result["trained"]["losses"]
    few = max(len(losses) // 4, 1)
    before, after = (sum(some) / few for some in (losses[:few], losses[-few:]))
    found = {
        "resident memory at the peak, GiB": ("<=", result["settings"]["limit"], run["peak"] / 2**30),
        f"mean loss of the last {few} steps over that of the first {few}": ("<=", 1.0, after / before),
    }
    return [
        checked_target(what, relation, limit, {"low": value, "median": value, "high": value})
        for what, (relation, limit, value) in found.items()
    ]


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    settings, making = result["settings"], result.get("made")
    about = (
        f"Random weights in the sizes of {settings['model']}, {settings['layers']} of {settings['of']} layers, experts "
        f"in 4 bits and dense layers in 8. LoRA of rank {settings['rank']} in float32 on attention and on all experts; "
        f"{settings['steps']} steps of {settings['tokens']} tokens (bytes of the Python manual), forward, backward and "
        f"AdamW; medians with quartiles."
    )
    if making:
        about += (
            f" The model took {making['seconds']:.0f} s to make and has {making['written'] / 1e9:.2f} GB, for "
            f"{making['whole'] / 1e9:.2f} GB of 16-bit weights."
        )
    return as_report([measured(result, about, f"{torch.get_num_threads()} torch threads")], sections(result))


if __name__ == "__main__":
    sys.exit(main())
