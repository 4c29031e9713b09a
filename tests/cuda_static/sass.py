"""Parses machine code as nvdisasm prints it: instructions, and the scoreboards that they release and wait for.

Since compute capability 7.0 an instruction has 128 bits. Bits 105 to 125 are for the scheduler; nvdisasm prints them
only as part of the encoding. They hold the scoreboard that the instruction releases when its result is ready, and the
scoreboards that must be released before it may issue. So the encoding shows exactly where a warp waits for a load.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

HOW_TO_GET_NVDISASM = (
    "nvcc was found, but nvdisasm was not, and without it the machine code cannot be read: pip install -r "
    "requirements-dev.txt has it (nvidia-cuda-nvdisasm), and so have CUDA toolkits in their folder bin"
)
SCOREBOARDS = 6
NO_SCOREBOARD = 7
SECTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
GUARD = r"(?:@!?U?P\w\s+)?"
OPCODE = re.compile(rf"^\s+/\*[0-9a-f]{{4,}}\*/\s+{GUARD}([A-Z][\w.]*)", re.MULTILINE)
FIRST_HALF = re.compile(rf"^\s+/\*[0-9a-f]{{4,}}\*/\s+{GUARD}([A-Z][\w.]*).*/\* 0x[0-9a-f]{{16}} \*/$")
SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/$")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode, such as ``LDG.E.128``, and its encoding's bits for the scheduler."""

    opcode: str
    control: int

    @property
    def releases(self) -> int | None:
        """Return the scoreboard that is released when the result is ready."""
        number = self.control >> 5 & 7
        return None if number == NO_SCOREBOARD else number

    @property
    def waits(self) -> frozenset[int]:
        """Return the scoreboards that must be released before this instruction issues."""
        return frozenset(n for n in range(SCOREBOARDS) if self.control >> 11 >> n & 1)


@dataclass(frozen=True)
class Function:
    """A kernel: its mangled name, and its code, which is parsed on first access."""

    name: str
    listing: str

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Return the instructions in order of address."""
        return read_function(self.listing)

    @cached_property
    def opcodes(self) -> list[str]:
        """Return the opcodes in order of address, without parsing the encodings."""
        return OPCODE.findall(self.listing)


def find_nvdisasm() -> str | None:
    """Return the path of nvdisasm, from the toolkit or from the package nvidia-cuda-nvdisasm; None if not found."""
    for place in ("nvidia.cu13", "nvidia.cuda_nvdisasm"):
        spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec(place)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / "bin" / "nvdisasm").exists():
                return str(Path(folder) / "bin" / "nvdisasm")
    return shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")


@cache
def disassemble(cubin: Path, encoding: bool = True) -> dict[str, Function]:
    """Return the functions of a cubin by mangled name.

    Without ``encoding``, disassembling is faster, and the functions have only opcodes.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise FileNotFoundError(HOW_TO_GET_NVDISASM)
    how = ["-hex"] if encoding else ["--no-dataflow"]
    done = subprocess.run([tool, *how, "-c", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"nvdisasm does not read {cubin.name}: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(listing: str) -> dict[str, Function]:
    """Split the output of ``nvdisasm -hex -c`` into functions."""
    begins = list(SECTION.finditer(listing))
    if not begins:
        raise ValueError("the listing holds no function")
    ends = [one.start() for one in begins[1:]] + [len(listing)]
    return {one[1]: Function(one[1], listing[one.end() : end]) for one, end in zip(begins, ends, strict=True)}


def read_function(listing: str) -> list[Instruction]:
    """Parse the instructions of one function; raise an error for a line that cannot be parsed."""
    instructions: list[Instruction] = []
    opcode: str | None = None
    for line in listing.splitlines():
        if found := FIRST_HALF.match(line):
            opcode = found[1]
        elif found := SECOND_HALF.match(line):
            if opcode is None:
                raise ValueError(f"the second half of an instruction without its first: {line!r}")
            instructions.append(Instruction(opcode, int(found[1], 16) >> 41 & 0x1FFFFF))
            opcode = None
        elif line.lstrip().startswith("/*"):
            raise ValueError(f"a line is not understood: {line!r}")
    if opcode is not None:
        raise ValueError("the listing ends within an instruction")
    return instructions
