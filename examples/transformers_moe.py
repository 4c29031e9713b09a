"""A mixture-of-experts model of transformers generates text and trains, before and after its experts switch to pymoe.

    python examples/transformers_moe.py
    python examples/transformers_moe.py --hidden 2048 --ffn 1024 --experts 64 --top-k 8 --layers 2   # OLMoE's blocks

The model has OLMoE's architecture and random weights, made from a configuration: nothing is downloaded. It first trains
for some steps on the Python manual with transformers' own implementation, and goes on from there twice, with that and
with pymoe: the losses must agree. Then it generates greedily with a cache of keys and values, in float32 and bfloat16
with each implementation, and reports tokens a second, medians over rounds in which the implementations take turns. The
run ends with checks, and exit status 1 if one fails.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "transformers"))

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from common import at_least, load_text, parser_of, tell
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

import pymoe.integrations.transformers  # noqa: F401  registers the implementation called "pymoe"

BYTES = 256
IMPLEMENTATIONS = ("eager", "grouped_mm", "pymoe")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGEST_DIFFERENCE = 1e-3
"""Between the losses of the two runs: rounding, which training amplifies step by step."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, default, about in (
        ("hidden", 256, "hidden size"),
        ("ffn", 256, "inner size of an expert"),
        ("experts", 32, "experts of a layer"),
        ("top-k", 4, "experts that a token goes to"),
        ("layers", 4, "layers"),
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
    """A model of transformers with random weights."""
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
    """Windows of a text, the same for every run that begins at the same step."""

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
    """Train with transformers, then from the state that is reached with transformers and with pymoe.

    Leaves the model as the run with pymoe did, and returns the losses of all three parts.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
    print(f"\ntrained with eager for {before} steps: loss {losses['before'][0]:.4f} to {losses['before'][-1]:.4f}")
    print(f"{'step':>6} {'eager':>9} {'pymoe':>9}")
    for step, (eager, pymoe_loss) in enumerate(zip(losses["eager"], losses["pymoe"], strict=True), before):
        print(f"{step:>6} {eager:>9.5f} {pymoe_loss:>9.5f}")


def generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    """Continue every prompt greedily; return what was generated, (batch, new)."""
    found: Tensor = model.generate(prompt, max_new_tokens=new, do_sample=False, use_cache=True)
    return found[:, prompt.shape[1] :]


def measured(model: Any, prompt: Tensor, new: int, rounds: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return what each implementation generates, and its bytes a second, prompt included in the time."""
    found, seconds = {}, {name: [] for name in IMPLEMENTATIONS}
    for name in IMPLEMENTATIONS:  # not timed: what comes first finds caches cold
        model.set_experts_implementation(name)
        found[name] = generate(model, prompt, new)
    for _ in range(rounds):
        for name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
            start = time.perf_counter()
            generate(model, prompt, new)
            seconds[name].append(time.perf_counter() - start)
    return found, {name: found[name].numel() / statistics.median(times) for name, times in seconds.items()}


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
        "training continues after the switch": losses["pymoe"][-1] < losses["before"][0],
    }

    model.eval()
    prompt = Batches(text, options.batch, options.prompt)[0]
    print(f"\nbytes a second, {options.new} after a prompt of {options.prompt}, batch {options.batch}")
    print(f"{'':>6} " + " ".join(f"{name:>10}" for name in IMPLEMENTATIONS) + "  pymoe over the better")
    for dtype, torch_dtype in DTYPES.items():
        model.to(torch_dtype)
        found, speeds = measured(model, prompt, options.new, options.rounds)
        gain = speeds["pymoe"] / max(speeds[name] for name in IMPLEMENTATIONS[:-1])
        print(f"{dtype:>6} " + " ".join(f"{speeds[name]:>10.1f}" for name in IMPLEMENTATIONS) + f"  {gain:.2f}x")
        if dtype == "fp32":
            checks["fp32: pymoe generates what eager generates"] = torch.equal(found["pymoe"], found["eager"])
    print(f"\npymoe wrote: {bytes(found['pymoe'][0].tolist())!r}\n")
    return tell(checks)


if __name__ == "__main__":
    sys.exit(main())
