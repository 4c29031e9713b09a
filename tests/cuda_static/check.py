"""Checks the kernels' machine code against rules and against the limits in bars.json.

    python tests/cuda_static/check.py

For every architecture that ships, there must be no spill, no 4-byte store where 16-byte stores are intended, no fused
multiply-add where sums must equal the CPU's bit for bit, and no communication between blocks. bars.json holds limits
for the calls of record.cpp, which have the shapes of the design: registers, loads in flight together, launches and
memsets, for the kernels' sm_90 code. Without nvcc nothing is checked, and the output says so; nvcc without nvdisasm is
an error.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import recorded
import sass
from counters import Statics, loads_together, statics
from machine_code import FOLDER, Compiled, architectures, compile_all, complain, find_nvcc, parse

BARS = Path(__file__).with_name("bars.json")
OF_BARS = "sm_90"
AT_MOST = ("registers", "launches", "memsets")
AT_LEAST = ("16-byte loads together",)
IDEAL = {"launches": 1, "memsets": 0}
"""The design's goals. A limit in bars.json that allows more states its reason."""

# Kernels that write results only in packs of 16 bytes, and kernels without divisions whose sums must equal the CPU's.
PACKED_NAMES = (
    "dispatch_kernel<uint4", r"combine_kernel<\w+, 16,", "expert_activation_kernel<.*(BFloat16|Float16)>",
    "expert_activation_backward_kernel<.*(BFloat16|Float16)>",
)  # fmt: skip
UNFUSED_NAMES = ("dispatch_kernel<", "combine_kernel<", "combine_backward_kernel<")
PACKED = re.compile("|".join(PACKED_NAMES))
UNFUSED = re.compile("|".join(UNFUSED_NAMES))
# Kernels whose blocks may communicate, each with the reason.
MAY_COMMUNICATE: dict[str, str] = {}


def static_complaints(found: list[Statics]) -> list[str]:
    """Return the complaints about the kernels' code for one architecture."""
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
    """Return a complaint for each rule that applies to no kernel."""
    names = [one.name for one in found]
    return [
        f"no kernel is called {pattern!r}, for which there is a rule"
        for pattern in (*PACKED_NAMES, *UNFUSED_NAMES)
        if not any(re.match(pattern, name) for name in names)
    ]


def bar_complaints(figures: dict[str, dict[str, float]], bars: dict[str, Any]) -> list[str]:
    """Return complaints about figures that are worse than their limits or have no limit, and about unused limits."""
    complaints = [f"{case}: bars.json has bars for it, but it was not recorded" for case in bars if case not in figures]
    for case, found in figures.items():
        for name, value in found.items():
            bar = bars.get(case, {}).get(name)
            if bar is None:
                complaints.append(f"{case}: no bar for {name} (it is {value:g})")
            elif name in AT_MOST and value > bar:
                complaints.append(f"{case}: {name} is {value:g}, and may be {bar:g} at most")
            elif name in AT_LEAST and value < bar:
                complaints.append(f"{case}: {name} is {value:g}, and must be {bar:g} at least")
    return complaints


def figures_of(compiled: list[Compiled], cases: dict[str, recorded.Case]) -> dict[str, dict[str, float]]:
    """Return the figures of every call; for a call with several launches, those of the worst kernel."""
    registers = {
        kernel.name: kernel.registers
        for one in compiled
        for kernel in parse(one.report, one.source.name)
        if kernel.architecture == OF_BARS
    }
    functions = {name: function for one in compiled for name, function in sass.disassemble(one.cubin(OF_BARS)).items()}
    figures: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        together = [loads_together(functions[kernel].instructions) for kernel in case.launches]
        figures[name] = {
            "registers": max(registers[kernel] for kernel in case.launches),
            "16-byte loads together": min(filter(None, together), default=0),
            "launches": len(case.launches),
            "memsets": case.memsets,
        }
    return figures


def judge(
    nvcc: str, compiled: list[Compiled], of_architectures: list[str], *, folder: Path = FOLDER, only: str = ""
) -> tuple[list[str], dict[str, dict[str, float]], list[Statics]]:
    """Read the code of all kernels, or of the source ``only``.

    Returns:
        The complaints, the figures of the recorded calls, and the counts for each kernel.
    """
    read = [one for one in compiled if only in one.source.name]
    every = statics(read, of_architectures)
    complaints = static_complaints(every)
    cases = recorded.record(nvcc, compiled, folder)
    names = {kernel.name for one in read for kernel in parse(one.report, one.source.name)}
    cases = {name: case for name, case in cases.items() if set(case.launches) <= names}
    figures = figures_of(read, cases)
    bars = {name: of for name, of in json.loads(BARS.read_text()).items() if not only or name in cases}
    complaints += bar_complaints(figures, bars)
    return complaints, figures, every


def main() -> int:
    """Compile, read and check the kernels; return 1 if there are complaints."""
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
    complaints, figures, every = judge(nvcc, compiled, architectures(nvcc))
    complaints += forgotten(every)
    for case, found in figures.items():
        print(f"{case}: {', '.join(f'{name} {value:g}' for name, value in found.items())}")
    if complaints:
        return complain(complaints)
    print(f"checks passed: {len(every)} kernels read, {len(figures)} calls recorded; none is worse than its bars")
    return 0


if __name__ == "__main__":
    sys.exit(main())
