"""Counts what stands in the machine code of the kernels: stores, fused multiply-adds, fences, loads that wait."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import sass
from machine_code import Compiled, Kernel, demangle, parse

FUSED = ("FFMA", "DFMA", "FFMA2")
STORE = re.compile(r"STG?\b(?!.*\.(U8|S8|U16|S16|64|128))")
"""Stores of 4 bytes to global memory."""
WIDE_LOAD = re.compile(r"LDG?\b.*\.128")
"""Loads of 16 bytes from global memory: of rows, where others are of indices, weights and counts."""
# What makes one block wait for, or see the work of, another: fences beyond the block, atomics that return something,
# loads past the caches that other blocks do not share, clusters. Blocks may add to counters that none of them reads
# (RED) and write past L1 (ST.STRONG.GPU, which __stcg becomes); atomics in shared memory (ATOMS) stay in the block.
BETWEEN_BLOCKS = re.compile(
    r"^(MEMBAR\.(?!\w*\.?CTA)|ERRBAR|CCTL\.IVALL|ATOMG?\.|LDG?\..*STRONG|STG?\..*STRONG\.SYS|UCGABAR|MAPA|SYNCS|NANOSLEEP)"
)


def loads_together(instructions: Iterable[sass.Instruction]) -> float:
    """Return how many loads of 16 bytes a kernel has under way together, on average over groups of them.

    A load begins a group where a result of the group before was waited for, in order of address: a loop's body counts
    once, and so does each of two ways that a warp may take.
    """
    loads = groups = 0
    under_way: set[int] = set()  # the scoreboards that loads of the present group release
    for one in instructions:
        if one.waits & under_way:
            under_way.clear()
        if WIDE_LOAD.match(one.opcode) and one.releases is not None:
            loads += 1
            groups += not under_way
            under_way.add(one.releases)
    return round(loads / groups, 2) if groups else 0.0


@dataclass(frozen=True)
class Statics:
    """What stands in the machine code of one kernel for one architecture, whether it is reached or not."""

    kernel: Kernel
    name: str
    narrow_stores: int
    fused: int
    to_others: tuple[str, ...]


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
