"""The benchmark's lines, one for every operator, shape, dtype and direction, and how a line is measured."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from pymoe.bench.calls import BenchCase, Operator, Sample, Target, generator, leaves, mapped, outputs_of
from pymoe.bench.cold import Rotating, copies_of, in_graph
from pymoe.bench.correctness import Verdict, verify
from pymoe.bench.floor import Floor, Rates, floor_for
from pymoe.bench.report import in_a_line
from pymoe.bench.timing import Quartiles, Timer, Timing, measure

CALLS = ("native", "reference", "baseline", "floor")
CAPTURED = ("native", "baseline", "floor")
"""Names of the calls that on CUDA are also measured in a graph."""
RATIOS = ("over_reference", "over_baseline", "over_baseline_in_graph", "share_of_floor", "share_of_copy")


@dataclass(frozen=True)
class Effort:
    """Limits on the time for a line, and on the size of the lines that are measured."""

    budget: float = 1.0
    """Seconds per line for all candidates together, after warm-up."""
    rounds: tuple[int, int] = (3, 60)
    most_bytes: float = float("inf")
    """Number of bytes above which a line is not measured."""
    most_flops: float = float("inf")
    """Number of operations above which a line is not measured."""


FULL = Effort()
QUICK = Effort(budget=0.15, rounds=(3, 20), most_bytes=2.0**27, most_flops=5e9)


@dataclass(frozen=True)
class Candidates:
    """The calls of one line that are timed against each other, on the same inputs, and a check of their results."""

    calls: Mapping[str, Callable[[], object]]
    """``"native"`` and ``"reference"``, and ``"baseline"`` if there is one."""
    floor: Floor | None
    verify: Callable[[], Verdict]


@dataclass(frozen=True)
class Line:
    """A line that has not been measured yet. Only ``prepare`` makes the inputs, so listing lines costs nothing."""

    operator: str
    case: str
    dtype: torch.dtype
    direction: str
    """``"forward"`` or ``"forward+backward"``."""
    bytes: int
    flops: int
    source: str
    targets: Mapping[str, Target | None]
    """Targets by type of device."""
    prepare: Callable[[torch.device, Rates], Candidates] = field(repr=False)
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Types of devices on which the line is measured."""

    @property
    def name(self) -> str:
        """Return the name of the line, by which ``--filter`` selects lines."""
        return f"{self.operator} {self.case} {str(self.dtype).removeprefix('torch.')} {self.direction}"


def lines_of(operator: Operator) -> Iterator[Line]:
    """Yield the benchmark lines of an operator."""
    for case in operator.bench_cases:
        yield Line(
            operator.name,
            case.name,
            case.dtype,
            "forward+backward" if case.backward else "forward",
            case.bytes,
            case.flops,
            case.source,
            {"cpu": case.target, "cuda": case.cuda_target},
            partial(candidates_of, operator, case),
            operator.devices,
        )


def candidates_of(operator: Operator, case: BenchCase, device: torch.device, rates: Rates) -> Candidates:
    """Return the calls to time for ``operator``, with the inputs of ``case`` on ``device``."""
    sample = mapped(case.make(generator()), lambda value: value.detach().to(device).requires_grad_(value.requires_grad))
    functions = {"native": operator.native, "reference": operator.reference}
    if case.baseline:
        functions["baseline"] = case.baseline
    call = training_step if case.backward else forward_call
    samples = copies_of(sample, device)
    return Candidates(
        {name: Rotating([call(function, one) for one in samples]) for name, function in functions.items()},
        floor_for(case.bytes, case.flops, case.dtype, device, rates),
        lambda: verify(operator, case, sample),
    )


def forward_call(function: Callable[..., Any], sample: Sample) -> Callable[[], object]:
    """Return a function that calls ``function`` with the arguments of ``sample``."""
    return lambda: function(*sample.args, **sample.kwargs)


def training_step(function: Callable[..., Any], sample: Sample) -> Callable[[], object]:
    """Return a function that runs ``function`` forward and backward on ``sample``, and returns the leaves' gradients.

    The gradients of the outputs are random, but the same in every call.
    """
    inputs = leaves(sample)
    outputs = [one for one in outputs_of(function(*sample.args, **sample.kwargs)) if one.requires_grad]
    random = generator(inputs[0].device)
    seeds = [torch.randn(one.shape, device=one.device, generator=random).to(one.dtype) for one in outputs]
    del outputs

    def step() -> object:
        results = [one for one in outputs_of(function(*sample.args, **sample.kwargs)) if one.requires_grad]
        return torch.autograd.grad(results, inputs, seeds, allow_unused=True)

    return step


def run_line(line: Line, device: torch.device, rates: Rates, effort: Effort, timer: Timer) -> dict[str, Any]:
    """Measure a line, and compare its results with those of the reference.

    Returns:
        A record for the table and for JSON. It contains the names of the line; for every candidate, the quartiles of
        the seconds per call, the rounds and the calls; ratios of times, taken round by round; the share of the floor;
        the correctness; the target, and whether it was reached. If a call raises, the verdict is ``"ERROR"``, and the
        record has no timings.
    """
    target = line.targets.get(device.type)
    record = described(line, target)
    try:
        candidates = line.prepare(device, rates)
        verdict = candidates.verify()
        calls = dict(candidates.calls)
        if candidates.floor:
            calls["floor"] = candidates.floor.run
        refused: dict[str, str] = {}
        if device.type == "cuda":
            captured, refused = captured_calls(calls)
            calls |= captured
        timings = measure(calls, budget=effort.budget, rounds=effort.rounds, timer=timer)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict = Verdict("ERROR", detail=f"{type(error).__name__}: {error} (in {last.name})")
        return record | {"correctness": asdict(verdict)}
    found = measured(line, target, candidates.floor, timings, rates)
    return record | found | {"not_in_graph": refused, "correctness": asdict(verdict)}


def captured_calls(calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Capture the native call, the baseline and the floor in CUDA graphs; return replays of the graphs, by name.

    Also return, by name, why calls could not be captured.
    """
    captured: dict[str, Callable[[], object]] = {}
    refused = {}
    for name in CAPTURED:
        if name in calls:
            try:
                captured[f"{name}_in_graph"] = in_graph(calls[name])
            except Exception as error:
                # Use the error that ended the capture: torch raises another while it ends a failed capture.
                first = error.__context__ or error
                refused[name] = in_a_line(first)
    return captured, refused


def described(line: Line, target: Target | None) -> dict[str, Any]:
    """Return the fields of a record that are known before the line is measured."""
    return {
        "operator": line.operator,
        "case": line.case,
        "dtype": str(line.dtype).removeprefix("torch."),
        "direction": line.direction,
        "bytes": line.bytes,
        "flops": line.flops,
        "source": line.source,
        **dict.fromkeys((*CALLS, *(f"{name}_in_graph" for name in CAPTURED))),
        "not_in_graph": {},
        **dict.fromkeys(RATIOS),
        "target": asdict(target) | {"reached": None} if target else None,
        "correctness": None,
    }


def measured(
    line: Line, target: Target | None, floor: Floor | None, timings: dict[str, Timing], rates: Rates
) -> dict[str, Any]:
    """Return the fields of a record that are computed from timings.

    If the calls could be captured, shares of rates are computed from the time in a graph, which is the device's own
    time.
    """
    native = timings["native"]
    on_device = timings.get("native_in_graph", native)
    facts: dict[str, Any] = {name: timing_record(timing) for name, timing in timings.items()}
    for name in ("reference", "baseline"):
        if name in timings:
            facts[f"over_{name}"] = asdict(timings[name].over(native))
    if "baseline_in_graph" in timings and "native_in_graph" in timings:
        facts["over_baseline_in_graph"] = asdict(timings["baseline_in_graph"].over(on_device))
    if floor:
        facts["floor"] |= {"kind": floor.kind, "work": floor.work, "needed": floor.needed}
        floor_time = timings.get("floor_in_graph", timings["floor"])
        facts["share_of_floor"] = asdict(Quartiles.of(floor.share(floor_time, on_device)))
    if line.bytes and not line.flops:
        facts["share_of_copy"] = line.bytes / on_device.median / rates.copy
    if target:
        facts["target"] = asdict(target) | {"reached": is_reached(target, facts, on_device)}
    return facts


def is_reached(target: Target, facts: dict[str, Any], on_device: Timing) -> bool:
    """Return whether the line is as fast as its target requires."""
    if target.over == "seconds":
        return on_device.median <= target.ratio
    seen = facts.get("share_of_floor" if target.over == "floor" else f"over_{target.over}")
    return bool(seen is not None and seen["median"] >= target.ratio)


def timing_record(timing: Timing) -> dict[str, Any]:
    """Return a timing as a dictionary for JSON: quartiles of the seconds per call, rounds, and calls per round."""
    return asdict(timing.spread) | {"rounds": len(timing.seconds), "calls": timing.calls}
