"""Measure the peak memory and the seconds of loading a mixture-of-experts checkpoint that is too large for its machine.

    python -m benchmarks.model_memory [--gigabytes G] [--bits 4|8] [--hidden N] [--ffn N] [--experts N]
                                      [--vocabulary N] [--folder DIR] [--output DIR]

Writes a checkpoint of random weights in Qwen3-MoE's form, with as many layers as make up G gigabytes. Then loads it
whole and quantises it; quantises it while it is read; quantises it by ``python -m pymoe.quantize``; and loads the
files that this command has written. Each is done in a separate process. Counts anonymous memory, which a system
without swap cannot take back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.run import Run, as_report, measured, parser_of, show_sections
from benchmarks.layers.checkpoints import WAYS, AnonymousMemory, load, write_qwen3_moe
from pymoe.bench.report import Table

Record = dict[str, Any]
COMMAND = "python -m pymoe.quantize"
ORDER = (WAYS[0], WAYS[1], COMMAND, WAYS[2])


def main() -> int:
    """Measure every way to load the checkpoint; return 1 if a process failed."""
    options = parse()
    if options.way:
        print(json.dumps(work(options)))
        return 0
    layer = 3 * options.experts * options.ffn * options.hidden * 2
    rest = 2 * options.vocabulary * options.hidden * 2
    layers = max(1, round((options.gigabytes * 1e9 - rest) / layer))
    settings = {"bits": options.bits, "layers": layers, "layer_bytes": layer}
    run = Run("model_memory", options.output, settings, ways=[])
    whole, packed = options.folder / "whole", options.folder / "packed"
    for folder in (whole, packed):
        shutil.rmtree(folder, ignore_errors=True)
    sizes = {name: getattr(options, name) for name in ("hidden", "ffn", "experts", "vocabulary")}
    settings["checkpoint_bytes"] = write_qwen3_moe(whole, layers=layers, **sizes)
    print(f"{whole}: {settings['checkpoint_bytes'] / 1e9:.2f} GB, {layers} layers of {layer / 1e9:.2f} GB of experts")
    failed = False
    for way in ORDER:
        own = ["--way", way, "--folder", str(options.folder), "--bits", str(options.bits)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.model_memory", *own], stdout=subprocess.PIPE, text=True, check=False
        )
        failed |= done.returncode != 0
        if done.returncode == 0:
            run.result["ways"].append({"way": way, **json.loads(done.stdout.splitlines()[-1])})
            run.keep(markdown)
    show_sections([("Memory and time", table(run.result))])
    shutil.rmtree(options.folder)
    return int(failed)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("model_memory", __doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, metavar="G", help="of weights (default: %(default)s)")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--hidden", type=int, default=1024, metavar="N")
    parser.add_argument("--ffn", type=int, default=768, metavar="N", help="inner size of an expert")
    parser.add_argument("--experts", type=int, default=128, metavar="N", help="of a layer")
    parser.add_argument("--vocabulary", type=int, default=32768, metavar="N")
    parser.add_argument("--folder", type=Path, default=Path("build/model_memory/models"), metavar="DIR")
    parser.add_argument("--way", choices=ORDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(options: argparse.Namespace) -> Record:
    """Measure one way to load the checkpoint in this process."""
    whole, packed = options.folder / "whole", options.folder / "packed"
    if options.way != COMMAND:
        return load(options.way, packed if options.way == WAYS[2] else whole, options.bits)[1]
    import transformers  # noqa: F401  # memory counts after this import, as for the other ways

    import pymoe.integrations.transformers  # noqa: F401
    from pymoe import quantize

    start = time.perf_counter()
    with AnonymousMemory() as memory:
        quantize.convert(whole, packed, options.bits, "5GB")
    written = sum(file.stat().st_size for file in packed.iterdir())
    return {"load": time.perf_counter() - start, "peak": memory.peak, "stays": memory.stays, "packed": written}


def table(result: Record) -> Table:
    """Return a table with one row per way to load the checkpoint."""
    heading = ["way", "peak, MB", "after it, MB", "packed or written, MB", "seconds", "to the first forward"]
    rows = [
        [
            one["way"],
            *(f"{one[key] / 1e6:,.0f}" for key in ("peak", "stays", "packed")),
            f"{one['load']:.1f}",
            f"{one['first forward']:.1f}" if "first forward" in one else "",
        ]
        for one in result["ways"]
    ]
    return Table(heading, rows, left=frozenset({"way"}))


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    settings = result["settings"]
    about = (
        f"A checkpoint of {settings['checkpoint_bytes'] / 1e9:.2f} GB in bfloat16, {settings['layers']} layers with "
        f"{settings['layer_bytes'] / 1e6:,.0f} MB of experts each, in {settings['bits']} bits. Memory is anonymous, "
        f"above that of the imports, read every millisecond; pages of files were in the system's cache."
    )
    threads = f"{os.cpu_count()} torch threads"
    return as_report([measured(result, about, threads)], [("Memory and time", table(result))])


if __name__ == "__main__":
    sys.exit(main())
