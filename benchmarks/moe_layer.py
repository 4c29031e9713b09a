"""Time a mixture-of-experts layer, forward and backward: pymoe, its peers, and a lower bound, the "floor".

    python -m benchmarks.moe_layer [--device cuda] [--quick] [--output DIR]

All contenders compute the same function of the same weights; results are compared with the layer in fp64. Times are
taken in interleaved rounds, so that ratios hold on a machine that is not quiet. Writes JSON, a Markdown table and a
picture.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.picture import picture
from benchmarks.common.run import Run, as_markdown, illustrate, parser_of
from benchmarks.peers import PARTS, Absent, Contender, Task, contenders, failure, name_of
from pymoe.bench.floor import Rates, measure_rates
from pymoe.bench.layer import CUDA_SHAPES, Shape, dense_floor, inputs_of, layer_of, training_step
from pymoe.bench.report import Table, plain, seconds, time_with_spread
from pymoe.bench.timing import Timer, Timing, WallTimer, measure, timer_for
from pymoe.nn import MoE

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


class SkewedShape(Shape):
    """A shape in which the popularity of experts falls like 1/rank; in other shapes a fresh router spreads the
    tokens over all experts.
    """

    def __str__(self) -> str:
        return f"{super().__str__()} skewed"


SCENARIOS = (
    (Shape("few tokens", 256, 256, 512, 8, 2), FP32),
    (Shape("small language model", 2048, 256, 512, 8, 2), FP32),
    (SkewedShape("skewed load", 2048, 512, 512, 16, 2), FP32),
    (Shape("many experts", 2048, 1024, 512, 128, 8), FP32),
    (Shape("mid size", 2048, 1024, 1024, 32, 4), FP32),
    (Shape("few tokens", 256, 256, 512, 8, 2), BF16),
    (Shape("small language model", 2048, 256, 512, 8, 2), BF16),
)
QUICK_SCENARIOS = (SCENARIOS[0], SCENARIOS[1], (Shape("many experts", 256, 256, 128, 64, 8), FP32), SCENARIOS[5])
CUDA_SCENARIOS = tuple((shape, BF16) for shape in CUDA_SHAPES)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Largest relative error that is not called WRONG: Frobenius norm of the difference divided by the norm of the fp64
result. A router that computes its logits in bf16 sends some tokens to other experts, which alone causes errors near
0.1."""


ALWAYS = ("torch.mm, dense", "pymoe native")
"""The contenders to which all others are compared."""


@dataclass(frozen=True)
class Effort:
    """Limits on the time that measuring takes."""

    budget: float
    rounds: tuple[int, int]
    limit: float
    """Seconds; a contender whose first call takes longer is timed by that call only."""


FULL = Effort(6.0, (3, 30), 8.0)
QUICK = Effort(1.5, (3, 10), 2.0)


def main() -> int:
    """Run all scenarios; return 1 if a contender's result is wrong or pymoe is missing from a scenario."""
    options = parse()
    effort = QUICK if options.quick else FULL
    device = torch.device(options.device)
    timer = WallTimer(time.process_time) if options.cpu_time else timer_for(device)
    if options.cpu_time or options.threads:
        torch.set_num_threads(1 if options.cpu_time else options.threads)
    torch.manual_seed(0)
    rates = measure_rates(device, (FP32, BF16), timer=timer)
    scenarios: list[dict[str, Any]] = []
    settings = asdict(effort) | {
        "quick": options.quick,
        "device": options.device,
        "clock": "processor-time" if options.cpu_time else "event" if device.type == "cuda" else "wall",
    }
    run = Run("moe_layer", options.output, settings, scenarios=scenarios)
    result = run.result
    on_cpu = QUICK_SCENARIOS if options.quick else SCENARIOS
    for shape, dtype in CUDA_SCENARIOS if device.type == "cuda" else on_cpu:
        scenarios.append(scenario(shape, dtype, rates, effort, timer, device, options.only))
        print(f"\n{heading(scenarios[-1])}\n{plain(table(scenarios[-1]))}", flush=True)
        for one in scenarios[-1]["absent"]:
            print(f"{one['name']}: left out, {one['reason']}")
        run.keep(markdown)
    illustrate(result, draw, run.stem)
    rows = [row for one in scenarios for row in one["rows"]]
    ours = sum(row["name"] == "pymoe native" for row in rows)
    return int(ours < len(scenarios) or any(row["verdict"] == "WRONG" for row in rows))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("moe_layer", __doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="smaller shapes, at most a minute")
    parser.add_argument("--only", default="", metavar="REGEX", help="peers whose name matches, beside floor and pymoe")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads (default: torch's own choice)")
    parser.add_argument("--cpu-time", action="store_true", help="on one thread, count processor time (busy machines)")
    return parser.parse_args()


def scenario(
    shape: Shape,
    dtype: torch.dtype,
    rates: Rates,
    effort: Effort,
    timer: Timer,
    device: torch.device = CPU,
    only: str = "",
) -> dict[str, Any]:
    """Measure the contenders on one shape; return a record with a row for each, starting with the floor.

    ``only`` is a regular expression for the names of peers. The floor and pymoe, to which all are compared, always run.
    """
    print(f"\n{shape.name}: {shape} {name_of(dtype)}", file=sys.stderr, flush=True)
    x, grad = inputs_of(shape, dtype, device)
    layer = layer_of(shape, dtype, device)
    if isinstance(shape, SkewedShape):
        skew(layer, x)
    task = Task(shape, dtype, layer, x, grad, dense_floor(shape, rates.fastest_mm(dtype), device))
    expected = in_fp64(task)
    running: dict[str, Contender] = {}
    verdicts: dict[str, tuple[str, float]] = {}
    timings: dict[str, Timing] = {}
    absent: list[Absent] = []
    for one in contenders(task):
        if one.name not in ALWAYS and not re.search(only, one.name):
            continue
        if isinstance(one, Absent):
            absent.append(one)
            continue
        try:
            result, took = first_call(one, timer, device)
        except Exception as error:  # a peer that fails must not stop the measurement of the others
            absent.append(Absent(one.name, failure(error)))
            continue
        if took > effort.limit and device.type == "cuda":  # the call may have loaded or compiled kernels
            took = first_call(one, timer, device)[1]
        verdicts[one.name] = judge(one, result, expected)
        running[one.name] = one
        if took > effort.limit:
            timings[one.name] = Timing((took,), 1)
        print(f"  {one.name}: first call {seconds(took)}", file=sys.stderr, flush=True)
        del result
    del expected
    repeated = {name: one.step for name, one in running.items() if name not in timings}
    timings |= measure(repeated, budget=effort.budget, rounds=effort.rounds, timer=timer)
    return {
        "name": shape.name,
        "shape": asdict(shape),
        "dtype": name_of(dtype),
        "flops": shape.flops,
        "rows": [row(one, verdicts[name], timings, shape) for name, one in running.items()],
        "absent": [asdict(one) for one in absent],
    }


def skew(layer: MoE, x: Tensor) -> None:
    """Make the popularity of experts fall like 1/rank: all tokens share a direction that the router scores by rank."""
    direction = torch.full((layer.hidden_size,), layer.hidden_size**-0.5, device=x.device)
    popularity = -torch.arange(1, layer.num_experts + 1, device=x.device).float().log()
    with torch.no_grad():
        x += (1 - x @ direction)[:, None] * direction
        layer.router.weight += popularity[:, None] * direction


def first_call(contender: Contender, timer: Timer, device: torch.device) -> tuple[Any, float]:
    """Return a contender's result and the seconds until it is available."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = timer.now()
    result = contender.step()
    wait()
    return result, timer.now() - begin


def in_fp64(task: Task) -> tuple[Tensor, ...]:
    """Return the results of the layer in fp64 with the same weights, in the order of :data:`PARTS`."""
    layer = layer_of(task.shape, task.dtype, task.x.device, backend="reference").double()
    layer.load_state_dict(task.layer.state_dict())
    results = training_step(layer, task.x.detach().double().requires_grad_(), task.grad.double())()
    names = [name for name, _ in layer.named_parameters()]
    order = [2 + names.index(name) for name in ("router.weight", "experts.w_in", "experts.w_out")]
    return tuple(results[i].float() for i in (0, 1, *order))


def judge(contender: Contender, result: Any, expected: tuple[Tensor, ...]) -> tuple[str, float]:
    """Return ``"close"`` or ``"WRONG"``, and the largest relative error over :data:`PARTS`; ``"-"`` and 0 if the
    contender computes another function.
    """
    if contender.parts is None:
        return "-", 0.0
    worst = 0.0
    for name, got, wanted in zip(PARTS, contender.parts(result), expected, strict=True):
        error = float((got.float() - wanted).norm() / wanted.norm())
        if not error <= TOLERANCE[contender.computes_in]:
            print(f"  {contender.name}: {name} is off by {error:.2g}", file=sys.stderr)
            return "WRONG", error
        worst = max(worst, error)
    return "close", worst


def row(contender: Contender, verdict: tuple[str, float], timings: dict[str, Timing], shape: Shape) -> dict[str, Any]:
    """Return the record of one line of the table."""
    mine = timings[contender.name]
    return {
        "name": contender.name,
        "version": contender.version,
        "note": contender.note,
        "seconds": asdict(mine.spread) | {"rounds": len(mine.seconds)},
        "over_floor": ratio(mine, timings[ALWAYS[0]]),
        "over_pymoe": ratio(mine, timings[ALWAYS[1]]),
        "gflops_per_second": shape.flops / mine.median / 1e9,
        "verdict": verdict[0],
        "error": verdict[1],
    }


def ratio(mine: Timing, other: Timing) -> dict[str, float]:
    """Return the ratio of two timings: round by round, or of the medians if a contender ran only once."""
    if len(mine.seconds) == len(other.seconds):
        return asdict(mine.over(other))
    middle = mine.median / other.median
    return {"low": middle, "median": middle, "high": middle}


def heading(one: dict[str, Any]) -> str:
    """Return a line that describes a scenario."""
    return f"{one['name']}: {Shape(**one['shape'])} {one['dtype']}, {one['flops'] / 1e9:.1f} GFLOP forward + backward"


def table(one: dict[str, Any]) -> Table:
    """Return the table of a scenario."""
    rows = [
        [
            r["name"],
            r["version"],
            time_with_spread(r["seconds"])
            if r["seconds"]["rounds"] > 1
            else f"{seconds(r['seconds']['median'])} (once)",
            f"{r['over_floor']['median']:.2f}",
            f"{r['over_pymoe']['median']:.2f}",
            f"{r['gflops_per_second']:.3g}",
            r["verdict"] if r["verdict"] != "close" else f"error {r['error']:.0e}",
            r["note"],
        ]
        for r in one["rows"]
    ]
    names = ["layer", "version", "time [quartiles]", "/ floor", "/ pymoe", "GFLOP/s", "against fp64", "note"]
    return Table(names, rows, frozenset({"layer", "version", "against fp64", "note"}))


def markdown(result: dict[str, Any]) -> str:
    """Return all scenarios as Markdown."""
    facts = result["environment"]
    lines = [
        f"Made by `{result['command']}` on {facts['date'][:10]}: {machine(result)}, torch {facts['torch']}; load "
        f"average before and after {facts['load'][0]}, {result['settings']['load_after'][0]}. Forward and backward, "
        f"medians over interleaved rounds, quartiles in brackets, by {result['settings']['clock']} clock. `/ floor`: "
        "time over that of the same operations in dense `torch.mm`; `/ pymoe`: time over pymoe's."
    ]
    for one in result["scenarios"]:
        lines += ["", f"**{heading(one)}**", "", *as_markdown(table(one))]
        lines += ["", *(f"- {absent['name']}: left out, {absent['reason']}" for absent in one["absent"])]
    return "\n".join(lines) + "\n"


def machine(result: dict[str, Any]) -> str:
    """Return a description of the processor or GPU that computed."""
    facts = result["environment"]
    if result["settings"].get("device") == "cuda":
        return str(facts["gpu"])
    return f"{facts['cpu']}, {facts['threads']} threads, {facts['cpu_capability']}"


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw each time divided by the floor's, with one panel per scenario."""
    scenarios, facts = result["scenarios"], result["environment"]
    rows = (len(scenarios) + 1) // 2
    title = "Mixture-of-experts layer, forward + backward: time over the same operations in dense torch.mm"
    caption = f"{machine(result)}, torch {facts['torch']}, {facts['date'][:10]}"
    with picture(file, rows, 2, (13, 2.3 * rows + 0.6), title, result | {"caption": caption}) as (_, panels):
        for panel, one in zip(panels.flat, scenarios, strict=False):
            shown = one["rows"]
            colours = ["0.6" if r["verdict"] == "-" else "C2" if r["name"] == "pymoe native" else "C0" for r in shown]
            values = [r["over_floor"]["median"] for r in shown]
            once = [" (once)" if r["seconds"]["rounds"] == 1 else "" for r in shown]
            bars = panel.barh([r["name"] for r in shown], values, color=colours)
            labels = [f"{value:.2f}{note}" for value, note in zip(values, once, strict=True)]
            panel.bar_label(bars, labels, padding=3, fontsize=8)
            panel.axvline(1, color="black", lw=1)
            panel.set_xscale("log")
            panel.set_xlim(min(0.5, 0.7 * min(values)), 3 * max(values))
            panel.invert_yaxis()
            panel.set_title(f"{one['name']}: {Shape(**one['shape'])} {one['dtype']}", fontsize=9)
        for panel in list(panels.flat)[len(scenarios) :]:
            panel.set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
