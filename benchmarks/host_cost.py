"""Measure the host's cost of a call without its kernel: every operator, raw and from Python, a layer, and torch.add.

    python -m benchmarks.host_cost [--budget S] [--output DIR]

The kernels have almost nothing to do (H 16, F 16, E 8, K 2, one token), so the time goes to everything that comes
before them: checks, Python, autograd, the dispatcher, memory for outputs. The clock is one thread's processor time;
candidates take turns, each with many calls in a row. "Raw" is the native operator by itself, "recorded" is the same
call when a gradient is asked for. Writes JSON and Markdown tables.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.run import Run, as_markdown, measured, parser_of
from benchmarks.host_calls import Call, microseconds, native_calls
from pymoe import ops
from pymoe.bench.report import Table, show
from pymoe.nn import MoE

HIDDEN, FFN, EXPERTS, CHOICES = 16, 16, 8, 2
TOKENS = (1, 4, 16)
UNIT = "torch.add"
WAYS = ("raw", "Python", "recorded")
LAYER_WAYS = ("native calls", "no gradients", "recorded", "forward + backward")

Candidates = dict[tuple[str, str], Call]
"""Functions to time, keyed by the name of the function and the way in which it is called."""


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = parser_of("host_cost", __doc__ or "")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for all calls together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run("host_cost", options.output, {"budget": options.budget})
    timings = microseconds(operator_calls() | layer_calls(), options.budget)
    records = [{"call": what, "way": way, **asdict(spread)} for (what, way), spread in timings.items()]
    run.result["microseconds"] = records
    tables = as_tables(records)
    for table in tables:
        show(table)
    run.keep(lambda result: report(result, tables))


def operator_calls() -> Candidates:
    """Return every operator's calls with one token, and the call that serves as the unit, ``torch.add``."""
    torch.manual_seed(0)
    native: Any = torch.ops.pymoe
    x, logits, weight = torch.randn(1, HIDDEN), torch.randn(1, EXPERTS), torch.randn(EXPERTS, 2 * FFN, HIDDEN)
    gate = ops.gate_topk(logits, CHOICES)
    routing = ops.build_routing(gate.experts, EXPERTS)
    slot, _, offsets = routing
    rows, h = ops.dispatch(x, routing), torch.randn(CHOICES, 2 * FFN)
    many = [torch.randn(1, HIDDEN) for _ in range(64)]
    leaf = [value.clone().requires_grad_() for value in (x, logits, weight, rows, h, gate.weights)]
    x_leaf, logits_leaf, weight_leaf, rows_leaf, h_leaf, weights_leaf = leaf
    return {
        (UNIT, "Python"): lambda: torch.add(x, x),
        (UNIT, "recorded"): lambda: torch.add(x_leaf, x),
        ("gate_topk", "raw"): lambda: native.gate_topk.default(logits, None, CHOICES, "softmax", True, 0, 0, 1.0),
        ("gate_topk", "Python"): lambda: ops.gate_topk(logits, CHOICES),
        ("gate_topk", "recorded"): lambda: ops.gate_topk(logits_leaf, CHOICES),
        ("build_routing", "raw"): lambda: native.build_routing.default(gate.experts, EXPERTS, None, False),
        ("build_routing", "Python"): lambda: ops.build_routing(gate.experts, EXPERTS),
        ("dispatch", "raw"): lambda: native.dispatch.default(x, slot, offsets, CHOICES),
        ("dispatch", "Python"): lambda: ops.dispatch(x, routing),
        ("dispatch", "recorded"): lambda: ops.dispatch(x_leaf, routing),
        ("grouped_linear", "raw"): lambda: native.grouped_linear.default(rows, weight, offsets, None),
        ("grouped_linear", "Python"): lambda: ops.grouped_linear(rows, weight, offsets),
        ("grouped_linear", "recorded"): lambda: ops.grouped_linear(rows, weight_leaf, offsets),
        ("expert_activation", "raw"): lambda: native.expert_activation.default(h, 0, 0.0, 1.0, 0.0, False),
        ("expert_activation", "Python"): lambda: ops.expert_activation(h, "swiglu"),
        ("expert_activation", "recorded"): lambda: ops.expert_activation(h_leaf, "swiglu"),
        ("combine", "raw"): lambda: native.combine.default(rows, slot, gate.weights),
        ("combine", "Python"): lambda: ops.combine(rows, routing, gate.weights),
        ("combine", "recorded"): lambda: ops.combine(rows_leaf, routing, weights_leaf),
        ("router_losses", "raw"): lambda: native.router_losses.default(logits, gate.load, "softmax", True),
        ("router_losses", "Python"): lambda: ops.router_losses(logits, gate.load),
        ("router_losses", "recorded"): lambda: ops.router_losses(logits_leaf, gate.load),
        ("gather_batch of 64", "raw"): lambda: native.gather_batch.default(many),
        ("gather_batch of 64", "Python"): lambda: ops.gather_batch(many),
    }


def layer_calls() -> Candidates:
    """Return the calls of a layer."""
    found: Candidates = {}
    for tokens in TOKENS:
        torch.manual_seed(0)
        layer, x, ones = MoE(HIDDEN, FFN, EXPERTS, CHOICES), torch.randn(tokens, HIDDEN), torch.ones(tokens, HIDDEN)
        for way, call in calls_of(layer, x, ones).items():
            found[f"MoE, T {tokens}", way] = call
    return found


def calls_of(layer: MoE, x: torch.Tensor, ones: torch.Tensor) -> dict[str, Call]:
    """Return the calls of one layer on the tokens ``x``."""
    leaf = x.clone().requires_grad_()
    return {
        "native calls": native_calls(layer, x),
        "no gradients": torch.no_grad()(lambda: layer(x)),
        "recorded": lambda: layer(leaf),
        "forward + backward": lambda: layer(leaf).backward(ones),
    }


def as_tables(records: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Return the table of operators and the table of the layer."""
    median = {(one["call"], one["way"]): one["median"] for one in records}
    unit = median[UNIT, "Python"]
    names = list(dict.fromkeys(one["call"] for one in records))

    def rows(names: list[str], ways: tuple[str, ...], compared: str) -> list[list[str]]:
        found = []
        for name in names:
            cells = [f"{median[name, way]:.1f}" if (name, way) in median else "" for way in ways]
            found.append([name, *cells, f"{median[name, compared] / unit:.1f}"])
        return found

    of_layer = [name for name in names if name.startswith("MoE")]
    operators = [name for name in names if name not in of_layer]
    left = frozenset({"µs"})
    return (
        Table(["µs", *WAYS, f"Python / {UNIT}"], rows(operators, WAYS, "Python"), left=left),
        Table(["µs", *LAYER_WAYS, f"no gradients / {UNIT}"], rows(of_layer, LAYER_WAYS, "no gradients"), left=left),
    )


def report(result: dict[str, Any], tables: tuple[Table, Table]) -> str:
    """Return the report of a run as Markdown."""
    about = (
        f"H {HIDDEN}, F {FFN}, E {EXPERTS}, K {CHOICES}, float32, on the CPU; operators with one token. Medians of "
        f'processor time of a call. "Raw" is the native operator by itself, "recorded" a call whose gradient is asked '
        f"for, and the last column the call's time over that of `{UNIT}` of as many numbers."
    )
    lines = ["# What calls cost the host", "", measured(result, about), ""]
    for table in tables:
        lines += [*as_markdown(table), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
