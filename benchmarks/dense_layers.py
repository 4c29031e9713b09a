"""Measure dense layers in 8 or 4 bits in a model with 4-bit experts: its time per token, and its change in output.

    python -m benchmarks.dense_layers [--layers N] [--hidden N] [--ffn N] [--experts N] [--vocabulary N] [--rounds N]
                                      [--steps N] [--output DIR]

Time: an OLMoE of a few layers of its published sizes, with random weights in bfloat16, computes one token after another
after a prompt. Its dense layers stay in bfloat16, or are held in 8 or 4 bits; the variants take turns in one process,
and every figure is the median of the rounds with their quartiles. Accuracy: a small OLMoE is trained on the text of
this repository, byte by byte. It is then rounded in several ways, and each variant's logits for text that it has not
seen are compared with the logits of the float32 weights.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.run import Run, as_report, measured, parser_of, show_sections, spread_of
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles
from pymoe.nn import quantize_experts, quantize_linears

Record = dict[str, Any]
DENSE: dict[str, int | None] = {"as they are": None, "8 bits": 8, "4 bits": 4}
"""The formats of the dense layers by name, with their bits; None leaves the layers as they are."""
EXPERT_BITS = 4
PROMPT, TOKENS = 32, 4
"""Tokens of the prompt, and tokens that are then timed for each format in each round."""
BATCH, LENGTH = 8, 128
"""Sequences in a training step, and bytes in a sequence."""


def main() -> int:
    """Measure, write and show both tables."""
    options = parse()
    settings = {name: getattr(options, name) for name in ("layers", "hidden", "ffn", "experts", "rounds", "steps")}
    run = Run("dense_layers", options.output, settings, time={}, accuracy=[])
    run.result["accuracy"] = accuracy(options.steps)
    run.keep(markdown)
    run.result["time"] = times(options)
    run.keep(markdown)
    show_sections(sections(run.result))
    return 0


def parse() -> argparse.Namespace:
    """Return the options; the sizes are OLMoE's."""
    parser = parser_of("dense_layers", __doc__ or "")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--hidden", type=int, default=2048, metavar="N")
    parser.add_argument("--ffn", type=int, default=1024, metavar="N", help="inner size of an expert")
    parser.add_argument("--experts", type=int, default=64, metavar="N", help="of a layer; a token has 8 of them")
    parser.add_argument("--vocabulary", type=int, default=50304, metavar="N")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="of all ways (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="of training (default: %(default)s)")
    return parser.parse_args()


def olmoe(**sizes: int) -> Any:
    """Return an OLMoE with random weights that runs on pymoe, in torch's default dtype."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    import pymoe.integrations.transformers  # noqa: F401

    torch.manual_seed(0)
    config = OlmoeConfig(**sizes, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None)
    config._experts_implementation = "pymoe"
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation("pymoe")
    return model


@torch.no_grad()
def times(options: argparse.Namespace) -> Record:
    """Return, for every format of the dense layers, the seconds per token and the bytes of these layers."""
    torch.set_default_dtype(torch.bfloat16)
    heads = max(options.hidden // 128, 1)
    model = olmoe(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_experts=options.experts,
        num_experts_per_tok=min(8, options.experts),
    ).eval()
    torch.set_default_dtype(torch.float32)
    quantize_experts(model, EXPERT_BITS)
    ways = {name: dense(model, bits) for name, bits in DENSE.items()}
    prompt = torch.randint(options.vocabulary, (1, PROMPT))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, layers in ways.items():
            for path, layer in layers.items():
                model.set_submodule(path, layer)
            past = model(prompt, use_cache=True).past_key_values
            token = prompt[:, :1]
            each = []
            for _ in range(TOKENS):
                start = time.perf_counter()
                token = model(token, past_key_values=past, use_cache=True).logits[:, -1:].argmax(-1)
                each.append(time.perf_counter() - start)
            if number:  # the first round warms up
                seconds[name].append(min(each))
    return {name: asdict(Quartiles.of(taken)) | {"bytes": size(ways[name])} for name, taken in seconds.items()}


def dense(model: nn.Module, bits: int | None) -> dict[str, nn.Module]:
    """Return the linear layers of a model by path, those that :func:`quantize_linears` chooses in ``bits`` bits."""
    own = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    holder = nn.Module()
    for name, module in own.items():
        path, _, last = name.rpartition(".")
        parent = holder
        for part in filter(None, path.split(".")):
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, copy.copy(module))
    if bits is not None:
        quantize_linears(holder.eval(), bits)
    return {name: holder.get_submodule(name) for name in own}


def size(layers: dict[str, nn.Module]) -> int:
    """Return how many bytes the layers hold."""
    return sum(tensor.nbytes for layer in layers.values() for tensor in layer.state_dict().values())


def accuracy(steps: int) -> list[Record]:
    """Return a trained model's loss in float32, then the loss and the error of each way to round the model."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 256}
    model = olmoe(**sizes, max_position_embeddings=LENGTH)
    text = corpus()
    split = len(text) * 9 // 10
    train(model, text[:split], steps)
    unseen = text[split : split + 64 * LENGTH].view(-1, LENGTH)
    expected = logits(model, unseen)
    cases: list[tuple[str, int | None, int | None]] = [("bfloat16", None, None)]
    cases += [(f"experts in {bits} bits, dense layers {name}", bits, DENSE[name]) for bits in (8, 4) for name in DENSE]
    found = [{"way": "float32", "loss": loss(expected, unseen)}]
    for name, bits, linear_bits in cases:
        other = copy.deepcopy(model)
        if bits is None:
            other.bfloat16()
        else:
            quantize_experts(other, bits)
        if linear_bits is not None:
            quantize_linears(other, linear_bits)
        got = logits(other, unseen)
        divergence = nn.functional.kl_div(
            got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
        )
        found.append(
            {
                "way": name,
                "loss": loss(got, unseen),
                "error": float((got - expected).norm() / expected.norm()),
                "divergence": float(divergence.sum(-1).mean()),
                "same": float((got.argmax(-1) == expected.argmax(-1)).double().mean()),
            }
        )
    return found


def corpus() -> Tensor:
    """Return the bytes of the repository's Python files and documentation, concatenated in a fixed order."""
    root = Path(__file__).parents[1]
    files = sorted(
        file for folder in ("pymoe", "docs") for ending in ("py", "md") for file in (root / folder).rglob(f"*.{ending}")
    )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"".join(files[i].read_bytes() for i in order)), dtype=torch.uint8).long()


def train(model: Any, text: Tensor, steps: int) -> None:
    """Train the model on sequences that are cut from the text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random).tolist()
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of every sequence in float64."""
    return torch.cat([model(one[None], use_cache=False).logits.double() for one in ids])


def loss(found: Tensor, ids: Tensor) -> float:
    """Return the cross entropy of the next bytes."""
    return float(nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return both tables with their headings."""
    heading = ["dense layers", "their MB", "ms a token [quartiles]", "speed"]
    first = next(iter(result["time"].values()), {}).get("median", 1.0)
    rows = [
        [name, f"{one['bytes'] / 1e6:,.0f}", spread_of(one, "{:.1f}", 1e3), f"{first / one['median']:.2f}x"]
        for name, one in result["time"].items()
    ]
    changes = [
        [
            one["way"],
            f"{one['loss']:.4f}",
            *(
                [f"{one['error']:.4f}", f"{one['divergence']:.2e}", f"{one['same']:.2%}"]
                if "error" in one
                else ["0", "0", "100%"]
            ),
        ]
        for one in result["accuracy"]
    ]
    changed = ["weights", "loss", "error of logits", "KL divergence, nats", "same first choice"]
    return [
        ("Time per token, experts in 4 bits", Table(heading, rows, left=frozenset({"dense layers"}))),
        ("Change of a trained model", Table(changed, changes, left=frozenset({"weights"}))),
    ]


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    settings = result["settings"]
    about = (
        f"An OLMoE of {settings['layers']} layers with hidden size {settings['hidden']} and {settings['experts']} "
        f"experts of {settings['ffn']}, random weights, batch 1; medians of {settings['rounds']} rounds in turns, each "
        f"the fastest of {TOKENS} tokens. The trained model has 4 layers with hidden size 256 and 16 experts of 128, "
        f"after {settings['steps']} steps; its float32 weights are the reference."
    )
    return as_report([measured(result, about, f"{torch.get_num_threads()} torch threads")], sections(result))


if __name__ == "__main__":
    raise SystemExit(main())
