"""Holds what nvcc makes of the kernels to bars, and predicts what they take on a GPU.

    python tests/cuda_static/check.py            # writes build/cuda/static.md
    python tests/cuda_static/check.py --write    # stores the predictions, which pages and reports show

For every architecture that ships: no spill, no store of 4 bytes where one of 16 is meant, no fused multiply-add where
sums must have the CPU's bits, no communication between blocks. For sm_90 the shapes of the design are traced (warp.py)
and held to bars.json: registers, instructions, epochs, sectors, predicted times. Without nvcc nothing can be checked,
and it says so; nvcc without nvdisasm is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import pages
import recorded
import sass
from cases import ACTIVATIONS, WORK, activation
from counters import Line, Statics, lines, statics
from machine_code import FOLDER, ROOT, Compiled, architectures, compile_all, complain, find_nvcc, parse
from model import START_US

BARS = Path(__file__).with_name("bars.json")
PREDICTIONS = ROOT / "benchmarks" / "gpu" / "predictions.json"
IDEAL = {"epochs a round": 1.0, "bytes a sector": 32.0, "narrowest store, bytes": 16.0, "launches": 1, "memsets": 0}
IDEAL_INSTRUCTIONS = {
    "combine": 6.0,
    **{name: 46.0 for kind in ACTIVATIONS for name, _ in activation(kind) if "back" not in name},
}
"""What a bar cannot ask more of, or what the design asks for; a bar that asks for less says why."""
DRIFT = 0.05
"""Stored predictions may differ from those of the present code by this part."""
ROUNDING = 0.005

# Kernels whose results go out in packs of 16 bytes alone, and those whose sums have the CPU's bits and no division.
PACKED_NAMES = (
    "dispatch_kernel<uint4", r"combine_kernel<\w+, 16,", "expert_activation_kernel<.*(BFloat16|Float16)>",
    "expert_activation_backward_kernel<.*(BFloat16|Float16)>",
)  # fmt: skip
UNFUSED_NAMES = ("dispatch_kernel<", "combine_kernel<", "combine_backward_kernel<")
PACKED = re.compile("|".join(PACKED_NAMES))
UNFUSED = re.compile("|".join(UNFUSED_NAMES))
# Blocks of these tell each other something, for the reason that stands beside the name.
MAY_COMMUNICATE: dict[str, str] = {}


def ideals(case: str) -> dict[str, float]:
    """Return what the figures of a call should be at best."""
    found = dict(IDEAL)
    if case in IDEAL_INSTRUCTIONS:
        found["instructions an element"] = IDEAL_INSTRUCTIONS[case]
    goal = WORK[case].goal_us
    if goal is not None:
        found["predicted us, H200"] = goal
    return found


def static_complaints(found: list[Statics]) -> list[str]:
    """Return what is wrong with the code of kernels for one architecture."""
    complaints = []
    for one in found:
        where = f"{one.name} on {one.kernel.architecture}"
        if one.kernel.spilled:
            complaints.append(f"{where} spills {one.kernel.spilled} bytes")
        if PACKED.match(one.name) and one.narrow_stores:
            complaints.append(f"{where} stores 4 bytes in {one.narrow_stores} places where a pack of 16 is meant")
        if UNFUSED.match(one.name) and one.fused:
            complaints.append(
                f"{where} has {one.fused} fused multiply-adds, whose bits are not the CPU's: was it compiled with "
                "--fmad=false?"
            )
        if one.to_others and not any(one.name.startswith(name) for name in MAY_COMMUNICATE):
            complaints.append(f"{where} communicates between blocks: {', '.join(one.to_others)}")
    return complaints


def forgotten(found: list[Statics]) -> list[str]:
    """Return the rules for kernels of some name that no kernel has: these would be kept by nobody."""
    names = [one.name for one in found]
    return [
        f"no kernel is called {pattern!r}, for which there is a rule"
        for pattern in (*PACKED_NAMES, *UNFUSED_NAMES)
        if not any(re.match(pattern, name) for name in names)
    ]


def bar_complaints(figures: dict[str, dict[str, float]], bars: dict[str, Any]) -> list[str]:
    """Return the figures that are worse than their bars, and those without one."""
    complaints = [f"{case}: bars.json has bars for it, but nothing was traced" for case in bars if case not in figures]
    for case, found in figures.items():
        for name, value in found.items():
            bar = bars.get(case, {}).get(name)
            if bar is None:
                complaints.append(f"{case}: no bar for {name} (it is {value:.4g})")
            elif "most" in bar and value > bar["most"] * (1 + ROUNDING):
                complaints.append(f"{case}: {name} is {value:.4g}, and may be {bar['most']} at most")
            elif "least" in bar and value < bar["least"] * (1 - ROUNDING):
                complaints.append(f"{case}: {name} is {value:.4g}, and must be {bar['least']} at least")
    return complaints


def figures_of(traced: list[Line], cases: dict[str, recorded.Case]) -> dict[str, dict[str, float]]:
    """Return the figures of every call; of one with several launches those of the largest, and their number."""
    figures: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        figures[name] = largest(traced, name).figures | {
            "launches": len(case.launches),
            "memsets": len(case.memsets),
            "predicted us, H200": predicted(traced, name, "H200"),
        }
    return figures


def largest(traced: list[Line], case: str) -> Line:
    """Return the launch of a call that issues most instructions."""
    return max((line for line in traced if line.case == case), key=lambda line: line.figures["instructions an element"])


def predicted(traced: list[Line], case: str, gpu: str) -> float:
    """Return the predicted time of a call: all its launches, and the start of what only clears memory."""
    found = [line for line in traced if line.case == case]
    return sum(line.predictions[gpu].total for line in found) + START_US * found[0].memsets


def stored_form(traced: list[Line]) -> dict[str, Any]:
    """Return what is stored of the predictions: what tables show, in the order of the cases."""
    stored: dict[str, Any] = {}
    for case in dict.fromkeys(line.case for line in traced):
        line, work = largest(traced, case), WORK[case]
        figures = line.figures
        stored[case] = {
            "shape": work.shape,
            "kernel": line.kernel,
            "registers": line.registers,
            "launches": sum(other.case == case for other in traced),
            "blocks a multiprocessor": line.held.blocks,
            "KiB in flight": round(line.in_flight / 1024, 1),
            "epochs a round": figures.get("epochs a round"),
            "element": work.element,
            "instructions an element": round(figures["instructions an element"], 2),
            "bytes a sector": round(figures["bytes a sector"], 1) if "bytes a sector" in figures else None,
            "us": {gpu: round(predicted(traced, case, gpu), 2) for gpu in line.predictions},
            "limit": line.predictions["H200"].limit,
            "goal us, H200": work.goal_us,
        }
    return stored


def drift(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return where the stored predictions are not those of the present code."""
    complaints = [f"{name} is stored, but nothing was traced" for name in stored if name not in now]
    for name, one in now.items():
        for gpu, us in one["us"].items():
            before = stored.get(name, {}).get("us", {}).get(gpu)
            if before is None or abs(us - before) > DRIFT * us:
                complaints.append(f"{name} on {gpu}: {us} us are predicted, and {before} stored")
    return [f"{one} (python tests/cuda_static/check.py --write)" for one in complaints]


def judge(
    nvcc: str, compiled: list[Compiled], of_architectures: list[str], *, folder: Path = FOLDER, only: str = ""
) -> tuple[list[str], list[Line], list[Statics]]:
    """Read the code of all kernels, or of the source ``only``.

    Returns:
        What is wrong with the code, the launches that were traced, and what stands in the code of each kernel.
    """
    read = [one for one in compiled if only in one.source.name]
    every = statics(read, of_architectures)
    complaints = static_complaints(every)
    cases = recorded.record(nvcc, compiled, folder)
    names = {kernel.name for one in read for kernel in parse(one.report, one.source.name)}
    cases = {name: case for name, case in cases.items() if {launch.kernel for launch in case.launches} <= names}
    traced = lines(read, cases)
    bars = {name: of for name, of in json.loads(BARS.read_text()).items() if not only or name in cases}
    complaints += bar_complaints(figures_of(traced, cases), bars)
    return complaints, traced, every


def main() -> int:
    """Compile, read, judge and write; 1 if something is worse than it may be."""
    parser = argparse.ArgumentParser(description="Bars for the machine code of the CUDA kernels, and predicted times.")
    parser.add_argument("--write", action="store_true", help=f"store the predictions in {PREDICTIONS.name}")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc: the machine code was not read (checks passed: none)")
        return 0
    if sass.find_nvdisasm() is None:
        return complain([sass.HOW_TO_GET_NVDISASM])
    compiled = compile_all(nvcc)
    bad = [one.complaint for one in compiled if one.complaint]
    if bad:
        return complain(bad)
    complaints, traced, every = judge(nvcc, compiled, architectures(nvcc))
    complaints += forgotten(every)
    stored = stored_form(traced)
    if options.write:
        PREDICTIONS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        pages.write(stored)
    else:
        complaints += drift(json.loads(PREDICTIONS.read_text()) if PREDICTIONS.exists() else {}, stored)
    text = "\n".join(pages.tables(stored).values())
    (FOLDER / "static.md").write_text(text)
    (FOLDER / "static.json").write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    print(text)
    if complaints:
        return complain(complaints)
    print(f"checks passed: {len(every)} kernels read, {len(traced)} launches traced; none is worse than its bars")
    return 0


if __name__ == "__main__":
    sys.exit(main())
