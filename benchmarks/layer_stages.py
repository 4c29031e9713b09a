"""Show where the time of an expert block goes: time every operator of a forward pass, and give the block's limits.

    python -m benchmarks.layer_stages [--blocks NAME,...] [--dtypes NAME,...] [--tokens N,...] [--budget S]
                                      [--output DIR]

The result explains the cells of ``benchmarks.model_layers`` that miss their limit. The clock is the processor time of
one thread, pinned to one core. Operators run with the block's weights and routing, each on the output of the operator
before it, and take turns. Writes JSON and a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.run import Run, as_markdown, measured, names_of, parser_of
from benchmarks.layers.blocks import BLOCKS, TINY, Block, Built, built
from benchmarks.layers.limits import READ_BYTES, dense_products, fastest_reader, read, weights_read
from benchmarks.model_layers import DTYPES, LARGE, counts, pin
from pymoe import ops
from pymoe.bench.environment import memory_gib
from pymoe.bench.report import Table, plain
from pymoe.bench.timing import WallTimer, measure
from pymoe.integrations.transformers.activations import activation_of
from pymoe.nn import apply_experts
from pymoe.nn.apply_experts import activate

Record = dict[str, Any]
Calls = dict[str, Callable[[], object]]
STAGES = ("build_routing", "dispatch", "first product", "activation", "second product", "combine")
PRODUCTS = ("first product", "second product")
LEFT = ("block", "dtype")
HEADING = (
    *(*LEFT, "T", "rows an expert", "one call", "GFLOP/s of the products", "of `mm`", "products"),
    *("routing and dispatch", "activation", "combine", "read once", "dense mm"),
)


def main() -> int:
    """Measure every block, dtype and number of tokens."""
    options = parse()
    run = Run("layer_stages", options.output, {}, cases=[])
    pin()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timer = WallTimer(time.process_time)
    for name in options.blocks:
        block: Block = {**BLOCKS, **TINY}[name].fitting((memory_gib() or 16.0) / 2 * 2**30)
        reader = fastest_reader(timer, READ_BYTES >> 4 if block.weights < LARGE else READ_BYTES).reader
        for dtype in options.dtypes:
            one = built(block, DTYPES[dtype])
            for tokens in options.tokens:
                gc.collect()
                x_TH = torch.randn(tokens, block.hidden).to(one.dtype)
                with torch.no_grad():
                    index, weights = one.choice(x_TH)
                    calls = stages_of(one, x_TH, index, weights)
                    calls["read once"] = partial(read, reader, weights_read(one, index))
                    calls["dense mm"] = dense_products(one, tokens, False)
                    timings = measure(calls, budget=options.budget, rounds=(options.rounds, 100), timer=timer)
                case = {"block": block.title, "dtype": dtype, "tokens": tokens, "rows": index.numel() / block.experts}
                case |= {"flops": flops_of(one, index), "dense_flops": block.flops(tokens, False)}
                case["seconds"] = {stage: asdict(timing.spread) for stage, timing in timings.items()}
                run.result["cases"].append(case)
                print(plain(table([case])), flush=True)
                run.keep(markdown)
            del one
    return 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("layer_stages", __doc__)
    everything = (*BLOCKS, *TINY)
    parser.add_argument("--blocks", type=names_of(everything), default=list(BLOCKS), metavar="NAME,...")
    parser.add_argument("--dtypes", type=names_of(tuple(DTYPES)), default=["bf16"], metavar="NAME,...")
    parser.add_argument("--tokens", type=counts, default=(128, 512, 2048), metavar="N,...", help="tokens of a call")
    parser.add_argument("--budget", type=float, default=3.0, metavar="S", help="seconds a case (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of a case at least (default: %(default)s)")
    return parser.parse_args()


def stages_of(one: Built, x_TH: Tensor, index: Tensor, weights: Tensor) -> Calls:
    """Return each operator of a block's experts by name, and ``one call``, which runs all of them."""
    experts: Any = one.experts
    w_in, w_out = (weight.detach() for weight in one.touched)
    if getattr(experts, "is_transposed", False):
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    b_in = getattr(experts, "gate_up_proj_bias", None)
    b_out = getattr(experts, "down_proj_bias", None)
    activation = activation_of(experts)
    number, index = one.block.experts, index.int()
    routing = ops.build_routing(index, number)
    rows_SH = ops.dispatch(x_TH, routing)
    inner = ops.grouped_linear(rows_SH, w_in, routing.offsets, b_in)
    active = activate(inner, activation)
    outer_SH = ops.grouped_linear(active, w_out, routing.offsets, b_out)
    weights = weights.to(x_TH.dtype)
    return {
        "build_routing": lambda: ops.build_routing(index, number),
        "dispatch": lambda: ops.dispatch(x_TH, routing),
        "first product": lambda: ops.grouped_linear(rows_SH, w_in, routing.offsets, b_in),
        "activation": lambda: activate(inner, activation),
        "second product": lambda: ops.grouped_linear(active, w_out, routing.offsets, b_out),
        "combine": lambda: ops.combine(outer_SH, routing, weights),
        "one call": lambda: apply_experts(
            x_TH, index, weights, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation
        ),
    }


def flops_of(one: Built, index: Tensor) -> int:
    """Return the number of floating-point operations in the chosen experts' products: two per weight and row."""
    return 2 * index.numel() * one.block.per_expert


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    about = (
        "Processor time, medians over rounds in which the operators take turns. `one call` is `apply_experts` without "
        "gradients, which runs all of them. `GFLOP/s` are those of both products, and `of mm` those of the same block "
        "in dense `torch.mm`. The next four columns are shares of the sum of the operators. `read once` (the touched "
        "weights, by the fastest of torch's reductions) and `dense mm` are shares of one call, which can be faster "
        "than neither; they have the shared expert, too, which no operator has."
    )
    return "\n".join([measured(result, about, "one torch thread"), "", *as_markdown(table(result["cases"])), ""])


def table(cases: list[Record]) -> Table:
    """Return a table with one row per case."""
    rows = []
    for case in cases:
        median = {name: spread["median"] for name, spread in case["seconds"].items()}
        everything = sum(median[stage] for stage in STAGES)
        products = sum(median[stage] for stage in PRODUCTS)
        shares = (products, median["build_routing"] + median["dispatch"], median["activation"], median["combine"])
        rows.append(
            (
                case["block"],
                case["dtype"],
                f"{case['tokens']:,}",
                f"{case['rows']:.3g}",
                f"{median['one call'] * 1e3:.3g} ms",
                f"{case['flops'] / products / 1e9:.0f}",
                f"{case['dense_flops'] / median['dense mm'] / 1e9:.0f}",
                *(f"{share / everything:.0%}" for share in shares),
                *(f"{median[limit] / median['one call']:.0%}" for limit in ("read once", "dense mm")),
            )
        )
    return Table(HEADING, rows, frozenset(LEFT))


if __name__ == "__main__":
    sys.exit(main())
