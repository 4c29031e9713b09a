"""Time every CPU kernel under each instruction set that it is compiled for, and show which set is faster where.

    python -m benchmarks.instruction_sets [--filter REGEX] [--rounds N] [--most-mib N] [--output DIR]

Children with ``PYMOE_CPU_ISA=baseline``, ``v3``, ``v4``, ``v4_bf16`` and ``amx`` stay alive with the same inputs and
take turns, round by round, each on one thread. The clock is the thread's processor time, page faults included, so that
other work on the machine shows little; ratios are taken within a round and shown as median and quartiles. Instruction
sets that the processor lacks are left out. Writes JSON and a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.children import Child, serve
from benchmarks.common.comparison import from_turn
from benchmarks.common.run import Run, parser_of

ISAS = ("baseline", "v3", "v4", "v4_bf16", "amx")
SPAN = 0.1
"""Least seconds of measurement behind each value."""


def lines(most_bytes: float) -> list[Any]:
    """Return the benchmark cases, as pairs of operator and case."""
    from pymoe.bench.operators import OPERATORS

    return [(one, case) for one in OPERATORS.values() for case in one.bench_cases if case.bytes <= most_bytes]


def name_of(spec: Any, case: Any) -> str:
    """Return the name of a case, which ``--filter`` is matched with."""
    direction = "forward+backward" if case.backward else "forward"
    return f"{spec.name} | {case.name} | {str(case.dtype).removeprefix('torch.')} | {direction}"


def prepared(spec: Any, case: Any) -> Callable[[], object]:
    """Return a function that makes the call of a case."""
    from pymoe.bench.calls import generator
    from pymoe.bench.lines import forward_call, training_step

    return (training_step if case.backward else forward_call)(spec.native, case.make(generator()))


def child(most_bytes: float) -> None:
    """Serve the cases by name."""
    by_name = {name_of(spec, case): (spec, case) for spec, case in lines(most_bytes)}
    serve_calls(lambda name: prepared(*by_name[name]))


def serve_calls(call_of: Callable[[str], Callable[[], object]]) -> None:
    """Answer ``["prepare", WHAT]``, for which ``call_of`` returns a call, and ``["run", CALLS]`` with seconds per call.

    The answer to ``["isa", None]`` is the instruction set.
    """
    import torch

    import pymoe

    torch.set_num_threads(1)
    call: Callable[[], object] = int

    def answer(request: list[Any]) -> Any:
        nonlocal call
        word, what = request
        if word == "isa":
            return pymoe.build_info()["cpu_isa"]
        if word == "prepare":
            call = call_of(what)
            call()
            gc.collect()
            gc.disable()
        calls = 1 if word == "prepare" else what
        start = time.thread_time()
        for _ in range(calls):
            call()
        return (time.thread_time() - start) / calls

    serve(lambda: answer)


def children_for(isas: Sequence[str], *program: str) -> dict[str, Child]:
    """Return a child on one thread for each instruction set that this processor has."""
    children = {}
    for isa in isas:
        variables = {"PYMOE_CPU_ISA": isa, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        one = Child([sys.executable, "-m", *program], variables, quiet=False)
        if one.ask(["isa", None]) == isa or isa not in ISAS:
            children[isa] = one
        else:
            one.end()
    return children


def made_by(result: dict[str, Any]) -> str:
    """Return the first paragraph of a report: the command, the machine, its compiler, its load and the date."""
    facts = result["environment"]
    return (
        f"Made by `{result['command']}`: {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; "
        f"torch {facts['torch']}, compiler {facts['compiler']}; load {facts['load']}, {facts['date']}.\n"
    )


def in_turns(children: dict[str, Child], what: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Have children prepare the cases under the given names; return each name's seconds per call in each round."""
    first = {isa: children[isa].ask(["prepare", one]) for isa, one in what.items()}
    calls = {isa: max(1, math.ceil(SPAN / max(seconds, 1e-7))) for isa, seconds in first.items()}
    seconds: dict[str, list[float]] = {isa: [] for isa in what}
    isas = list(what)
    for number in range(rounds):
        for isa in from_turn(isas, number):
            seconds[isa].append(children[isa].ask(["run", calls[isa]]))
    return seconds


def measured(children: dict[str, Child], name: str, rounds: int) -> dict[str, Any]:
    """Return the record of one line: its seconds and their ratios to v3, as medians and quartiles."""
    from pymoe.bench.timing import Quartiles

    seconds = in_turns(children, dict.fromkeys(children, name), rounds)

    def spread(values: list[float]) -> list[float]:
        found = Quartiles.of(values)
        return [found.low, found.median, found.high]

    return {
        "name": name,
        "seconds": {isa: spread(values) for isa, values in seconds.items()},
        "over_v3": {
            isa: spread([mine / theirs for mine, theirs in zip(values, seconds["v3"], strict=True)])
            for isa, values in seconds.items()
            if isa != "v3"
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    records, rounds = result["lines"], result["settings"]["rounds"]
    others = [isa for isa in ISAS if isa in records[0]["over_v3"]]
    text = [
        "# Instruction sets of the CPU kernels\n",
        made_by(result),
        f"Time of one thread, {rounds} rounds in which the instruction sets take turns: milliseconds a call, and the "
        "time of another set over that of v3 (AVX2), median and quartiles of the rounds. Below 1 it is faster than v3. "
        "dispatch, gather_batch and build_routing have one version alone: their ratios show what the places of buffers "
        "in memory do to a measurement in several processes. Under v4 gate_topk has the forward of v3.\n",
        "| operator | case | dtype | direction | v3 ms | " + " | ".join(f"{isa} / v3" for isa in others) + " |",
        "|---|---|---|---|--:|" + "--:|" * len(others),
    ]
    for record in records:
        ratios = [record["over_v3"][isa] for isa in others]
        cells = " | ".join(f"{median:.2f} ({low:.2f} to {high:.2f})" for low, median, high in ratios)
        text.append(f"| {record['name']} | {record['seconds']['v3'][1] * 1e3:.3g} | {cells} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = parser_of("instruction_sets", __doc__ or "")
    parser.add_argument("--filter", default="", help="a regular expression for names of lines")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most-mib", type=float, default=600.0, help="leave out lines that move more")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    most_bytes = options.most_mib * 2**20
    if options.child:
        child(most_bytes)
        return
    run = Run("instruction_sets", options.output, {"rounds": options.rounds}, lines=[])
    children = children_for(ISAS, "benchmarks.instruction_sets", "--child", "--most-mib", str(options.most_mib))
    if "v3" not in children:
        raise SystemExit("the processor has neither AVX2 nor AVX-512: there is nothing to compare")
    for spec, case in lines(most_bytes):
        name = name_of(spec, case)
        if re.search(options.filter, name):
            run.result["lines"].append(measured(children, name, options.rounds))
            run.keep(table)
            print(table(run.result).splitlines()[-1], flush=True)
    for one in children.values():
        one.end()


if __name__ == "__main__":
    main()
