"""Load a checkpoint that is larger than the memory in few bits, generate text, save the model and load it again.

    python -m benchmarks.large_checkpoint [--model NAME] [--layers N] [--sizes NAME=N,...] [--bits 4|8]
                                          [--linear-bits 4|8] [--limit GIB] [--tokens N] [--shard GB] [--discard]
                                          [--folder DIR] [--render] [--output DIR]

Writes random weights in a published model's sizes, Qwen3-30B-A3B's by default, in bfloat16 and the hub's layout. A
process loads them by ``from_pretrained`` with a ``PymoeConfig``, generates greedily, and saves the packed model. Two
more processes load the saved model, one of them after its files have left the system's cache. All three must compute
the same logits; torch's products may round differently if weights are mapped from files; the report then says so.

``--limit`` is for the anonymous memory of each process, read every millisecond: without swap the system cannot take
this memory back. Pages of files are not counted, since it can. A process that exceeds the limit is ended, and the run
ends with it.

``--discard`` removes the checkpoint's files once they are loaded, before the packed model is saved: 61 GB and 18 GB
need not be on the disk together. For that, the weights that are mapped from the files are copied into memory first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.comparison import relative_error, verdict
from benchmarks.common.run import Run, as_report, closeness, measured, parser_of, show_sections, spread_of
from benchmarks.layers.checkpoints import WAYS, AnonymousMemory, anonymous, load, write_checkpoint
from benchmarks.models.configurations import MODELS
from benchmarks.models.systems import ids_of
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles
from pymoe.nn.prefetch import mappings

Record = dict[str, Any]
RENDERED = Path(__file__).parent / "results" / "large_checkpoint.md"
FIRST, COLD, WARM = STEPS = ("checkpoint, packed while it is read", "saved model, files not in memory", "saved model")
EXPECTED = "expected.pt"
"""File of the first step's logits and tokens."""
PROMPT = 16
"""Tokens of the prompt."""
TOLERANCE = 1e-2
"""Largest relative error of logits in bfloat16."""


def main() -> int:
    """Run all steps; return 1 if a process failed or logits are wrong."""
    options = parse()
    if options.step:
        print(json.dumps(work(options)))
        return 0
    whole, packed = options.folder / "whole", options.folder / "packed"
    remove(options.folder)
    settings = {"model": MODELS[options.model].title, "of": MODELS[options.model].layers}
    settings |= {name: getattr(options, name) for name in ("layers", "bits", "linear_bits", "limit", "discard")}
    run = Run("large_checkpoint", options.output, settings, steps=[])
    start = time.perf_counter()
    config = replace(MODELS[options.model], sizes=MODELS[options.model].sizes | options.sizes).build(options.layers)
    check_disk(options, config)
    settings["checkpoint_bytes"] = write_checkpoint(whole, config, round(options.shard * 1e9))
    print(f"{whole}: {settings['checkpoint_bytes'] / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s", flush=True)
    for step in STEPS:
        if step == COLD:
            forget(packed)
        command = [sys.executable, "-m", "benchmarks.large_checkpoint", *sys.argv[1:], "--step", step]
        done = subprocess.run([*command, "--began", str(time.time())], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"large_checkpoint: {step}: exit status {done.returncode}", file=sys.stderr)
            break
        run.result["steps"].append({"step": step, **json.loads(done.stdout.splitlines()[-1])})
        run.keep(markdown)
    if run.result["steps"]:
        show_sections(sections(run.result))
    if options.render and len(run.result["steps"]) == len(STEPS):
        RENDERED.write_text(markdown(run.result))
    remove(options.folder)
    return int(len(run.result["steps"]) < len(STEPS) or any(one["verdict"] == "WRONG" for one in run.result["steps"]))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("large_checkpoint", __doc__ or "")
    parser.add_argument("--model", choices=MODELS, default="qwen3", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--layers", type=int, metavar="N", help="default: those of the published model")
    parser.add_argument("--sizes", type=sizes_of, default={}, metavar="NAME=N,...", help="of the configuration")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--linear-bits", type=int, choices=(4, 8))
    parser.add_argument("--limit", type=float, default=23.0, metavar="GIB", help="of memory (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="to generate (default: %(default)s)")
    parser.add_argument(
        "--shard", type=float, default=4.0, metavar="GB", help="of the checkpoint's files (default: %(default)s)"
    )
    parser.add_argument("--discard", action="store_true", help="remove the checkpoint before the model is saved")
    parser.add_argument("--folder", type=Path, default=Path("build/large_checkpoint/models"), metavar="DIR")
    parser.add_argument("--render", action="store_true", help="write the tables to benchmarks/results, too")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.layers = options.layers or MODELS[options.model].layers
    if options.tokens < 2:
        parser.error(f"--tokens: expected at least 2, got {options.tokens}")
    return options


def sizes_of(text: str) -> dict[str, int]:
    """Parse sizes that replace those of the model's configuration."""
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split(",") if part)}


def check_disk(options: argparse.Namespace, config: Any) -> None:
    """End the program if the disk has no room for the checkpoint and, unless it is discarded, the packed model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = 2 * AutoModelForCausalLM.from_config(config).num_parameters()
    needed = round(size * (1 if options.discard else 1 + options.bits / 10))
    options.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.folder).free
    if free < needed:
        sys.exit(f"large_checkpoint: expected {needed / 1e9:.0f} GB free in {options.folder}, got {free / 1e9:.0f}")


def remove(folder: Path) -> None:
    """Remove what a run writes into its folder."""
    for part in ("whole", "packed"):
        shutil.rmtree(folder / part, ignore_errors=True)
    (folder / EXPECTED).unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Write a folder's files to the disk, and let the system drop their pages."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def work(options: argparse.Namespace) -> Record:
    """Load the model of a step in this process, generate, and save it if it has been packed here.

    Returns:
        Seconds and bytes; the verdict on the logits, compared with those of the first step; whether the tokens are the
        same.
    """
    import transformers  # noqa: F401  # memory counts after the imports

    import pymoe.integrations.transformers  # noqa: F401

    whole, packed = options.folder / "whole", options.folder / "packed"
    imports = anonymous()
    with AnonymousMemory(round(options.limit * 2**30)) as memory:
        if options.step == FIRST:
            model, record = load(WAYS[1], whole, options.bits, options.linear_bits)
        else:
            model, record = load(WAYS[2], packed, options.bits)
        record["from the start"] = time.time() - options.began
        logits, tokens, generated = generate(model, options.tokens)
        record |= {**generated, "loading peak": record["peak"]}
        kept = options.folder / EXPECTED
        if options.step == FIRST:
            torch.save((logits, tokens), kept)
            if options.discard:
                discard(whole, model)
            start = time.perf_counter()
            model.save_pretrained(packed)
            record["save"] = time.perf_counter() - start
        expected = torch.load(kept)
    written = sum(file.stat().st_size for file in packed.iterdir())
    error = relative_error(logits, expected[0])
    record |= {"error": error, "verdict": verdict(error, TOLERANCE), "same tokens": torch.equal(tokens, expected[1])}
    return {**record, "written": written, "peak": memory.peak, "imports": imports}


def generate(model: Any, count: int) -> tuple[torch.Tensor, torch.Tensor, Record]:
    """Return a prompt's logits, the ``count`` tokens that follow it, and the seconds for the prompt and for each
    token.
    """
    prompt = torch.from_numpy(ids_of(model.config.vocab_size, 1, PROMPT, 0))
    with torch.no_grad():
        logits = model(prompt).logits
    clock = Clock()
    tokens = model.generate(prompt, max_new_tokens=count, do_sample=False, streamer=clock)
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    speeds = Quartiles.of([1 / one for one in seconds[1:]])
    return logits, tokens, {"prompt": seconds[0], "tokens": vars(speeds)}


class Clock:
    """Keeps the times at which ``generate`` hands on the prompt and every token after it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        """Keep the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def discard(folder: Path, model: Any) -> None:
    """Remove the files of a model, and copy the weights that are mapped from them into memory.

    A removed file keeps its place on the disk as long as a part of it is mapped.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    if any(folder.resolve() in Path(one.path).parents for one in mappings()):
        raise RuntimeError(f"discard: expected no file to be mapped any more, got some of {folder}")
    shutil.rmtree(folder)


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return the table of loading and memory, and the table of generating."""
    steps = result["steps"]
    columns = ("load", "first forward", "from the start")
    loading = [
        [one["step"], *(f"{one[key]:.1f}" for key in columns), *(f"{one[key] / 1e6:,.0f}" for key in MEMORY)]
        for one in steps
    ]
    generating = [
        [
            one["step"],
            spread_of(one["tokens"], "{:.2f}"),
            f"{one['prompt']:.2f}",
            closeness(one),
            "the same" if one["same tokens"] else "others",
        ]
        for one in steps
    ]
    return [
        (
            "Seconds and memory",
            Table(
                [
                    *("from", "loaded, s", "first token computed, s", "the same with Python's start and imports, s"),
                    *("imports, MB", "peak of loading, MB", "peak of all, MB", "packed weights, MB"),
                ],
                loading,
                left=frozenset({"from"}),
            ),
        ),
        (
            "Generating one sequence",
            Table(
                ["from", "tokens/s", f"prompt of {PROMPT} tokens, s", "logits", "tokens"],
                generating,
                left=frozenset({"from", "logits", "tokens"}),
                alarms=frozenset({"WRONG"}),
            ),
        ),
    ]


MEMORY = ("imports", "loading peak", "peak", "packed")


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    settings, first = result["settings"], result["steps"][0]
    dense = f", dense layers in {settings['linear_bits']}" if settings["linear_bits"] else ""
    removed = " after the checkpoint had been removed" if settings["discard"] else ""
    about = (
        f"Random weights in the sizes of {settings['model']}, {settings['layers']} of {settings['of']} "
        f"layers: {settings['checkpoint_bytes'] / 1e9:.2f} GB in bfloat16. Experts in {settings['bits']} bits{dense}. "
        f"Each line is a process that may have {settings['limit']:g} GiB of anonymous memory; peaks are above that of "
        f"the imports, and read every millisecond. The first process wrote {first['written'] / 1e9:.2f} GB in "
        f"{first['save']:.0f} s{removed}. Speeds are medians with quartiles of one `generate` without sampling."
    )
    return as_report([measured(result, about, f"{torch.get_num_threads()} torch threads")], sections(result))


if __name__ == "__main__":
    sys.exit(main())
