"""Trains a mixture-of-experts model of transformers and generates text, before and after its experts switch to pymoe.

    python examples/transformers_moe.py
    python examples/transformers_moe.py --steps 1 --hidden 2048 --ffn 1024 --experts 64 --top-k 8   # OLMoE's blocks

The model has OLMoE's architecture and random weights; nothing is downloaded. It first trains for some steps on the
Python manual with transformers' own implementation of experts. From there it continues twice, with that implementation
and with pymoe; the losses must agree. Then it generates greedily with a key-value cache, in float32 and in bfloat16
with each implementation, and reports tokens per second, as medians over rounds in which the implementations take turns.
At the end the program checks the results, and exits with status 1 if a check fails.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "transformers"))

import argparse
import copy
import math
import statistics
import time
from typing import Any

import torch
from common import at_least, load_text, parser_of, tell
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

import pymoe.integrations.transformers  # noqa: F401  registers the implementation called "pymoe"
from pymoe.nn import quantize_experts

BYTES = 256
IMPLEMENTATIONS = ("eager", "grouped_mm", "pymoe")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGEST_DIFFERENCE = 1e-3
"""Largest permitted difference between losses of the two runs: training amplifies rounding step by step."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, default, about in (
        ("hidden", 256, "hidden size"),
        ("ffn", 256, "inner size of an expert"),
        ("experts", 32, "experts of a layer"),
        ("top-k", 4, "experts that a token goes to"),
        ("layers", 2, "layers"),
        ("heads", 4, "heads of attention"),
        ("batch", 1, "prompts that are continued at once"),
        ("prompt", 32, "bytes of a prompt"),
        ("new", 32, "bytes to generate"),
        ("rounds", 3, "measurements of each kind"),
        ("steps", 10, "training steps before the switch, and after it"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help=f"{about} (default {default})")
    options = parser.parse_args(arguments)
    if options.top_k > options.experts:
        parser.error(f"--top-k must be at most --experts ({options.experts}), got {options.top_k}")
    if options.hidden % (2 * options.heads):
        parser.error(f"--hidden must be a multiple of 2 * --heads ({2 * options.heads}), got {options.hidden}")
    return options


def build(options: argparse.Namespace) -> Any:
    """Return a model of transformers with random weights."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=BYTES,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=options.prompt + options.new,
        pad_token_id=0,
        eos_token_id=None,
    )
    return OlmoeForCausalLM(config)


class Batches:
    """Draws windows of a text, which are the same for all runs that begin at the same step."""

    def __init__(self, text: Tensor, rows: int, length: int) -> None:
        self.text, self.rows, self.length = text, rows, length

    def __getitem__(self, step: int) -> Tensor:
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.text) - self.length, (self.rows,), generator=random)
        return torch.stack([self.text[start : start + self.length] for start in starts.tolist()]).long()


def train(model: Any, optimizer: torch.optim.Optimizer, batches: Batches, steps: range) -> list[float]:
    """Train, and return the loss of every step."""
    model.train()
    losses = []
    for step in steps:
        ids = batches[step]
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def continued(options: argparse.Namespace, model: Any, batches: Batches) -> dict[str, list[float]]:
    """Train with transformers, and continue from that state once with transformers and once with pymoe.

    The model then holds the result of the run with pymoe. Returns the losses of all three parts.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * 256 / max(256, options.hidden))
    model.set_experts_implementation("eager")
    losses = {"before": train(model, optimizer, batches, range(options.steps))}
    reached = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for implementation in ("eager", "pymoe"):
        state, optimizer_state = copy.deepcopy(reached)
        model.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
        model.set_experts_implementation(implementation)
        losses[implementation] = train(model, optimizer, batches, range(options.steps, 2 * options.steps))
    return losses


def show_losses(losses: dict[str, list[float]]) -> None:
    before = len(losses["before"])
    print(f"\nsteps of training with eager: {before}, loss {losses['before'][0]:.4f} to {losses['before'][-1]:.4f}")
    print(f"{'step':>6} {'eager':>9} {'pymoe':>9}")
    for step, (eager, pymoe_loss) in enumerate(zip(losses["eager"], losses["pymoe"], strict=True), before):
        print(f"{step:>6} {eager:>9.5f} {pymoe_loss:>9.5f}")


def generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    """Continue every prompt greedily; return the generated bytes, (batch, new)."""
    found: Tensor = model.generate(prompt, max_new_tokens=new, do_sample=False, use_cache=True)
    return found[:, prompt.shape[1] :]


Found = dict[str, tuple[Tensor, float]]
"""The bytes that each implementation generated, and its bytes per second."""


def measured(model: Any, names: tuple[str, ...], prompt: Tensor, new: int, rounds: int) -> Found:
    """Generate with every implementation in ``names``, in turns. Times include the processing of the prompt."""
    written, seconds = {}, {name: [] for name in names}
    for attempt in range(rounds + 1):
        for name in names:
            model.set_experts_implementation(name)
            start = time.perf_counter()
            written[name] = generate(model, prompt, new)
            if attempt > 0:  # the first run has cold caches
                seconds[name].append(time.perf_counter() - start)
    return {name: (written[name], written[name].numel() / statistics.median(seconds[name])) for name in names}


def measured_in_all_formats(model: Any, prompt: Tensor, options: argparse.Namespace) -> dict[str, Found]:
    """Generate in float32, then in bfloat16, in which ``model`` stays, and with experts in fewer bits."""
    found = {}
    for name, dtype in DTYPES.items():
        found[name] = measured(model.to(dtype), IMPLEMENTATIONS, prompt, options.new, options.rounds)
    model.set_experts_implementation("pymoe")
    for bits in (8, 4):
        quantised = copy.deepcopy(model)
        quantize_experts(quantised, bits=bits)
        found[f"int{bits}"] = measured(quantised, ("pymoe",), prompt, options.new, options.rounds)
    return found


def show_speeds(found: dict[str, Found]) -> None:
    """Print bytes per second, and the share of pymoe's bytes in each format that equal its float32 bytes."""
    columns = " ".join(f"{name:>10}" for name in IMPLEMENTATIONS)
    print(f"{'':>6} {columns}  as fp32  pymoe over the best of transformers")
    best, exact = {}, found["fp32"]["pymoe"][0]
    for format, kinds in found.items():
        speeds = {name: speed for name, (_, speed) in kinds.items()}
        of_transformers = [speed for name, speed in speeds.items() if name != "pymoe"]
        best[format] = max(of_transformers) if of_transformers else best["bf16"]
        cells = " ".join(f"{speeds[name]:>10.1f}" if name in speeds else f"{'-':>10}" for name in IMPLEMENTATIONS)
        same = (kinds["pymoe"][0] == exact).float().mean().item()
        gain = f"{speeds['pymoe'] / best[format]:.2f}x{'' if of_transformers else ' (in bf16)'}"
        print(f"{format:>6} {cells}  {same:>6.0%}   {gain}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    text = load_text("", options.prompt + options.new).train
    model = build(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")

    losses = continued(options, model, Batches(text, 8, options.prompt + options.new))
    show_losses(losses)
    difference = max(abs(a - b) for a, b in zip(losses["eager"], losses["pymoe"], strict=True))
    checks = {
        f"with pymoe the losses are those with eager (largest difference {difference:.1e})": difference
        < LARGEST_DIFFERENCE,
        "all losses after the switch are finite": all(map(math.isfinite, losses["pymoe"])),
    }

    model.eval()
    prompt = Batches(text, options.batch, options.prompt)[0]
    print(f"\nbytes a second, {options.new} after a prompt of {options.prompt}, batch {options.batch}")
    found = measured_in_all_formats(model, prompt, options)
    show_speeds(found)
    same = torch.equal(found["fp32"]["pymoe"][0], found["fp32"]["eager"][0])
    checks["in float32 pymoe generates what eager generates"] = same
    print()
    return tell(checks)


if __name__ == "__main__":
    sys.exit(main())
