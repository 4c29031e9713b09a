"""Fine-tunes a language model whose weights have 4 bits, with LoRA of PEFT and the Trainer of transformers, on a CPU.

    python examples/finetune_transformers.py                    # two to three minutes on two cores
    python examples/finetune_transformers.py --model FOLDER --text FILE
    python examples/finetune_transformers.py --resume runs/finetune
    torchrun --nproc-per-node 2 examples/finetune_transformers.py

Without --model it first trains a small Qwen3-MoE model, byte by byte, on the sources of Python's standard library. Then
it reads the model with experts in 4 bits and dense layers in 8, and fine-tunes adapters of attention and of experts on
another text: the Python manual, or --text. It prints the loss on held-back text, and a sample, before and after.

A run leaves in its folder the adapters in PEFT's files (adapter), two pictures (loss.png, experts.png) and the small
model (base). Ctrl-C saves a checkpoint and stops; --resume continues to the same losses bit for bit. With torchrun each
process computes its part of every batch.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "transformers", "peft", "accelerate", "matplotlib"))

import argparse
import json
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import INTERRUPTED, TextError, at_least, free_folder, load_text, parser_of, stop_requests
from peft import LoraConfig, get_peft_model
from plot_runs import plot_curve
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    ProgressCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from pymoe.integrations.transformers import LoadCallback, PymoeConfig
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear

SETTINGS, BASE, ADAPTER = "settings.json", "base", "adapter"
HELD_BACK = 128  # windows
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
IS_FIRST = os.environ.get("RANK", "0") == "0"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Path]:
    """Return the settings of a run, new or to be resumed, and its folder."""
    parser = parser_of(__doc__)
    for name, kind, shown, about in (
        ("out", Path, "DIR", "folder of the results (default: runs/finetune, a new one)"),
        ("resume", Path, "DIR", "continue the run in this folder, with its settings"),
        ("model", str, "FOLDER", "a model with its tokenizer, as save_pretrained writes it (default: the small one)"),
        ("text", str, "FILE", "text to fine-tune on (default: the Python manual that this interpreter carries)"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar=shown, help=about)
    parser.add_argument("--prompt", default="The ", metavar="TEXT", help="what the samples begin with")
    for name, kind, default, about in (
        ("base-steps", at_least(1), 400, "steps that train the small model"),
        ("base-learning-rate", float, 3e-3, "its learning rate"),
        ("hidden", at_least(1), 128, "its hidden size"),
        ("layers", at_least(1), 4, "its layers"),
        ("experts", at_least(4), 16, "its experts in a layer, of which 4 process a byte"),
        ("steps", at_least(1), 200, "steps of fine-tuning"),
        ("learning-rate", float, 3e-3, "learning rate of fine-tuning"),
        ("rank", at_least(1), 8, "rank of the adapters"),
        ("batch", at_least(1), 16, "windows of text in a step, in all processes together"),
        ("context", at_least(2), 128, "tokens of a window"),
        ("save-every", at_least(1), 50, "steps between two checkpoints, and between two looks at the held-back text"),
        ("sample", at_least(1), 200, "tokens to generate, before and after"),
        ("seed", int, 0, "seed of weights, order and samples"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} (default: {default})")
    options = parser.parse_args(arguments)
    folder = options.resume or options.out
    if options.resume:
        if sum(one.startswith("--") for one in arguments) > 1:
            parser.error(f"--resume takes the settings that the run in {folder} has: leave all other flags out")
        if not (folder / SETTINGS).exists():
            parser.error(f"--resume {folder}: there is no {SETTINGS} in it")
        vars(options).update(json.loads((folder / SETTINGS).read_text()))
    elif folder and (folder / SETTINGS).exists():
        parser.error(f"--out {folder} already holds a run: continue it with --resume {folder}, or choose another")
    if options.batch % RANKS:
        parser.error(f"--batch must be a multiple of the {RANKS} processes, got {options.batch}")
    return options, folder or free_folder("finetune")


# --- texts ---


def standard_library(size: int) -> str:
    """Return the sources of Python's standard library, without packages, up to ``size`` characters."""
    found = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(found) >= size:
            break
        found += file.read_text(errors="replace")
    return found[:size]


Windows = list[dict[str, Tensor]]


def windows(tokenizer: Any, text: str, context: int) -> Windows:
    """Return consecutive windows of ``context`` tokens; the model itself shifts the labels by one token."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    rows = ids[: len(ids) // context * context].view(-1, context)
    return [{"input_ids": row, "labels": row} for row in rows]


def texts(tokenizer: Any, options: argparse.Namespace) -> tuple[Windows, Windows]:
    """Return the windows to fine-tune on, and those that are held back."""
    text = load_text(options.text or "", options.context)
    parts = (bytes(part.tolist()).decode(errors="replace") for part in (text.train, text.validation))
    training, held_back = (windows(tokenizer, part, options.context) for part in parts)
    if len(training) < options.batch or not held_back:
        raise TextError(f"{text.name} is too short for windows of --context {options.context} tokens")
    return training, held_back[:HELD_BACK]


# --- models ---


def new_model(options: argparse.Namespace, vocabulary: int) -> nn.Module:
    """Return a Qwen3-MoE model with random weights."""
    set_seed(options.seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        moe_intermediate_size=options.hidden,
        num_experts=options.experts,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=max(16, options.hidden // 4),
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


def packed_with_adapters(folder: str | Path, options: argparse.Namespace) -> Any:
    """Read a model with weights in 4 and 8 bits, and put adapters on attention and experts."""
    config = PymoeConfig(bits=4, linear_bits=8)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    dense = {name for name, layer in packed.items() if isinstance(layer, QuantizedDenseLinear)}
    attention = [name for name in packed if name in dense and "att" in name]  # self_attn, linear_attn, attention
    experts = sorted({".".join(name.split(".")[-2:]) for name in packed.keys() - dense})
    set_seed(options.seed)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=attention, target_parameters=experts)
    return get_peft_model(model, lora)


# --- training ---


class Stopped(Exception):
    """Raised if training was asked to stop before its last step; a checkpoint is saved."""


class StopAtRequest(TrainerCallback):
    """Saves a checkpoint and stops after a step during which a process got a signal."""

    def __init__(self, requests: list[int]) -> None:
        self.requests = requests

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        asked = torch.tensor(len(self.requests))
        if RANKS > 1:
            dist.all_reduce(asked)  # all processes stop after the same step
        if asked:
            control.should_save = control.should_training_stop = True


class NumbersOnBar(ProgressCallback):
    """Shows the latest losses next to the bar of the steps, where ProgressCallback prints a line for each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        for name in ("loss", "eval_loss"):
            if self.training_bar is not None and name in logs:
                self.shown[name] = logs[name]
                self.training_bar.set_postfix(self.shown)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.shown: dict[str, float] = {}
        super().on_train_begin(args, state, control, **others)


def make_trainer(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    options: argparse.Namespace,
    training: Windows,
    held_back: Windows | None = None,
    **own: Any,
) -> Trainer:
    """Return a Trainer on the CPU, of which each process computes an equal part of a batch.

    ``own`` are further arguments of it.
    """
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=options.batch // RANKS,
        per_device_eval_batch_size=options.batch,
        eval_strategy="no" if held_back is None else "steps",
        eval_steps=options.save_every,
        # Not Trainer.evaluate before train: accelerate would then leave the model as it is, and each process would
        # train its own.
        eval_on_start=held_back is not None and last_checkpoint(folder)[1] is None,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # of all steps
        seed=options.seed,
        report_to="none",
        label_names=["labels"],
        use_cpu=True,
        ddp_backend="gloo" if RANKS > 1 else None,
        ddp_broadcast_buffers=False,  # packed weights are buffers, and never change
        ddp_find_unused_parameters=False,  # all take part in every step, also those of experts without tokens
        dataloader_pin_memory=False,
        **own,
    )
    trainer = Trainer(
        model,
        arguments,
        default_data_collator,
        train_dataset=training,
        eval_dataset=held_back,
        processing_class=tokenizer,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(NumbersOnBar)
    return trainer


def last_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Return the steps of the last checkpoint in a folder, and its place; 0 and None if there is none."""
    found = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]  # the file that is written last
    return max([(int(one.name.split("-")[1]), one) for one in found], default=(0, None))


def run(trainer: Trainer) -> None:
    """Train from the last checkpoint, or from the beginning, to the last step.

    Raises:
        Stopped: a process got a signal.
    """
    with stop_requests() as requests:
        trainer.add_callback(StopAtRequest(requests))
        trainer.train(resume_from_checkpoint=last_checkpoint(Path(trainer.args.output_dir))[1])
    trainer.accelerator.wait_for_everyone()
    if trainer.state.global_step < trainer.args.max_steps:
        raise Stopped(f"stopped after step {trainer.state.global_step} of {trainer.args.max_steps}")


# --- the run ---


def trained_base(folder: Path, options: argparse.Namespace) -> Path:
    """Train the small model if that is not done yet; return the folder of it and of its tokenizer."""
    steps, last = last_checkpoint(folder)
    if steps < options.base_steps:
        tokenizer = ByT5Tokenizer(extra_ids=0)
        text = standard_library(2 * options.base_steps * options.batch * options.context)
        training = windows(tokenizer, text, options.context)
        # A Trainer alone would resume with random experts: https://github.com/huggingface/transformers/issues/48805
        model = Qwen3MoeForCausalLM.from_pretrained(last) if last else new_model(options, len(tokenizer))
        model.set_experts_implementation("pymoe")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        say(f"a model of {parameters / 1e6:.1f} million parameters learns the sources of Python's standard library")
        own = {"max_steps": options.base_steps, "learning_rate": options.base_learning_rate}
        run(make_trainer(model, tokenizer, folder, options, training, **own))
    return folder / f"checkpoint-{options.base_steps}"


def finetune(base: str | Path, folder: Path, options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    training, held_back = texts(tokenizer, options)
    model = packed_with_adapters(base, options)
    say(f"{base}, in 4 bits, learns the text by adapters of {model.get_nb_trainable_parameters()[0]:,} parameters")
    if IS_FIRST:
        show("before", sample(model, tokenizer, options))
    own = {"max_steps": options.steps, "learning_rate": options.learning_rate, "held_back": held_back}
    trainer = make_trainer(model, tokenizer, folder, options, training, **own)
    trainer.add_callback(LoadCallback(trainer, folder=folder))
    steps, last = last_checkpoint(folder)
    if steps < options.steps:
        run(trainer)
        last = last_checkpoint(folder)[1]
    else:
        model.load_adapter(last, "default")
    trainer.save_model(str(folder / ADAPTER))
    if IS_FIRST:
        show("after", sample(model, tokenizer, options))
        history = json.loads((last / "trainer_state.json").read_text())["log_history"]
        losses = [bits(log["loss"]) for log in history if "loss" in log]
        held_back_losses = {log["step"]: bits(log["eval_loss"]) for log in history if "eval_loss" in log}
        title = f"{options.model or 'the small model'} in 4 bits, adapters of rank {options.rank}"
        step = f"optimizer step ({options.batch * options.context:,} tokens each)"
        plot_curve(losses, held_back_losses, folder / "loss.png", title=title, step=step, unit="bits per token")
        first, *_, end = held_back_losses.values()
        print(f"held-back text: {first:.3f} bits per token before, {end:.3f} after")
        print(f"results: {', '.join(str(folder / name) for name in (ADAPTER, 'loss.png', 'experts.png'))}")


def bits(nats: float) -> float:
    return nats / math.log(2)


def sample(model: Any, tokenizer: Any, options: argparse.Namespace) -> str:
    """Return a text that the model continues, the same one for the same weights."""
    model.eval()
    set_seed(options.seed)
    prompt = tokenizer(options.prompt, add_special_tokens=False, return_tensors="pt")
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": options.sample}
    return tokenizer.decode(model.generate(**prompt, **drawn)[0], skip_special_tokens=True)


def show(when: str, text: str) -> None:
    rule = "-" * 100
    print(f"a sample {when} fine-tuning:\n{rule}\n{text}\n{rule}", flush=True)


def say(text: str) -> None:
    if IS_FIRST:
        print(text, flush=True)


def main(arguments: list[str]) -> int:
    if RANKS > 1:
        dist.init_process_group("gloo")
    chosen: list[Any] = [parse(arguments) if IS_FIRST else None]
    if RANKS > 1:
        dist.broadcast_object_list(chosen)
    options, folder = chosen[0]
    if IS_FIRST:
        folder.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "resume")}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
    again = f"torchrun --nproc-per-node {RANKS}" if RANKS > 1 else "python"
    again = f"continue it with: {again} {sys.argv[0]} --resume {folder}"
    try:
        finetune(options.model or trained_base(folder / BASE, options), folder, options)
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        say(f"{stopped}; the run is saved in {folder}\n{again}")
        return INTERRUPTED
    except KeyboardInterrupt:
        say(f"\nstopped at once; if the run was saved before, it goes on from there\n{again}")
        return INTERRUPTED
    finally:
        if RANKS > 1:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
