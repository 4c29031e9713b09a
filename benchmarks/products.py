"""Time products of bf16 rows with experts' weights at every instruction level and in ``torch.mm``, by rows per expert.

    python -m benchmarks.products [--rows N ...] [--weights REGEX] [--rounds N] [--isas ISA ...] [--output DIR]

A call multiplies the rows of several experts with weights of shape (768, 2048), together more than a core's cache
holds: in bf16, contiguous along the inputs or along the outputs, or in a quantised format. A kind "gradient" multiplies
rows of 768 with the transposed weights, as the gradient of the rows does. Children with the levels of
``PYMOE_CPU_ISA`` stay alive and take turns, one thread each, as in ``benchmarks.instruction_sets``; the clock is the
thread's processor time. Up to 8 rows, reading the weights takes most of the time, so the tables give bytes of weights
per second there, and operations per second from 16 rows on: medians of the rounds. Writes JSON and Markdown tables.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from benchmarks.common.run import Run, as_markdown, parser_of
from benchmarks.instruction_sets import ISAS, children_for, in_turns, made_by, serve_calls

OUTPUTS, INPUTS = 768, 2048
MOST_EXPERTS = 32
MOST_ROWS = 2048
"""Maximum total number of rows of a call; but a call always has at least four experts."""
QUANTISED: dict[str, tuple[Any, ...]] = {"int8": (8,), "int4": (4,), "mxfp4": (4, "mxfp"), "fp8": (8, "fp")}
"""Kinds of quantised weights, and the arguments of ``ops.quantize_weight`` for each."""
AFFINE = {"affine8": (8, 32), "affine4": (4, 128)}
"""Kinds of weights that another program has rounded: number of bits, and number of inputs per group."""
SYMMETRIC = "symmetric8"
READING = 8
"""Rows per expert up to which a table gives bytes per second."""
TORCH = "torch.mm"
WEIGHTS = {"bf16 (out, in)": 16.0, "bf16 (in, out)": 16.0, "int8": 8.0, "int4": 4.5, "mxfp4": 4.25, "fp8": 8.25}
WEIGHTS |= {"affine8": 10.0, "affine4": 4.5, SYMMETRIC: 10.0}
WEIGHTS |= {f"{kind} gradient": bits for kind, bits in WEIGHTS.items() if "(in, out)" not in kind}
"""Kinds of weights, and bits per weight, not counting scales that are stored once per output row."""


def experts_for(rows: int) -> int:
    """Return how many experts a call has."""
    return max(4, min(MOST_EXPERTS, MOST_ROWS // rows))


class Calls:
    """The calls of a child process; the weights of the latest kind are kept."""

    def __init__(self) -> None:
        self.kind = ""
        self.weight: Any = None

    def of(self, kind: str, rows: int, peer: bool) -> Callable[[], object]:
        """Return the call, through pymoe or as a loop of ``torch.mm`` if ``peer``."""
        import torch

        from pymoe import ops
        from pymoe._common.types import FORMATS
        from pymoe.ops.quantized_linear import INPUT_GRAD
        from pymoe.reference import QuantizedWeight

        random = torch.Generator().manual_seed(0)
        is_gradient = kind.endswith(" gradient")
        kind = kind.removesuffix(" gradient")
        if kind != self.kind:
            self.kind, self.weight = kind, None
            weight = torch.randn(MOST_EXPERTS, OUTPUTS, INPUTS, generator=random).bfloat16()
            if kind in QUANTISED:
                self.weight = ops.quantize_weight(weight, *QUANTISED[kind])
            elif kind in AFFINE:
                bits, group = AFFINE[kind]
                codes = torch.randint(2**bits, weight.shape, generator=random, dtype=torch.uint8)
                ends = torch.full((*weight.shape[:2], INPUTS // group), 2.0**-bits)
                self.weight = ops.pack_weight(codes, ends, ends * -(2 ** (bits - 1)), bits)
            elif kind == SYMMETRIC:
                codes = torch.randint(-128, 128, weight.shape, generator=random, dtype=torch.int8)
                self.weight = ops.pack_weight(codes, torch.full((*weight.shape[:2], INPUTS // 16), 2.0**-8))
            elif kind.endswith("(in, out)"):
                self.weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
            else:
                self.weight = weight
        experts = experts_for(rows)
        x = torch.randn(experts * rows, OUTPUTS if is_gradient else INPUTS, generator=random).bfloat16()
        offsets = torch.arange(experts + 1, dtype=torch.int32) * rows
        weight = self.weight
        if peer:
            pairs = [(x[e * rows : (e + 1) * rows], weight[e] if is_gradient else weight[e].T) for e in range(experts)]
            return lambda: [torch.mm(left, right) for left, right in pairs]
        if isinstance(weight, QuantizedWeight):
            some = weight._replace(packed=weight.packed[:experts])
            if is_gradient:
                number = FORMATS[weight.format, weight.bits]
                return lambda: INPUT_GRAD(x, some.packed, offsets, number, INPUTS)
            return lambda: ops.quantized_linear(x, some, offsets)
        weight = weight[:experts].transpose(1, 2) if is_gradient else weight[:experts]
        return lambda: ops.grouped_linear(x, weight, offsets)


def child() -> None:
    """Serve calls that are named by rows, 1 for the peer or 0 for pymoe, and the kind of weights."""
    import torch

    torch.set_grad_enabled(False)
    calls = Calls()

    def call_of(what: str) -> Callable[[], object]:
        rows, peer, kind = what.split(" ", 2)
        return calls.of(kind, int(rows), peer == "1")

    serve_calls(call_of)


def measured(children: dict[str, Any], kind: str, rows: int, rounds: int) -> dict[str, Any]:
    """Return the record of one line: seconds per call by level, the peer included, as medians and quartiles."""
    from pymoe.bench.timing import Quartiles

    asked = [isa for isa in children if isa != TORCH or kind.startswith("bf16")]
    seconds = in_turns(children, {isa: f"{rows} {int(isa == TORCH)} {kind}" for isa in asked}, rounds)
    spreads = {isa: Quartiles.of(values) for isa, values in seconds.items()}
    return {
        "kind": kind,
        "rows": rows,
        "experts": experts_for(rows),
        "seconds": {isa: {"low": s.low, "median": s.median, "high": s.high} for isa, s in spreads.items()},
    }


def cell(record: dict[str, Any], isa: str) -> str:
    """Return the text of one cell of the table."""
    if isa not in record["seconds"]:
        return ""
    per_expert = record["seconds"][isa]["median"] / record["experts"]
    if record["rows"] <= READING:
        return f"{WEIGHTS[record['kind']] / 8 * OUTPUTS * INPUTS / per_expert * 1e-9:.1f} GB/s"
    return f"{2 * record['rows'] * OUTPUTS * INPUTS / per_expert * 1e-9:.0f}"


def tables(result: dict[str, Any], isas: list[str]) -> str:
    """Return the result as Markdown."""
    records, rounds = result["records"], result["settings"]["rounds"]
    from pymoe.bench.report import Table

    text = [
        "# Products by rows an expert\n",
        made_by(result),
        f"Rows of bf16 times weights of shape ({OUTPUTS}, {INPUTS}), one thread, {rounds} rounds in which the levels "
        f"take turns. Up to {READING} rows an expert GB/s of weights, from then on GFLOP/s; `{TORCH}` multiplies "
        "each expert by itself, with the same bf16 weights.",
    ]
    for kind in WEIGHTS:
        lines = [record for record in records if record["kind"] == kind]
        if lines:
            columns = [isa for isa in isas if isa in lines[0]["seconds"]]
            rows = [[str(record["rows"]), *(cell(record, isa) for isa in columns)] for record in lines]
            heading = ["rows", *(f"`{isa}`" if isa == TORCH else isa for isa in columns)]
            text += [f"\n## {kind}\n", *as_markdown(Table(heading, rows, frozenset()))]
    return "\n".join(text) + "\n"


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = parser_of("products", __doc__ or "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 256, 512, 1024], metavar="N")
    parser.add_argument("--weights", default="", metavar="REGEX", help=f"kinds of weights ({', '.join(WEIGHTS)})")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isas", nargs="+", choices=ISAS, default=list(ISAS[1:]), metavar="ISA", help=", ".join(ISAS))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    run = Run("products", options.output, {"rounds": options.rounds}, records=[])
    children = children_for([*options.isas, TORCH], "benchmarks.products", "--child")
    for kind in WEIGHTS:
        for rows in options.rows if re.search(options.weights, kind) else []:
            record = measured(children, kind, rows, options.rounds)
            run.result["records"].append(record)
            run.keep(lambda result: tables(result, list(children)))
            figures = ", ".join(f"{isa} {cell(record, isa)}" for isa in record["seconds"])
            print(f"{kind}, {rows} rows: {figures}", flush=True)
    for one in children.values():
        one.end()


if __name__ == "__main__":
    main()
