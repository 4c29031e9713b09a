"""Trains a byte-level language model whose feed-forward layers are pymoe.nn.MoE, on real English text, on a CPU.

    python examples/train_lm.py                    # about three minutes on two cores
    python examples/train_lm.py --ffn dense        # the dense model of equal FLOPs per token
    python examples/train_lm.py --backend reference
    python examples/train_lm.py --resume runs/moe-native

Without --text it learns the Python manual that the interpreter carries. A run leaves in its folder a checkpoint
(checkpoint.safetensors), a record of everything measured (record.json) and two pictures (loss.png, experts.png).
"""

from __future__ import annotations

from lm import extras

extras.require()

import argparse  # noqa: E402 (what follows imports the extras)
import dataclasses  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from lm import checkpoint, config, plots, record  # noqa: E402
from lm.compare import Comparison, compare_backends  # noqa: E402
from lm.data import TextError, load_text  # noqa: E402
from lm.model import parameter_counts  # noqa: E402
from lm.progress import duration, open_display  # noqa: E402
from lm.sample import generate  # noqa: E402
from lm.stop import StopRequest  # noqa: E402
from lm.trainer import Trainer  # noqa: E402

INTERRUPTED = 130  # the shell's exit status after Ctrl-C
PROBE_STEPS = 6


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        trainer, folder = prepare(parser, arguments)
    except (TextError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    announce(trainer, folder)
    if not train(trainer, folder, arguments):
        print(f"stopped after step {trainer.steps_done} of {trainer.config.steps}; the run is saved in {folder}\n"
              f"continue it with: python {sys.argv[0]} --resume {folder}")
        return 0 if arguments.stop_after else INTERRUPTED
    finish(trainer, folder, arguments, started)
    return 0


def make_parser() -> argparse.ArgumentParser:
    head, _, tail = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=tail, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: runs/NAME, a new one)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this folder; flags that are stored "
                     "in the checkpoint may be left out and must not differ")
    run.add_argument("--minutes", type=float, metavar="M", help="choose --steps so that training takes about M minutes "
                     "at the speed measured before it starts")
    run.add_argument("--stop-after", type=int, metavar="STEP", help="stop and save after this step, as Ctrl-C would")
    run.add_argument("--eval-every", type=int, default=50, metavar="STEPS", help="steps between two validations on the "
                     "held-back last tenth of the text (default: %(default)s)")
    run.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="steps between two saves "
                     "(default: %(default)s)")
    run.add_argument("--compare-steps", type=int, default=8, metavar="STEPS", help="steps of the comparison of native "
                     "and reference at the end; 0 leaves it out (default: %(default)s)")
    sample = parser.add_argument_group("sample of generated text")
    sample.add_argument("--prompt", default="The ", metavar="TEXT", help="its beginning (default: %(default)r)")
    sample.add_argument("--sample-bytes", type=int, default=400, metavar="BYTES", help="its length; 0 leaves it out "
                        "(default: %(default)s)")
    sample.add_argument("--temperature", type=float, default=0.7, help="0 always takes the likeliest byte (default: "
                        "%(default)s)")
    sample.add_argument("--sample-top-k", type=int, default=20, metavar="K", help="draw from the K likeliest bytes "
                        "(default: %(default)s)")
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


def with_steps_for(settings: config.Config, text: Any, minutes: float) -> config.Config:
    probe = Trainer(settings, text)
    for _ in range(PROBE_STEPS):
        probe.step()
    seconds = sorted(probe.history.seconds)[PROBE_STEPS // 2]
    return dataclasses.replace(settings, steps=max(1, round(minutes * 60 / seconds)))


def announce(trainer: Trainer, folder: Path) -> None:
    settings, text, counts = trainer.config, trainer.text, parameter_counts(trainer.model, trainer.config)
    ffn = (
        f"dense FFNs of {settings.top_k * settings.ffn_size}"
        if settings.ffn == "dense"
        else f"{settings.num_experts} experts of {settings.ffn_size} a layer, top {settings.top_k}, {settings.backend}"
    )
    print(
        f"text: {text.name}, {text.train.numel():,} bytes to train on, the last {text.validation.numel():,} held back\n"
        f"model: {settings.layers} layers of width {settings.width}, {ffn}; {counts['total']:,} parameters, "
        f"{counts['active_per_byte']:,} of them at work on a byte\n"
        f"run: steps {trainer.steps_done + 1} to {settings.steps} of {trainer.bytes_per_step:,} bytes, "
        f"{settings.threads} threads, results in {folder}; Ctrl-C saves and stops",
        flush=True,
    )


def train(trainer: Trainer, folder: Path, arguments: argparse.Namespace) -> bool:
    """Makes the remaining steps; False if it was asked to stop before the last one. The run is saved either way."""
    steps = trainer.config.steps
    display = open_display(trainer)
    try:
        with StopRequest() as stop:
            while trainer.steps_done < steps:
                trainer.step()
                done = trainer.steps_done
                if done == steps or done % arguments.eval_every == 0:
                    trainer.validate()
                display.step()
                if stop.made or done == arguments.stop_after:
                    break
                if done % arguments.checkpoint_every == 0:
                    checkpoint.save(trainer, folder)
    finally:
        display.close()
        checkpoint.save(trainer, folder)
    return trainer.steps_done == steps


def finish(trainer: Trainer, folder: Path, arguments: argparse.Namespace, started: float) -> None:
    sample = make_sample(trainer, arguments)
    comparison = None
    if arguments.compare_steps and trainer.config.ffn == "moe":
        comparison = compare_backends(trainer, arguments.compare_steps)
    wall = time.perf_counter() - started
    facts = record.make_record(trainer, wall_seconds=wall, comparison=comparison, sample=sample)
    written = [folder / checkpoint.FILE_NAME, record.write_record(facts, folder)]
    written.append(plots.plot_loss(facts, folder / "loss.png"))
    if facts["expert_load"]:
        written.append(plots.plot_expert_load(facts, folder / "experts.png"))
    report(facts, comparison, written)


def make_sample(trainer: Trainer, arguments: argparse.Namespace) -> dict[str, Any] | None:
    if not arguments.sample_bytes:
        return None
    settings = {"temperature": arguments.temperature, "top_k": arguments.sample_top_k, "seed": trainer.config.seed}
    text = generate(
        trainer.model, arguments.prompt, arguments.sample_bytes, context=trainer.config.context, **settings
    )
    return {"prompt": arguments.prompt, **settings, "text": text}


def report(facts: dict[str, Any], comparison: Comparison | None, written: list[Path]) -> None:
    final, timings = facts["final"], facts["timings"]
    if facts["sample"]:
        rule = "-" * 100
        print(f"\nsample (temperature {facts['sample']['temperature']}, top {facts['sample']['top_k']}, seed "
              f"{facts['sample']['seed']}):\n{rule}\n{facts['sample']['text']}\n{rule}")
    print(f"\nheld-back text: {final['validation_bits_per_byte']:.3f} bits per byte; last training batches: "
          f"{final['train_bits_per_byte']:.3f}\n"
          f"speed: {final['tokens_per_second']:,.0f} tokens/s, {duration(timings['training_seconds'])} in steps, "
          f"{duration(timings['wall_seconds'])} in all")
    if comparison:
        low, high = comparison.step_speedup_range
        layer_low, layer_high = comparison.layer_speedup_range
        print(
            f"native against reference, {comparison.steps} steps of each in turn from the same weights:\n"
            f"  whole training step {comparison.step_speedup:.2f}x as fast (median; {low:.2f} to {high:.2f}): "
            f"{comparison.native_bytes_per_second:,.0f} and {comparison.reference_bytes_per_second:,.0f} tokens/s\n"
            f"  one MoE layer, forward and backward {comparison.layer_speedup:.2f}x as fast "
            f"({layer_low:.2f} to {layer_high:.2f})\n"
            f"  losses differ by at most {comparison.loss_difference:.1e}"
        )
    print("results: " + "\n         ".join(str(path) for path in written))


if __name__ == "__main__":
    sys.exit(main())
