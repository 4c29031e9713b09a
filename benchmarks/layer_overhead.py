"""Measure what calling a small MoE layer costs in addition to its kernels: pymoe's layer, and transformers blocks.

    python -m benchmarks.layer_overhead [--budget S] [--output DIR]

When text is generated token by token, a layer's own work may take less time than the calls that start it. Here this
work is almost nothing (H 64, F 64, E 8, K 2), so the calls take most of the time. The clock is one thread's processor
time; candidates take turns, each with many calls in a row. The line "native calls" is the layer's calls of native code
by themselves, and "experts" is the larger part of them. "router" and "losses" are modules of the layer, called by
themselves; the layer needs the losses when a caller asks for its statistics. Writes JSON and a Markdown table.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib import metadata, util
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.run import Run, as_markdown, measured, parser_of
from benchmarks.host_calls import Call, microseconds, native_calls
from benchmarks.layers.blocks import Block, mixtral
from pymoe.bench.report import Table, show
from pymoe.nn import MoE

BLOCK = Block("tiny", hidden=64, ffn=64, experts=8, choices=2, build=mixtral)
TOKENS = (1, 16)
IMPLEMENTATIONS = ("eager", "grouped_mm", "pymoe")
"""Names of transformers' implementations of the experts of a block."""

Candidates = dict[str, Call]


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = parser_of("layer_overhead", __doc__ or "")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for every number of tokens and mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run("layer_overhead", options.output, {"budget": options.budget})
    records = [
        {"mode": mode, "tokens": tokens, "name": name, **asdict(spread)}
        for mode, candidates_of in (("inference", inference), ("training", training))
        for tokens in TOKENS
        for name, spread in microseconds(candidates_of(tokens), options.budget).items()
    ]
    run.result["microseconds"] = records
    table = as_table(records)
    show(table)
    run.keep(lambda result: report(result, table))


def make_layer(tokens: int) -> tuple[MoE, Tensor]:
    """Return the layer and its input."""
    torch.manual_seed(0)
    return MoE(BLOCK.hidden, BLOCK.ffn, BLOCK.experts, BLOCK.choices), torch.randn(tokens, BLOCK.hidden)


def inference(tokens: int) -> Candidates:
    """Return the calls without gradients."""
    layer, x = make_layer(tokens)
    layer.eval()
    router, experts, native = layer.router, layer.experts, torch.ops.pymoe
    w_in, w_out = experts.w_in.detach(), experts.w_out.detach()
    with torch.no_grad():
        gate, logits = router(x)

    candidates: Candidates = {
        "MoE": lambda: layer(x),
        "native calls": native_calls(layer, x),
        "experts": lambda: native.apply_experts.default(
            x, gate.experts, gate.weights, w_in, None, w_out, None, 0, None, False
        ),
        "router": lambda: router(x),
        "losses": lambda: layer.losses(gate, logits),
    }
    for name, block in blocks().items():
        candidates[name] = lambda block=block: block(x[None])  # type: ignore[misc]
    return {name: torch.no_grad()(call) for name, call in candidates.items()}


def training(tokens: int) -> Candidates:
    """Return the calls that run a forward and a backward pass."""
    layer, x = make_layer(tokens)
    candidates: Candidates = {"MoE": lambda: layer(x).sum().backward()}
    for name, block in blocks().items():
        candidates[name] = lambda block=block: block(x[None]).sum().backward()  # type: ignore[misc]
    return candidates


def blocks() -> dict[str, nn.Module]:
    """Return a transformers block for every implementation of its experts; none if transformers is not installed."""
    if util.find_spec("transformers") is None:
        return {}
    import pymoe.integrations.transformers  # noqa: F401  # registers the last implementation

    found = {}
    for implementation in IMPLEMENTATIONS:
        torch.manual_seed(0)
        block = mixtral(BLOCK)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.1)
        block.experts.config._experts_implementation = implementation  # type: ignore[union-attr, operator, assignment]
        found[f"transformers {metadata.version('transformers')} Mixtral, {implementation}"] = block
    return found


def as_table(records: list[dict[str, Any]]) -> Table:
    """Return a table with a row for every candidate and a column for every mode and number of tokens."""
    columns = [(mode, tokens) for mode in ("inference", "training") for tokens in TOKENS]
    cells = {(one["name"], one["mode"], one["tokens"]): f"{one['median']:.0f}" for one in records}
    names = dict.fromkeys(one["name"] for one in records)
    return Table(
        ["µs", *(f"{mode}, T {tokens}" for mode, tokens in columns)],
        [[name, *(cells.get((name, *column), "") for column in columns)] for name in names],
        left=frozenset({"µs"}),
    )


def report(result: dict[str, Any], table: Table) -> str:
    """Return the report of a run as Markdown."""
    about = (
        f"H {BLOCK.hidden}, F {BLOCK.ffn}, E {BLOCK.experts}, K {BLOCK.choices}, float32. Medians of processor time; "
        "training is forward and backward."
    )
    return "\n".join(["# Calls of a small layer", "", measured(result, about), "", *as_markdown(table), ""])


if __name__ == "__main__":
    main()
