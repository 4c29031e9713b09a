"""Time expert blocks of published models: pymoe, transformers, KTransformers and the limits of the machine.

    python -m benchmarks.model_layers [--blocks NAME,...] [--dtypes NAME,...] [--modes NAME,...] [--tokens N,...]
                                      [--clock wall|cpu|both] [--budget S] [--keep] [--render] [--output DIR]

Decoding, prefill and training of OLMoE, Qwen3, GPT-OSS, Mixtral and DeepSeek-V3 blocks as transformers builds them,
with random weights that no cache holds. Every block and clock is measured in a process of its own: wall time on all
threads, and processor time on one thread, pinned to one core. Writes JSON and Markdown; ``make bench-layers`` sets
everything up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.run import command, names_of, parser_of, save
from benchmarks.layers import report
from benchmarks.layers.blocks import BLOCKS, TINY, Block, built
from benchmarks.layers.cases import MODES, Effort, run_case, tokens_of
from benchmarks.layers.contenders import Contender, Plan
from benchmarks.layers.limits import READ_BYTES, fastest_reader, last_level_cache
from pymoe.bench.environment import cpu_flags, environment, memory_gib
from pymoe.bench.report import plain, write_json
from pymoe.bench.timing import WallTimer

Record = dict[str, Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
"""Processor features that speed up matrix products."""
RENDERED = Path(__file__).parent / "results" / "model_layers.md"
LARGE = 1 << 24
"""Number of weights from which on bandwidth is measured over all of the block's bytes."""


def main() -> int:
    """Measure every block with every clock; return 1 if a process failed or a result is wrong."""
    options = parse()
    if options.worker:
        work(options)
        return 0
    stem = options.output / "model_layers"
    result = kept(stem.with_suffix(".json")) if options.keep else {"environment": {}, "runs": [], "cases": []}
    failed = []
    for block in options.blocks:
        for clock in options.clocks:
            if not in_process(block, clock, options, result):
                failed.append(f"{block} by the {clock} clock")
            if result["cases"]:
                save(result, report.markdown(result), stem)
    for one in failed:
        print(f"{one}: the process failed; the cases before that are kept", file=sys.stderr)
    if result["cases"]:
        print(f"\n{stem}.json, {stem.name}.md")
        if options.render:
            RENDERED.write_text(report.markdown(result))
            print(RENDERED)
    wrong = any(row["verdict"] != "close" for case in result["cases"] for row in case["rows"])
    return int(bool(failed) or wrong)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("model_layers", __doc__)
    everything = (*BLOCKS, *TINY)
    parser.add_argument("--blocks", type=names_of(everything), default=list(BLOCKS), metavar="NAME,...")
    parser.add_argument("--dtypes", type=names_of(tuple(DTYPES)), default=["fp32", "bf16"], metavar="NAME,...")
    parser.add_argument("--modes", type=names_of(tuple(MODES)), default=list(MODES), metavar="NAME,...")
    parser.add_argument("--tokens", type=counts, default=(), metavar="N,...", help="tokens of a call; up to 64 decode")
    parser.add_argument("--clock", choices=["wall", "cpu", "both"], default="both")
    parser.add_argument("--budget", type=float, default=5.0, metavar="S", help="seconds a case (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of a case at least (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the wall clock (default: torch's own choice)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="that a run may take (default: half the machine's)")
    parser.add_argument("--keep", action="store_true", help="keep the cases of earlier runs that this one does not run")
    parser.add_argument("--render", action="store_true", help=f"write the tables to {RENDERED.name} in results/, too")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.clocks = ["wall", "cpu"] if options.clock == "both" else [options.clock]
    if options.memory is None:
        options.memory = (memory_gib() or 16.0) / 2
    return options


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers that are separated by commas; each must be at least 1."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers from 1 on, got {text}")
    return found


def in_process(block: str, clock: str, options: argparse.Namespace, result: Record) -> bool:
    """Measure a block with a clock in a separate process and add the results to ``result``; return False if the
    process failed.
    """
    file = options.output / f"{block}_{clock}.json"
    file.unlink(missing_ok=True)
    arguments = ["--worker", str(file), "--blocks", block, "--clock", clock, "--dtypes", ",".join(options.dtypes)]
    arguments += ["--modes", ",".join(options.modes), "--budget", str(options.budget), "--rounds", str(options.rounds)]
    arguments += ["--memory", str(options.memory), "--output", str(options.output)]
    if options.tokens:
        arguments += ["--tokens", ",".join(map(str, options.tokens))]
    if options.threads:
        arguments += ["--threads", str(options.threads)]
    variables = dict(os.environ)
    if clock == "cpu":  # set before torch is loaded, which then sizes its thread pool
        variables |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "benchmarks.model_layers", *arguments], env=variables, check=False)
    if file.exists():
        found = json.loads(file.read_text())
        result["environment"] = found["environment"]
        run = found["run"] | {"command": command("model_layers")}
        result["runs"] = [one for one in result["runs"] if not same(one, run, "clock", "block")] + [run]
        for case in found["cases"]:
            keys = ("clock", "block", "dtype", "mode", "tokens")
            result["cases"] = [one for one in result["cases"] if not same(one, case, *keys)] + [case]
        result["cases"].sort(key=order)
    return done.returncode == 0


def same(one: Record, other: Record, *keys: str) -> bool:
    """Return whether two records hold the same values under ``keys``."""
    return all(one[key] == other[key] for key in keys)


def order(case: Record) -> tuple[Any, ...]:
    """Return the sort key that gives a case its place in the tables."""
    blocks, dtypes = list({**BLOCKS, **TINY}), [str(dtype).removeprefix("torch.") for dtype in DTYPES.values()]
    return (
        case["clock"],
        blocks.index(case["block"]),
        dtypes.index(case["dtype"]),
        list(MODES).index(case["mode"]),
        case["tokens"],
    )


def kept(file: Path) -> Record:
    """Return the result of earlier runs from ``file``, or an empty result if there is no such file."""
    if not file.exists():
        return {"environment": {}, "runs": [], "cases": []}
    found: Record = json.loads(file.read_text())
    return found


def work(options: argparse.Namespace) -> None:
    """Measure one block with one clock in this process, and write the results after every case."""
    (name,), clock = options.blocks, options.clock
    facts = environment()
    block: Block = {**BLOCKS, **TINY}[name].fitting(options.memory * 2**30)
    if clock == "cpu":
        pin()
        torch.set_num_threads(1)
    elif options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    timer = WallTimer(time.process_time if clock == "cpu" else time.perf_counter)
    start = time.perf_counter()
    small = block.weights < LARGE
    bandwidth = fastest_reader(timer, READ_BYTES >> 4 if small else READ_BYTES, min(options.budget, 2.0))
    effort = Effort(timer, bandwidth.reader, options.budget, (options.rounds, 60), 4 * options.budget)
    cases: list[Record] = []
    run = {"clock": clock, "block": name, "threads": torch.get_num_threads(), "bandwidth": asdict(bandwidth)}
    facts |= {
        "transformers": metadata.version("transformers"),
        "cpu_flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "cache_bytes": last_level_cache(),
    }
    for dtype in options.dtypes:
        one = built(block, DTYPES[dtype])
        made: dict[str, Contender] = {}
        for mode in options.modes:
            if mode == "train":
                made.clear()  # frees the copied weights to make room for gradients
            for tokens in tokens_of(mode, options.tokens):
                case = run_case(Plan(one, tokens, mode == "train", clock == "cpu", made), mode, effort)
                cases.append({"clock": clock, "block": name} | case)
                run["load"] = [facts["load"][0], environment()["load"][0]]
                run["wall_seconds"] = round(time.perf_counter() - start, 1)
                write_json({"environment": facts, "run": run, "cases": cases}, options.worker)
                print(f"\n{clock} clock, {case['title']}\n{plain(report.details(cases[-1:]))}", flush=True)
        del one


def pin() -> None:
    """Pin this process to one core: the last that it may use, as interrupts are rarest there."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    sys.exit(main())
