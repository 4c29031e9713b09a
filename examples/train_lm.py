"""Trains a byte-level language model whose feed-forward layers are pymoe.nn.MoE, on real English text, on a CPU.

    python examples/train_lm.py                    # about three minutes on two cores
    python examples/train_lm.py --ffn dense        # the dense model of equal FLOPs per token
    python examples/train_lm.py --backend reference
    python examples/train_lm.py --resume runs/moe-native

Without --text it learns the Python manual that the interpreter carries. A run leaves in its folder a checkpoint
(checkpoint.safetensors), a record of everything measured (record.json) and two pictures (loss.png, experts.png).

The reference trains to the same curve. Its losses and those of the native run with the default settings agreed to 5e-7
nats per byte for 30 steps, until rounding changed an expert that a byte is sent to; after that they differed by 0.03 on
average and 0.22 at most on a batch, and by at most 0.04 bits per byte on the held-back text (measured over 700 steps).
"""

from __future__ import annotations

import sys

from common import require

require()

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from byte_lm import Config, LanguageModel, generate, make_optimizer, parameter_counts, train_step
from common import (
    INTERRUPTED,
    Batches,
    History,
    Text,
    TextError,
    at_least,
    free_folder,
    load_text,
    parser_of,
    stop_requests,
    validation_windows,
    write_record,
)
from lm_report import Display, compare_backends, make_record, report
from plot_runs import plot_expert_load, plot_loss
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

# --- training ---


@dataclass
class LongHistory(History):
    """Adds the load of the experts, and the validations, which only some steps have."""

    load: list[Tensor] = field(default_factory=list)  # (layers, experts) int32 slots; empty for a dense model
    validation_step: list[int] = field(default_factory=list)  # steps made when each validation ran
    validation_bits: list[float] = field(default_factory=list)  # bits per byte


class Trainer:
    """The state of one run, and its training step."""

    def __init__(self, config: Config, text: Text) -> None:
        torch.manual_seed(config.seed)
        self.config, self.text = config, text
        self.model = LanguageModel(config)
        self.optimizer = make_optimizer(self.model, config)
        self.batches = Batches(text.train, config.context, config.batch_size, config.seed)
        self.history = LongHistory()

    @property
    def steps_done(self) -> int:
        return len(self.history.loss)

    @property
    def bytes_per_step(self) -> int:
        return self.config.batch_size * self.config.context

    def step(self) -> None:
        start, step = time.perf_counter(), self.steps_done
        loss = train_step(self.model, self.optimizer, self.config, step, *self.batches.batch(step))
        if layers := self.model.moe_layers():
            self.history.load.append(torch.stack([layer.stats.load for layer in layers]))
        self.history.seconds.append(time.perf_counter() - start)
        self.history.loss.append(loss)

    @torch.no_grad()
    def validate(self) -> None:
        """Record the bits per byte over all held-back text, at most once per step."""
        history = self.history
        if history.validation_step and history.validation_step[-1] == self.steps_done:
            return
        self.model.eval()
        inputs, targets = validation_windows(self.text.validation, self.config.context)
        total = 0.0
        for x, y in zip(inputs.split(16), targets.split(16), strict=True):
            total += F.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        history.validation_step.append(self.steps_done)
        history.validation_bits.append(total / targets.numel() / math.log(2))


# --- checkpoints: a run in one file, from which it continues to the same losses bit for bit ---

FILE_NAME = "checkpoint.safetensors"
FORMAT = 1


class CheckpointError(Exception):
    """Raised if the checkpoint cannot be used; the message says why in one line."""


def save(trainer: Trainer, folder: Path) -> None:
    """Write a new file and rename it, so that an interrupted save leaves the old checkpoint intact."""
    history = trainer.history
    tensors = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors["rng"] = torch.get_rng_state()
    for key in ("loss", "seconds", "validation_bits"):
        tensors[f"history.{key}"] = torch.tensor(getattr(history, key), dtype=torch.float64)
    tensors["history.validation_step"] = torch.tensor(history.validation_step, dtype=torch.int64)
    if history.load:
        tensors["history.load"] = torch.stack(history.load)
    facts = {
        "format": FORMAT,
        "config": asdict(trainer.config),
        "text_sha256": trainer.text.sha256,
        "steps_done": trainer.steps_done,
        "windows_read": trainer.steps_done * trainer.config.batch_size,
    }
    fresh = folder / f"{FILE_NAME}.new"
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, fresh, metadata={"pymoe": json.dumps(facts)})
    os.replace(fresh, folder / FILE_NAME)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the description in the checkpoint in ``folder``, including its config."""
    path = folder / FILE_NAME
    if not path.exists():
        raise CheckpointError(f"there is no {FILE_NAME} in {folder}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["pymoe"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this example: {error}") from error
    if facts["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {facts['format']}, this example reads {FORMAT}")
    return facts


def load(trainer: Trainer, folder: Path) -> None:
    """Restore the state of a saved run in a trainer that was made from the saved config and text."""
    if read_facts(folder)["text_sha256"] != trainer.text.sha256:
        raise CheckpointError(
            f"the text differs from the one that the run in {folder} was trained on ({trainer.text.name} has changed, "
            "or this is another version of Python, with another manual)"
        )
    tensors = load_file(folder / FILE_NAME)

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    trainer.model.load_state_dict(under("model."))
    for name, parameter in trainer.model.named_parameters():
        if state := under(f"optimizer.{name}."):
            trainer.optimizer.state[parameter] = state
    for key in ("loss", "seconds", "validation_step", "validation_bits"):
        setattr(trainer.history, key, tensors[f"history.{key}"].tolist())
    trainer.history.load = list(tensors.get("history.load", ()))
    torch.set_rng_state(tensors["rng"])


# --- the run ---


def announce(trainer: Trainer, folder: Path) -> None:
    settings, text, counts = trainer.config, trainer.text, parameter_counts(trainer.model, trainer.config)
    ffn = f"dense FFNs of {settings.dense_ffn_size}"
    if settings.ffn == "moe":
        ffn = f"{settings.num_experts} experts of {settings.ffn_size} a layer, top {settings.top_k}, {settings.backend}"
        ffn += f", {settings.shared_experts} shared" if settings.shared_experts else ""
    todo = f"steps {trainer.steps_done + 1} to {settings.steps} of {trainer.bytes_per_step:,} bytes"
    if trainer.steps_done == settings.steps:
        todo = f"all {settings.steps} steps are made"
    print(
        f"text: {text.name}, {text.train.numel():,} bytes to train on, the last {text.validation.numel():,} held back\n"
        f"model: {settings.layers} layers of width {settings.width}, {ffn}; {counts['total']:,} parameters, "
        f"{counts['active_per_byte']:,} of them at work on a byte\n"
        f"run: {todo}, {settings.threads} thread{'s' * (settings.threads != 1)}, results in {folder}; "
        f"Ctrl-C saves and stops",
        flush=True,
    )


def train(trainer: Trainer, folder: Path, arguments: argparse.Namespace) -> bool:
    """Make the remaining steps; return False if asked to stop before the last one.

    The run is saved either way, except if a step was interrupted in the middle: then the last complete save stays.
    """
    steps = trainer.config.steps
    limit = min(steps, arguments.stop_after or steps)
    display = Display(trainer)
    try:
        with stop_requests() as stop:
            while trainer.steps_done < limit and not stop:
                trainer.step()
                done = trainer.steps_done
                if done == steps or done % arguments.eval_every == 0:
                    trainer.validate()
                display.step()
                if done % arguments.checkpoint_every == 0:
                    save(trainer, folder)
            save(trainer, folder)
    finally:
        display.close()
    return trainer.steps_done == steps


def finish(trainer: Trainer, folder: Path, arguments: argparse.Namespace, started: float) -> None:
    config, sample, compared = trainer.config, None, None
    if arguments.sample_bytes:
        print(f"writing a sample of {arguments.sample_bytes} bytes ...", flush=True)
        drawn = (arguments.temperature, arguments.sample_top_k, config.seed)
        text = generate(trainer.model, config.context, arguments.prompt, arguments.sample_bytes, *drawn)
        sample = {"prompt": arguments.prompt, **dict(zip(("temperature", "top_k", "seed"), drawn, strict=True))}
        sample["text"] = text
    if arguments.compare_steps and config.ffn == "moe":
        print("timing native and reference side by side ...", flush=True)
        compared = compare_backends(trainer, arguments.compare_steps)
    wall = time.perf_counter() - started
    facts = make_record(trainer, wall_seconds=wall, native_against_reference=compared, sample=sample)
    written = [folder / FILE_NAME, write_record(facts, folder), plot_loss(facts, folder / "loss.png")]
    if facts["expert_load"]:
        written.append(plot_expert_load(facts, folder / "experts.png"))
    report(facts, written)


# --- the command line ---

PROBE_STEPS = 6
COUNT = at_least(1)
GROUPS: dict[str, tuple[tuple[str, Any, Any, str | None, str], ...]] = {
    "run": (
        ("--out", Path, None, "DIR", "folder of the results (default: runs/NAME, a new one)"),
        ("--resume", Path, None, "DIR", "continue the run in this folder; flags that are stored in the checkpoint may "
         "be left out and must not differ"),
        ("--minutes", float, None, "M", "choose --steps so that training takes about M minutes at the speed "
         "measured before it starts"),
        ("--stop-after", COUNT, None, "STEP", "stop and save after this step, as Ctrl-C would"),
        ("--eval-every", COUNT, 100, "STEPS", "steps between two validations on the held-back last tenth of the text"),
        ("--checkpoint-every", COUNT, 200, "STEPS", "steps between two saves"),
        ("--compare-steps", at_least(0), 20, "STEPS", "steps of the comparison of native and reference at the end; 0 "
         "leaves it out"),
    ),
    "sample of generated text": (
        ("--prompt", str, "The ", "TEXT", "its beginning"),
        ("--sample-bytes", at_least(0), 400, "BYTES", "its length; 0 leaves it out"),
        ("--temperature", float, 0.7, None, "0 always takes the likeliest byte"),
        ("--sample-top-k", COUNT, 20, "K", "draw from the K likeliest bytes"),
    ),
}  # fmt: skip
"""For each group, its flags: flag, type, default, placeholder of the value, help."""
NUMBERS = (
    ("be at least 1", lambda value: value >= 1,
     "layers width heads context ffn_size num_experts top_k steps batch_size"),
    ("not be negative", lambda value: value >= 0,  # nor NaN
     "threads warmup shared_experts aux_loss_coef bias_update_rate weight_decay"),
    ("be positive", lambda value: value > 0, "learning_rate grad_clip"),
)  # fmt: skip
"""Conditions on fields of Config: description, test, names of fields."""


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    for name, flags in GROUPS.items():
        group = parser.add_argument_group(name)
        for flag, kind, default, metavar, text in flags:
            shown = f" (default: {default!r})" if default is not None else ""
            group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)
    groups = {
        name: parser.add_argument_group(f"{name} (stored in the checkpoint)")
        for name in dict.fromkeys(item.metadata["group"] for item in fields(Config))
    }
    for item in fields(Config):  # a flag that is not given sets no attribute
        shown = "" if item.default == "" else f" (default: {item.default})"
        choices = item.metadata["choices"]
        groups[item.metadata["group"]].add_argument(
            flag_name(item.name),
            type=type(item.default),
            choices=choices,
            metavar=None if choices else {"text": "FILE"}.get(item.name, item.name.split("_")[-1].upper()),
            default=argparse.SUPPRESS,
            help=item.metadata["help"] + shown,
        )
    return parser


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def problem(config: Config) -> str | None:
    """Return one line that names the first invalid field, or None."""
    for rule, holds, names in NUMBERS:
        for name in names.split():
            if not holds(getattr(config, name)):
                return f"{flag_name(name)} must {rule}, got {getattr(config, name)}"
    if config.width % (2 * config.heads):
        return f"--width must be a multiple of twice --heads, got {config.width} and {config.heads}"
    if config.top_k > config.num_experts:
        return f"--top-k must be at most --num-experts, got {config.top_k} and {config.num_experts}"
    return None


def prepare(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Trainer, Path]:
    """Return a trainer, at its first step or at the point where the run to resume stopped, and the folder of its
    results.
    """
    wished = {item.name: getattr(arguments, item.name) for item in fields(Config) if hasattr(arguments, item.name)}
    if arguments.resume:
        folder = arguments.resume
        saved = read_facts(folder)["config"]
        settings = Config(**saved)
        if arguments.out or arguments.minutes:
            parser.error("--resume continues in its own folder with its own steps: leave --out and --minutes out")
        different = [
            f"\n  {flag_name(name)}: the saved run has {saved[name]!r}, the command line says {value!r}"
            for name, value in wished.items()
            if saved[name] != value
        ]
        if different:
            parser.error(f"--resume {folder}: the run there was made with other settings:{''.join(different)}")
    else:
        settings = Config(**wished)
        settings = replace(settings, threads=settings.threads or torch.get_num_threads())
        folder = new_folder(parser, arguments.out, "dense" if settings.ffn == "dense" else f"moe-{settings.backend}")
    if arguments.minutes is not None and ("steps" in wished or not arguments.minutes > 0):
        parser.error("--minutes takes a positive number and chooses --steps itself")
    if wrong := problem(settings):
        parser.error(wrong)
    torch.set_num_threads(settings.threads)
    text = load_text(settings.text, settings.context)
    if arguments.minutes:
        probe = Trainer(settings, text)
        for _ in range(PROBE_STEPS):
            probe.step()
        seconds = sorted(probe.history.seconds)[PROBE_STEPS // 2]
        settings = replace(settings, steps=max(1, round(arguments.minutes * 60 / seconds)))
    trainer = Trainer(settings, text)
    if arguments.resume:
        load(trainer, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return trainer, folder


def new_folder(parser: argparse.ArgumentParser, wished: Path | None, name: str) -> Path:
    """Return ``wished`` if it holds no run; without it, the first free folder of runs/name, runs/name-2, ..."""
    if wished:
        if (wished / FILE_NAME).exists():
            parser.error(f"--out {wished} already holds a run: continue it with --resume {wished}, or choose another")
        return wished
    return free_folder(name)


def main(argv: list[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        trainer, folder = prepare(parser, arguments)
    except (TextError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    announce(trainer, folder)
    again = f"python {sys.argv[0]} --resume {folder}"
    try:
        if not train(trainer, folder, arguments):
            done, steps = trainer.steps_done, trainer.config.steps
            print(f"stopped after step {done} of {steps}; the run is saved in {folder}\ncontinue it with: {again}")
            return 0 if done == arguments.stop_after else INTERRUPTED
        finish(trainer, folder, arguments, started)
    except KeyboardInterrupt:
        print(f"\nstopped at once; if the run was saved before, this goes on from there: {again}")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
