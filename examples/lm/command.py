"""The command line of train_lm.py, and the run that it asks for."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch
from common import INTERRUPTED, at_least, parser_of

from . import checkpoint, config, run
from .data import Text, TextError, load_text
from .trainer import Trainer

PROBE_STEPS = 6


def main(argv: list[str], description: str) -> int:
    parser = make_parser(description)
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        trainer, folder = prepare(parser, arguments)
    except (TextError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run.announce(trainer, folder)
    again = f"python {sys.argv[0]} --resume {folder}"
    try:
        if not run.train(trainer, folder, arguments):
            done, steps = trainer.steps_done, trainer.config.steps
            print(f"stopped after step {done} of {steps}; the run is saved in {folder}\ncontinue it with: {again}")
            return 0 if done == arguments.stop_after else INTERRUPTED
        run.finish(trainer, folder, arguments, started)
    except KeyboardInterrupt:
        print(f"\nstopped at once; if the run was saved before, this goes on from there: {again}")
        return INTERRUPTED
    return 0


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = parser_of(description)
    flags = parser.add_argument_group("run")
    flags.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: runs/NAME, a new one)")
    flags.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="continue the run in this folder; flags that are stored "
        "in the checkpoint may be left out and must not differ",
    )
    flags.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="choose --steps so that training takes about M minutes at the speed measured before it starts",
    )
    flags.add_argument(
        "--stop-after", type=at_least(1), metavar="STEP", help="stop and save after this step, as Ctrl-C would"
    )
    flags.add_argument(
        "--eval-every",
        type=at_least(1),
        default=100,
        metavar="STEPS",
        help="steps between two validations on the held-back last tenth of the text (default: %(default)s)",
    )
    flags.add_argument(
        "--checkpoint-every",
        type=at_least(1),
        default=200,
        metavar="STEPS",
        help="steps between two saves (default: %(default)s)",
    )
    flags.add_argument(
        "--compare-steps",
        type=at_least(0),
        default=20,
        metavar="STEPS",
        help="steps of the comparison of native and reference at the end; 0 leaves it out (default: %(default)s)",
    )
    sample = parser.add_argument_group("sample of generated text")
    sample.add_argument("--prompt", default="The ", metavar="TEXT", help="its beginning (default: %(default)r)")
    sample.add_argument(
        "--sample-bytes",
        type=at_least(0),
        default=400,
        metavar="BYTES",
        help="its length; 0 leaves it out (default: %(default)s)",
    )
    sample.add_argument(
        "--temperature", type=float, default=0.7, help="0 always takes the likeliest byte (default: %(default)s)"
    )
    sample.add_argument(
        "--sample-top-k",
        type=at_least(1),
        default=20,
        metavar="K",
        help="draw from the K likeliest bytes (default: %(default)s)",
    )
    config.add_flags(parser)
    return parser


def prepare(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Trainer, Path]:
    """A trainer at its first step, or where the run to resume stood, and the folder of its results."""
    wished = config.given(arguments)
    if arguments.resume:
        folder = arguments.resume
        settings = checkpoint.read_config(folder)
        if arguments.out or arguments.minutes:
            parser.error("--resume continues in its own folder with its own steps: leave --out and --minutes out")
        different = config.differences(settings, wished)
        if different:
            parser.error(f"--resume {folder}: the run there was made with other settings:\n  " + "\n  ".join(different))
    else:
        settings = config.Config(**wished)
        settings = dataclasses.replace(settings, threads=config.resolve_threads(settings.threads))
        folder = new_folder(parser, arguments.out, settings.run_name())
    if arguments.minutes is not None and ("steps" in wished or not arguments.minutes > 0):
        parser.error("--minutes takes a positive number and chooses --steps itself")
    problem = settings.problem()
    if problem:
        parser.error(problem)
    torch.set_num_threads(settings.threads)
    text = load_text(settings.text, settings.context)
    if arguments.minutes:
        settings = with_steps_for(settings, text, arguments.minutes)
    trainer = Trainer(settings, text)
    if arguments.resume:
        checkpoint.load(trainer, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return trainer, folder


def new_folder(parser: argparse.ArgumentParser, wished: Path | None, name: str) -> Path:
    """``wished`` if no run is in it, else the first of runs/name, runs/name-2, ... that is free."""
    if wished:
        if (wished / checkpoint.FILE_NAME).exists():
            parser.error(f"--out {wished} already holds a run: continue it with --resume {wished}, or choose another")
        return wished
    number, folder = 1, Path("runs", name)
    while folder.exists():
        number += 1
        folder = Path("runs", f"{name}-{number}")
    return folder


def with_steps_for(settings: config.Config, text: Text, minutes: float) -> config.Config:
    probe = Trainer(settings, text)
    for _ in range(PROBE_STEPS):
        probe.step()
    seconds = sorted(probe.history.seconds)[PROBE_STEPS // 2]
    return dataclasses.replace(settings, steps=max(1, round(minutes * 60 / seconds)))
