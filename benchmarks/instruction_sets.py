"""Every CPU kernel under each instruction set that it is compiled for: which one is faster where.

    python -m benchmarks.instruction_sets [--filter REGEX] [--rounds N] [--most-mib N] [--output DIR]

Children with ``PYMOE_CPU_ISA=baseline``, ``v3``, ``v4``, ``v4_bf16`` and ``amx`` stay alive with the same inputs and
take turns, round by round, each on one thread. Time is that which the thread computed, page faults included, so that
other work on the machine shows little; ratios are taken within a round and shown as median and quartiles. What a
processor offers no better than another is left out. Writes JSON and a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, cast

from benchmarks.output import command, parser_of, save

ISAS = ("baseline", "v3", "v4", "v4_bf16", "amx")
SPAN = 0.1
"""Seconds that a value rests on at least."""


def lines(most_bytes: float) -> list[Any]:
    """The benchmark cases, as pairs of operator and case."""
    from pymoe.bench.operators import OPERATORS

    return [(one, case) for one in OPERATORS.values() for case in one.bench_cases if case.bytes <= most_bytes]


def name_of(spec: Any, case: Any) -> str:
    """What ``--filter`` is matched with."""
    direction = "forward+backward" if case.backward else "forward"
    return f"{spec.name} | {case.name} | {str(case.dtype).removeprefix('torch.')} | {direction}"


def prepared(spec: Any, case: Any) -> Callable[[], object]:
    """The call of a case."""
    from pymoe.bench.calls import generator
    from pymoe.bench.lines import forward_call, training_step

    return (training_step if case.backward else forward_call)(spec.native, case.make(generator()))


def child(most_bytes: float) -> None:
    """Serve the cases by name."""
    by_name = {name_of(spec, case): (spec, case) for spec, case in lines(most_bytes)}
    serve(lambda name: prepared(*by_name[name]))


def serve(call_of: Callable[[str], Callable[[], object]]) -> None:
    """Serve lines of ``prepare WHAT``, of which ``call_of`` makes a call, and ``run CALLS`` until the input ends."""
    import torch

    import pymoe

    torch.set_num_threads(1)
    print(json.dumps(pymoe.build_info()["cpu_isa"]), flush=True)
    call: Callable[[], object] = int
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "prepare":
            call = call_of(rest)
            call()
            gc.collect()
            gc.disable()
            calls = 1
        else:
            calls = int(rest)
        start = time.thread_time()
        for _ in range(calls):
            call()
        print(json.dumps((time.thread_time() - start) / calls), flush=True)


class Child:
    """A process that computes with one instruction set, by ``python -m module arguments``.

    It prints the set, and then an answer to every line that it reads.
    """

    def __init__(self, isa: str, module: str, *arguments: str) -> None:
        environment = {**os.environ, "PYMOE_CPU_ISA": isa, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.isa = self._answer()

    def ask(self, question: str) -> float:
        """Seconds per call."""
        print(question, file=cast("IO[str]", self.process.stdin), flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        line = cast("IO[str]", self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"the child ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Let the process end."""
        cast("IO[str]", self.process.stdin).close()
        self.process.wait()


def in_turns(children: dict[str, Child], what: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Have children prepare what stands at their names; return by name the seconds of a call in each round."""
    first = {isa: children[isa].ask(f"prepare {one}") for isa, one in what.items()}
    calls = {isa: max(1, math.ceil(SPAN / max(seconds, 1e-7))) for isa, seconds in first.items()}
    seconds: dict[str, list[float]] = {isa: [] for isa in what}
    isas = list(what)
    for number in range(rounds):
        turn = number % len(isas)
        for isa in isas[turn:] + isas[:turn]:
            seconds[isa].append(children[isa].ask(f"run {calls[isa]}"))
    return seconds


def measured(children: dict[str, Child], name: str, rounds: int) -> dict[str, Any]:
    """A record of one line: seconds and the ratios to v3, as medians and quartiles."""
    from pymoe.bench.timing import Spread

    seconds = in_turns(children, dict.fromkeys(children, name), rounds)

    def spread(values: list[float]) -> list[float]:
        found = Spread.of(values)
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


def table(facts: dict[str, Any], records: list[dict[str, Any]], rounds: int) -> str:
    """The result as Markdown."""
    others = [isa for isa in ISAS if isa in records[0]["over_v3"]]
    text = [
        "# Instruction sets of the CPU kernels\n",
        f"Made by `{facts['command']}`: {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; "
        f"torch {facts['torch']}, compiler {facts['compiler']}; load {facts['load']}, {facts['date']}.\n",
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
    """Run what the command line says."""
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
    from pymoe.bench.environment import environment

    facts = {"command": command("instruction_sets"), **environment()}
    children = {}
    for isa in ISAS:
        one = Child(isa, "benchmarks.instruction_sets", "--child", "--most-mib", str(options.most_mib))
        if one.isa == isa:
            children[isa] = one
        else:
            one.end()
    if "v3" not in children:
        raise SystemExit("the processor has neither AVX2 nor AVX-512: there is nothing to compare")
    records = []
    for spec, case in lines(most_bytes):
        name = name_of(spec, case)
        if re.search(options.filter, name):
            records.append(measured(children, name, options.rounds))
            print(table(facts, records[-1:], options.rounds).splitlines()[-1], flush=True)
    for one in children.values():
        one.end()
    if records:
        result = {"environment": facts, "rounds": options.rounds, "lines": records}
        save(result, table(facts, records, options.rounds), options.output / "instruction_sets")


if __name__ == "__main__":
    main()
