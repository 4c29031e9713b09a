"""Time forward and backward passes of many calls: a loop, plain autograd and pymoe.map_with_parallel_backward.

    python -m benchmarks.parallel_backward [--quick] [--kinds NAME,...] [--rounds N] [--output DIR]

Between 1 and 16 calls sleep, multiply matrices, or do next to nothing. Each pass is timed by itself, and all systems
take turns; gradients are compared with the loop's. Writes JSON, a Markdown table and a picture. `make bench-parallel`
sets everything up.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import pymoe
from benchmarks.common.comparison import from_turn, relative_error, verdict
from benchmarks.common.handover import between_threads, to_worker
from benchmarks.common.run import Run, illustrate, names_of, parser_of
from benchmarks.parallel import report
from benchmarks.parallel.calls import KINDS, LOOP, SYSTEMS, Kind, System
from pymoe.bench.timing import Quartiles

COUNTS, QUICK_COUNTS = (1, 2, 4, 8, 16), (1, 8)
QUICK_ROUNDS = 5
SLOW, SLOW_ROUNDS = 0.1, 3
"""Systems that take more than SLOW seconds get only SLOW_ROUNDS rounds, since long sleeps hardly vary."""
TOLERANCE = 1e-5
"""Largest allowed relative error of outputs and gradients (fp32, Frobenius norm): the order of sums may differ."""
HANDOVERS = 300
Record = dict[str, Any]
PASSES = ("forward", "backward")
BY_PROCESSOR = ("forward_cpu", "backward_cpu")
Times = dict[tuple[int, str], list[tuple[float, ...]]]


def main() -> int:
    """Run the measurements; return 1 if any system's gradients are wrong."""
    options = parse()
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if kind.name in options.kinds]
    counts = QUICK_COUNTS if options.quick else COUNTS
    most = options.rounds or (QUICK_ROUNDS if options.quick else max(kind.rounds for kind in kinds))
    run = Run(
        "parallel_backward",
        options.output,
        {"slow_rounds": SLOW_ROUNDS, "quick": options.quick},
        kinds={
            kind.name: {"about": kind.about, "workers": kind.workers, "rounds": min(most, kind.rounds)}
            for kind in kinds
        },
        systems={system.name: system.about for system in SYSTEMS},
        handover=handover(QUICK_ROUNDS),
        **{part: [] for part in ("records", "overheads", "ratios")},
    )
    result = run.result
    for kind in kinds:
        with pymoe.runtime.parallel_workers(kind.workers):
            measure(kind, counts, min(most, kind.rounds), result)
        print(f"{kind.name}: measured", file=sys.stderr, flush=True)
    result["targets"] = report.judged(result)
    run.keep(report.markdown)
    report.show(result)
    illustrate(result, report.draw, run.stem)
    return int(any(record["verdict"] == "WRONG" for record in result["records"]))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("parallel_backward", __doc__)
    parser.add_argument("--quick", action="store_true", help="1 and 8 calls and few rounds: some seconds")
    names = [kind.name for kind in KINDS]
    parser.add_argument(
        "--kinds",
        type=names_of(names),
        default=names,
        metavar="NAME,...",
        help=f"what calls do (default: {','.join(names)})",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="values behind a median, at most")
    return parser.parse_args()


def measure(kind: Kind, counts: tuple[int, ...], rounds: int, result: Record) -> None:
    """Time all systems and numbers of calls in turns; add to the result's records, overheads and ratios."""
    verdicts = {}
    for count in counts:
        expected = results(kind, count, SYSTEMS[0])
        verdicts.update({(count, system.name): judge(kind, count, system, expected) for system in SYSTEMS})
    times: Times = {key: [] for key in verdicts}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for count in counts:
                for system in from_turn(SYSTEMS, turn):
                    own = times[count, system.name]
                    if len(own) >= SLOW_ROUNDS and sum(own[-1][:2]) * kind.repeats > SLOW:
                        continue
                    own.append(timed(kind, count, system))
            gc.collect()
    finally:
        gc.enable()
    for (count, name), own in times.items():
        verdict, error = verdicts[count, name]
        record = {"kind": kind.name, "calls": count, "system": name, "rounds": len(own)}
        record |= {"verdict": verdict, "error": error}
        for i, one in enumerate(PASSES):
            record[one] = asdict(Quartiles.of([passes[i] for passes in own]))
        result["records"].append(record)
    result["overheads"] += overheads(kind, counts, times)
    result["ratios"] += ratios(kind, counts, times)


def timed(kind: Kind, count: int, system: System) -> tuple[float, ...]:
    """Return wall seconds of the forward and the backward pass of all calls, then processor seconds of all threads."""
    calls = kind.arguments(count)
    grads = [torch.ones(kind.shape) for _ in calls]
    total = [0.0] * 4
    for _ in range(kind.repeats):
        clear(calls)
        start = now()
        outputs = system.forward(kind.function, calls)
        middle = now()
        system.backward(outputs, grads)
        end = now()
        for i in (0, 1):
            total[2 * i] += middle[i] - start[i]
            total[2 * i + 1] += end[i] - middle[i]
    return tuple(seconds / kind.repeats for seconds in total)


def now() -> tuple[float, float]:
    """Return the wall time and this process's processor time."""
    return time.perf_counter(), time.process_time()


def clear(calls: list[tuple[Tensor, Tensor]]) -> None:
    """Remove the gradients of all arguments."""
    for args in calls:
        for tensor in args:
            tensor.grad = None


def judge(kind: Kind, count: int, system: System, expected: list[Tensor]) -> tuple[str, float]:
    """Compare a system with the loop; return the verdict and the largest relative error. This run also warms up."""
    found = results(kind, count, system)
    worst = max(relative_error(got, wanted) for got, wanted in zip(found, expected, strict=True))
    return verdict(worst, TOLERANCE), worst


def results(kind: Kind, count: int, system: System) -> list[Tensor]:
    """Return outputs and gradients."""
    calls = kind.arguments(count)
    outputs = system.forward(kind.function, calls)
    system.backward(outputs, [torch.ones(kind.shape) for _ in calls])
    found = [tensor.grad for args in calls for tensor in args]
    assert all(grad is not None for grad in found), f"{system.name}: a gradient is missing"
    return [output.detach() for output in outputs] + [grad for grad in found if grad is not None]


def overheads(kind: Kind, counts: tuple[int, ...], times: Times) -> list[Record]:
    """Return the seconds per call and pass by which each system exceeds the loop, taken round by round."""
    found = []
    for count in counts:
        loop = times[count, LOOP]
        for system in SYSTEMS[1:]:
            pairs = list(zip(times[count, system.name], loop, strict=False))
            record = {"kind": kind.name, "calls": count, "system": system.name}
            for i, one in enumerate(PASSES + BY_PROCESSOR):
                record[one] = asdict(Quartiles.of([(mine[i] - theirs[i]) / count for mine, theirs in pairs]))
            found.append(record)
    return found


def ratios(kind: Kind, counts: tuple[int, ...], times: Times) -> list[Record]:
    """Return each system's times divided by the loop's time for one call, taken round by round."""
    found = []
    for count in counts:
        for system in SYSTEMS:
            pairs = list(zip(times[count, system.name], times[1, LOOP], strict=False))
            record = {"kind": kind.name, "calls": count, "system": system.name}
            for i, one in enumerate(PASSES):
                record[one] = asdict(Quartiles.of([mine[i] / theirs[i] for mine, theirs in pairs]))
            found.append(record)
    return found


def handover(rounds: int) -> Record:
    """Return the seconds of a handover, between two Python threads and to a worker of the runtime."""
    ways = {"python": between_threads, "worker": to_worker}
    found = [[way(HANDOVERS) for way in ways.values()] for _ in range(rounds)]
    return {
        name: asdict(Quartiles.of(list(values))) for name, values in zip(ways, zip(*found, strict=True), strict=True)
    }


if __name__ == "__main__":
    sys.exit(main())
