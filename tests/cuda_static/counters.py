"""The figures of every kernel and of every shape of the design, from the compiler's report and its machine code."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import sass
from cases import WORK, blocks_with_work, trace
from launches import Result
from machine_code import Compiled, Kernel, demangle, parse
from model import GPUS, Occupancy, Prediction, bytes_in_flight, occupancy, predict
from recorded import Case, Recorded

TRACED = "sm_90"
FUSED = ("FFMA", "DFMA", "FFMA2")
STORE = re.compile(r"STG?\b(?!.*\.(U8|S8|U16|S16|64|128))")
"""Stores of 4 bytes to global memory."""


@dataclass(frozen=True)
class Line:
    """One launch of one shape."""

    case: str
    kernel: str
    launch: Recorded
    registers: int
    held: Occupancy
    result: Result
    in_flight: float
    memsets: int
    predictions: dict[str, Prediction]

    @property
    def figures(self) -> dict[str, float]:
        """What bars are set for, of a launch."""
        work = WORK[self.case]
        warps = blocks_with_work(work, self.launch) * -(-self.launch.threads // 32)
        found: dict[str, float] = {
            "registers": self.registers,
            "instructions an element": self.result.instructions_a_warp * 32 * warps / work.elements,
        }
        if work.payload:
            found["epochs a round"] = self.result.epochs / work.rounds
        moved: dict[str, list[float]] = defaultdict(list)
        for (way, name), entry in self.result.traffic.items():
            if way != "atomic" and (name in work.payload or name in OUTPUTS):
                moved[way].append(entry.bytes_a_sector)
                if way == "store":
                    found["narrowest store, bytes"] = min(min(entry.widths), found.get("narrowest store, bytes", 16))
        if moved:
            found["bytes a sector"] = min(one for listed in moved.values() for one in listed)
        return found


OUTPUTS = frozenset({"out", "dy"})
"""Buffers that are written a row at a time."""


def lines(compiled: list[Compiled], cases: dict[str, Case]) -> list[Line]:
    """Trace every launch of every call, and predict its time."""
    reports = {
        (kernel.name, kernel.architecture): kernel for one in compiled for kernel in parse(one.report, one.source.name)
    }
    functions = {name: function for one in compiled for name, function in sass.disassemble(one.cubin(TRACED)).items()}
    found = []
    for case in cases.values():
        for launch, result in zip(case.launches, trace(case, functions), strict=True):
            report = reports[launch.kernel, TRACED]
            held = occupancy(report.registers, launch.threads, report.shared + launch.shared_bytes)
            work = WORK[case.name]
            predictions = {
                gpu.name: predict(case, result, blocks_with_work(work, launch), launch.threads, held, work, gpu)
                for gpu in GPUS
            }
            in_flight = bytes_in_flight(result, held, work)
            (name,) = demangle([launch.kernel])
            found.append(
                Line(case.name, name, launch, report.registers, held, result, in_flight, len(case.memsets), predictions)
            )
    return found


@dataclass(frozen=True)
class Statics:
    """What stands in the machine code of one kernel for one architecture, whether it is reached or not."""

    kernel: Kernel
    name: str
    narrow_stores: int
    fused: int
    to_others: tuple[str, ...]


# What makes one block wait for, or see the work of, another: fences beyond the block, atomics that return something,
# loads past the caches that other blocks do not share, clusters. Blocks may add to counters that none of them reads
# (RED) and write past L1 (ST.STRONG.GPU, which __stcg becomes); atomics in shared memory (ATOMS) stay in the block.
BETWEEN_BLOCKS = re.compile(
    r"^(MEMBAR\.(?!\w*\.?CTA)|ERRBAR|CCTL\.IVALL|ATOMG?\.|LDG?\..*STRONG|STG?\..*STRONG\.SYS|UCGABAR|MAPA|SYNCS|NANOSLEEP)"
)


def statics(compiled: list[Compiled], architectures: list[str]) -> list[Statics]:
    """Read every kernel's code for these architectures; several files at a time."""
    jobs = [(one, name) for name in architectures for one in compiled]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # nvdisasm runs in processes of its own
        return [found for of_file in pool.map(lambda job: statics_of(*job), jobs) for found in of_file]


def statics_of(one: Compiled, architecture: str) -> list[Statics]:
    """Read the kernels of one file."""
    found = []
    functions = sass.disassemble(one.cubin(architecture), encoding=False)
    kernels = [kernel for kernel in parse(one.report, one.source.name) if kernel.architecture == architecture]
    for kernel, name in zip(kernels, demangle([kernel.name for kernel in kernels]), strict=True):
        function = functions[kernel.name]
        opcodes = function.opcodes
        stores = [one for one in opcodes if STORE.match(one)]
        others = {one for one in opcodes if BETWEEN_BLOCKS.match(one)}
        fused = [one for one in opcodes if one.split(".")[0] in FUSED]
        found.append(Statics(kernel, name, len(stores), len(fused), tuple(sorted(others))))
    return found
