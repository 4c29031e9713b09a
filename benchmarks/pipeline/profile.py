"""Breaks down the time of pymoe's steps into the ideal time and its overheads, and the overhead by function."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.handover import to_worker
from benchmarks.pipeline.ours import open_pipe, open_plan
from benchmarks.pipeline.systems import InProcess, open_sequential
from benchmarks.pipeline.work import Case
from pymoe.pipe.schedules import Record, Schedule, mean_times, simulate

STEPS = 9
PROFILED_STEPS = 40
LINES = 18
PACKAGE = str(Path(__file__).parents[2])


def pieces(case: Case, name: str = "1f1b") -> list[str]:
    """Return lines that split a step's time into its ideal time and its overheads."""
    plain, pipe = open_sequential(case), open_pipe(name, case)
    plan = pipe.planned
    assert plan is not None
    ideal = simulate(plan, case.times(plan.stages)).speed_up
    plain.step()
    pipe.step()
    rows = []
    for _ in range(STEPS):
        sequential, _ = plain.step()
        wall, _ = pipe.step()
        record = last_run(pipe)
        undisturbed = simulate(plan, mean_times(record)).makespan
        rows.append(
            (
                wall,
                sequential / ideal,
                undisturbed - sequential / ideal,
                record.makespan - undisturbed,
                wall - record.makespan,
            )
        )
    words = (
        f"a step of {name}, {case}",
        "  the sequential run's time / ideal speed-up",
        "  actions take longer than in the sequential run",
        "  gaps between actions, beyond those of the plan",
        "  before the first action and after the last",
    )
    medians = [statistics.median(values) for values in zip(*rows, strict=True)]
    whole = medians[0]
    return [f"{text:60} {value * 1e3:9.2f} ms {value / whole:7.1%}" for text, value in zip(words, medians, strict=True)]


def last_run(pipe: InProcess) -> Record:
    """Return the record of the last step."""
    assert pipe.record is not None
    return pipe.record()


def on_one_worker(plan: Schedule) -> Schedule:
    """Return a schedule of the same actions for one worker, so that no thread hands over to another."""
    spans = [span for order in simulate(plan).spans for span in order]
    order = tuple(span.action for span in sorted(spans, key=lambda span: (span.end, span.start)))
    return Schedule(f"{plan.name}, one worker", plan.micro_batches, (0,) * plan.stages, (order,))


def functions(case: Case, name: str = "1f1b") -> list[str]:
    """Return lines with the cost of each function per stage and micro-batch, from cProfile of steps on one thread."""
    several = open_pipe(name, case)
    assert several.planned is not None
    one = open_plan(on_one_worker(several.planned), case)
    plain = open_sequential(case)
    actions = one.planned.stages * case.micro_batches if one.planned else 1
    for running in (plain, one, several):
        running.step()
    gc.collect()
    gc.disable()
    try:
        costs = [[running.step()[1] / actions for _ in range(PROFILED_STEPS)] for running in (plain, one, several)]
        profiler = cProfile.Profile()
        for _ in range(PROFILED_STEPS):
            one.clear()
            profiler.enable()
            one.run()
            profiler.disable()
    finally:
        gc.enable()
    medians = [statistics.median(values) * 1e6 for values in costs]
    calls = PROFILED_STEPS * actions
    return [
        f"processor time a stage and micro-batch, {name}, {case}:",
        f"  sequential run {medians[0]:.0f} us, on one worker {medians[1] - medians[0]:+.0f} us, "
        f"on {case.workers} workers {medians[2] - medians[0]:+.0f} us",
        "  by function, on one worker under cProfile (which makes Python's calls dearer): calls and own us a stage and "
        "micro-batch",
        *(
            f"  {count / calls:6.2f} {own / calls * 1e6:8.2f}  {place}"
            for count, own, place in sorted(by_function(profiler), key=lambda one: -one[1])[:LINES]
        ),
    ]


def by_function(profiler: cProfile.Profile) -> Iterator[tuple[int, float, str]]:
    """Yield the number of calls, the own seconds and the place of every function."""
    stats: Any = pstats.Stats(profiler)
    for (file, line, function), (_, count, own, _, _) in stats.stats.items():
        where = file.removeprefix(PACKAGE).lstrip("/") if file.startswith(PACKAGE) else Path(file).name
        yield count, own, function if file == "~" else f"{function} ({where}:{line})"


def profile(cases: list[Case], cheap: list[Case]) -> list[str]:
    """Return the whole profile as lines."""
    lines = [f"a hand-over to or from a worker of the runtime takes {to_worker(2000) * 1e6:.1f} us"]
    for case in cases:
        lines += ["", *pieces(case)]
    for case in cheap:
        lines += ["", *functions(case)]
    return lines
