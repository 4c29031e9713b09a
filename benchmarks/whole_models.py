"""Time whole models of real sizes on the CPU: pymoe behind transformers, transformers alone, and llama.cpp.

    python -m benchmarks.whole_models [--models NAME,...] [--layers N|all] [--decode N,...] [--prefill N,...]
                                      [--contenders REGEX] [--rounds N] [--budget S] [--passes N] [--threads N]
                                      [--files DIR] [--prepare] [--discard] [--render] [--output DIR]

Writes random weights in the sizes of OLMoE, Qwen3, GPT-OSS, Mixtral and DeepSeek-V2-Lite once, in bfloat16, in pymoe's
8 and 4 bits and in llama.cpp's formats. Then every contender decodes and prefills the same tokens, in turns, in
processes of their own. Models with a few layers are also measured with half of these layers. The difference gives the
time of a layer, the time of everything else, and so the time for the published number of layers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.children import Child, ChildError
from benchmarks.common.comparison import from_turn
from benchmarks.common.run import Run, names_of, parser_of, show_sections
from benchmarks.layers.limits import READ_BYTES, fastest_reader
from benchmarks.models import llama_cpp, report
from benchmarks.models.configurations import MODELS, PUBLISHED
from benchmarks.models.contenders import CONTENDERS, WHOLE, Contender, grouped, waves
from benchmarks.models.files import Files, worker
from benchmarks.models.systems import MOST_COMPILED, MOST_TOGETHER
from pymoe.bench.environment import memory_gib
from pymoe.bench.timing import WallTimer

Record = dict[str, Any]
RENDERED = Path(__file__).parent / "results" / "whole_models.md"
LARGEST = 0.4
"""Largest share of the memory that a model's weights in bfloat16 may take; larger models get fewer layers."""
ROOM = 0.7
"""Maximum share of the memory that is filled at a time."""
OVERHEAD = 0.5e9
"""Bytes that a process takes besides weights."""
STEPS = 4
"""Tokens of a turn that decodes."""
MOST_ROUNDS = 12


@dataclass(frozen=True)
class Cell:
    """A call to time: it decodes or prefills a number of tokens, with a number of layers."""

    mode: str
    tokens: int
    layers: int

    @property
    def calls(self) -> int:
        """Return the calls of a turn."""
        return STEPS if self.mode == "decode" else 1


def main() -> int:
    """Measure every model; return 1 if a process failed or a result is wrong."""
    options = parse()
    libraries, missing = library(options)
    settings = {name: getattr(options, name) for name in ("threads", "rounds", "budget", "passes")}
    run = Run("whole_models", options.output, settings, models=[])
    if not options.prepare:
        torch.set_num_threads(options.threads)
        bandwidth = fastest_reader(WallTimer(), READ_BYTES, 2.0)
        run.result["bandwidth"] = max(bandwidth.rates.values())
    failed = False
    for name in options.models:
        files = files_of(name, options, libraries)
        record: Record = {"model": name, "layers": files.layers, "fewer": files.fewer, "absent": {}, "contenders": {}}
        record |= {"title": files.model.title, "of": files.model.layers}
        chosen = prepared(files, options.contenders, missing, record)
        if not options.prepare:
            record["touched"] = files.touched()
            run.result["models"].append(record)
            measure(files, chosen, options, record, lambda: run.keep(report.markdown))
        failed |= any(reason.startswith(report.FAILED) for reason in record["absent"].values())
        if options.discard:
            shutil.rmtree(files.folder)
    if run.result["models"]:
        show_sections(report.sections(run.result))
        print(f"\n{run.stem}.json, {run.stem.name}.md")
        if options.render:
            RENDERED.write_text(report.markdown(run.result))
            print(RENDERED)
    return int(failed or any(report.wrong(model) for model in run.result["models"]))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("whole_models", __doc__ or "")
    names = names_of((*MODELS, "all"))
    parser.add_argument("--models", type=names, default=["olmoe"], metavar="NAME,...", help="or all (default: olmoe)")
    parser.add_argument("--layers", type=layers_of, default=4, metavar="N|all", help="of each (default: %(default)s)")
    parser.add_argument("--decode", type=counts, default=[1, 4, 16], metavar="N,...", help="sequences at a time")
    parser.add_argument("--prefill", type=counts, default=[128, 512, 2048], metavar="N,...", help="tokens of a prompt")
    parser.add_argument("--contenders", type=re.compile, default=re.compile(""), metavar="REGEX", help="default: all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="least of a pass (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=20.0, metavar="S", help="seconds of a cell (default: %(default)s)"
    )
    parser.add_argument("--passes", type=int, default=1, metavar="N", help="over all processes (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--files", type=Path, default=Path("build/whole_models/files"), metavar="DIR", help="of models")
    parser.add_argument("--prepare", action="store_true", help="write the models' files and end")
    parser.add_argument("--discard", action="store_true", help="remove a model's files when it has been measured")
    parser.add_argument("--render", action="store_true", help="write the tables to benchmarks/results, too")
    options = parser.parse_args()
    if "all" in options.models:
        options.models = list(PUBLISHED)
    if max(options.decode, default=0) > MOST_TOGETHER:
        parser.error(f"--decode: expected at most {MOST_TOGETHER} sequences, got {max(options.decode)}")
    if options.rounds > MOST_COMPILED // STEPS - 1:  # the first call warms up
        parser.error(f"--rounds: expected at most {MOST_COMPILED // STEPS - 1}, got {options.rounds}")
    return options


def counts(text: str) -> list[int]:
    """Parse positive whole numbers, or none."""
    found = [int(part) for part in text.split(",") if part]
    if any(one < 1 for one in found):
        raise argparse.ArgumentTypeError(f"expected positive numbers, got {text}")
    return found


def layers_of(text: str) -> int | None:
    """Parse a number of layers; None stands for all."""
    return None if text == "all" else counts(text)[0]


def library(options: argparse.Namespace) -> tuple[Path | None, str]:
    """Return the folder of llama.cpp, or the reason why there is none; install it if a contender asks for it."""
    if not any(one.form and options.contenders.search(one.name) for one in CONTENDERS):
        return None, "not asked for"
    try:
        return llama_cpp.install(), ""
    except llama_cpp.Missing as error:
        print(f"whole_models: llama.cpp is left out: {error}", file=sys.stderr)
        return None, str(error)


def files_of(name: str, options: argparse.Namespace, libraries: Path | None) -> Files:
    """Return the files of a model with as many layers as were asked for and fit into memory."""
    model = MODELS[name]
    layers = min(options.layers or model.layers, model.layers)
    if options.layers is not None:
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            sizes = [2 * AutoModelForCausalLM.from_config(model.build(n)).num_parameters() for n in (2, 4)]
        room = LARGEST * memory_gib() * 2**30
        per_layer = (sizes[1] - sizes[0]) / 2
        while layers > 2 and sizes[0] + (layers - 2) * per_layer > room:
            layers -= 2
    fewer = layers // 2 if 1 < layers < model.layers else 0
    return Files(options.files / f"{name}-{layers}", model, layers, fewer, options.threads, libraries)


def prepared(files: Files, wanted: re.Pattern[str], missing: str, record: Record) -> list[Contender]:
    """Make the files of the wanted contenders; return the contenders whose files exist, and name the others in
    ``record``.
    """
    files.make_whole()
    found = []
    for one in CONTENDERS:
        # transformers keeps the state of a sliding window in a Python number, which would take one graph per token
        slides = "sliding_window" in files.model.sizes
        if not wanted.search(one.name) or (one.mxfp and not files.model.mxfp) or (one.compiled and slides):
            continue
        try:
            if one.form and files.libraries is None:
                raise llama_cpp.Missing(missing)
            files.make(one)
            found.append(one)
        except llama_cpp.Missing as error:
            record["absent"][one.name] = f"left out: {error}"
        except RuntimeError as error:
            record["absent"][one.name] = f"{report.FAILED}: {error}"
        print(f"{files.folder.name}: {one.name} {record['absent'].get(one.name, 'has its files')}", file=sys.stderr)
    return found


def measure(files: Files, contenders: list[Contender], options: argparse.Namespace, record: Record, keep: Any) -> None:
    """Measure a model's contenders: contenders that fit into memory together take turns, and rivals are kept together
    first.
    """
    groups = grouped(contenders, lambda one: one.weights)
    needs = [
        (weights, ones[0].rival or ones[0].name, files.size(ones[0]) + OVERHEAD) for weights, ones in groups.items()
    ]
    together = waves(needs, ROOM * memory_gib() * 2**30)
    record["waves"] = together
    for one in contenders:
        record["contenders"][one.name] = {"cells": []}
    for _ in range(options.passes if len(together) > 1 else 1):
        for names in together:
            with ExitStack() as stack:
                children = {}
                for weights in names:
                    children[weights] = worker(options.threads)
                    stack.callback(children[weights].kill)
                    start(files, children[weights], groups[weights], record)
                alive = [one for name in names for one in groups[name] if one.name not in record["absent"]]
                for mode, tokens in cells(options):
                    both = [Cell(mode, tokens, n) for n in (files.layers, files.fewer) if n]
                    take_turns(alive, children, both, options, record)
                    keep()


def cells(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return modes and tokens."""
    return [(mode, tokens) for mode in ("decode", "prefill") for tokens in getattr(options, mode)]


def start(files: Files, child: Child, ones: list[Contender], record: Record) -> None:
    """Load the weights of these contenders, and compare their logits with the expected ones."""
    first = ones[0]
    if first.form:
        paths = {str(layers): str(file) for layers, file in files.ggufs(first).items()}
        request: Record = {"libraries": str(files.libraries), "files": paths}
    else:
        request = {"folder": str(files.packed(first))}
    try:
        loaded = child.ask({"do": "load", **request})
        if "about" in loaded:
            record["llama"] = loaded["about"]
        for one in ones:
            names = dict.fromkeys((WHOLE, one.exact)) if files.fits else {}
            expected = {name: str(files.logits(name)) for name in names if name}
            errors = child.ask({"do": "check", "expected": expected, **run_by(one)})
            record["contenders"][one.name] |= {"loaded": loaded, "errors": errors, "exact": one.exact}
    except ChildError as error:
        for one in ones:
            record["absent"][one.name] = f"{report.FAILED}: {error}"


def take_turns(
    contenders: list[Contender],
    children: dict[str, Child],
    both: list[Cell],
    options: argparse.Namespace,
    record: Record,
) -> None:
    """Time a cell, with all layers and with fewer: one call to warm up, then rounds in which all contenders take
    turns.
    """
    samples: dict[tuple[str, Cell], dict[str, list[float]]] = {}
    total = 0.0
    for one in contenders:
        for cell in both if both[0].mode == "decode" or not one.compiled else ():
            first = ask(one, children, cell, 1, record)
            if first is not None:
                total += cell.calls * first["wall"][0]
                samples[one.name, cell] = {"wall": [], "processor": []}
    named = {one.name: one for one in contenders}
    rounds = max(options.rounds, min(MOST_ROUNDS, int(options.budget / total))) if samples else 0
    for number in range(rounds):
        for name, cell in from_turn(list(samples), number * len(both)):
            found = ask(named[name], children, cell, cell.calls, record)
            for clock, values in (found or {}).items():
                samples[name, cell][clock] += values
    for (name, cell), found in samples.items():
        add(record["contenders"][name]["cells"], cell, found)
    print(f"{record['title']}: {both[0].mode} {both[0].tokens}, {rounds} rounds", file=sys.stderr, flush=True)


def run_by(one: Contender) -> Record:
    """Return the part of a request that tells a process which of its contenders to run."""
    return {"implementation": one.implementation, "compiled": one.compiled}


def ask(one: Contender, children: dict[str, Child], cell: Cell, calls: int, record: Record) -> Record | None:
    """Return the times of a turn; None if the contender failed, now or before."""
    if one.name in record["absent"]:
        return None
    try:
        request = {"do": "measure", **run_by(one), **asdict(cell), "calls": calls}
        answer: Record = children[one.weights].ask(request)
        return answer
    except ChildError as error:
        record["absent"][one.name] = f"{report.FAILED}: {cell.mode} {cell.tokens}: {error}"
        return None


def add(cells: list[Record], cell: Cell, found: dict[str, list[float]]) -> None:
    """Add the samples of a pass to the record of a cell."""
    if not found["wall"]:
        return
    for one in cells:
        if (one["mode"], one["tokens"], one["layers"]) == (cell.mode, cell.tokens, cell.layers):
            for clock, values in found.items():
                one["samples"][clock] += values
            return
    cells.append({**asdict(cell), "samples": found})


if __name__ == "__main__":
    sys.exit(main())
