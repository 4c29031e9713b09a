"""Counts instructions in the kernels' machine code: stores, fused multiply-adds, fences, and loads in flight."""

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
"""Loads of 16 bytes from global memory, which load rows; narrower loads are for indices, weights and counts."""
# Instructions by which a block can wait for another block or see its results: fences beyond the block, atomics that
# return a value, loads that bypass the caches of one multiprocessor, clusters. Blocks may add to counters that no block
# reads (RED) and bypass L1 when they write (ST.STRONG.GPU, from __stcg); atomics in shared memory (ATOMS) stay within
# the block.
BETWEEN_BLOCKS = re.compile(
    r"^(MEMBAR\.(?!\w*\.?CTA)|ERRBAR|CCTL\.IVALL|ATOMG?\.|LDG?\..*STRONG|STG?\..*STRONG\.SYS|UCGABAR|MAPA|SYNCS|NANOSLEEP)"
)


def loads_together(instructions: Iterable[sass.Instruction]) -> float:
    """Return the mean number of 16-byte loads that a kernel has in flight together.

    Loads are grouped in order of address; a new group begins after the kernel waits for a result of the current group.
    Each instruction counts once, in loops and on both sides of a branch.
    """
    loads = groups = 0
    under_way: set[int] = set()  # the scoreboards that loads of the current group release
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
    """Counts of instructions in the machine code of one kernel for one architecture, reachable or not."""

    kernel: Kernel
    name: str
    narrow_stores: int
    fused: int
    to_others: tuple[str, ...]


def statics(compiled: list[Compiled], architectures: list[str]) -> list[Statics]:
    """Count the instructions of every kernel for these architectures; several files are read in parallel."""
    jobs = [(one, name) for name in architectures for one in compiled]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # nvdisasm runs in processes of its own
        return [found for of_file in pool.map(lambda job: statics_of(*job), jobs) for found in of_file]


def statics_of(one: Compiled, architecture: str) -> list[Statics]:
    """Count the instructions of the kernels of one file."""
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
