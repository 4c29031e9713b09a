"""Machine code as nvdisasm prints it: instructions with their operands and what they wait for.

An instruction of compute capability 7.0 and later is 128 bits. Bits 105 to 125 are for the scheduler, and nvdisasm
prints them in the encoding alone: how many cycles to stall, the scoreboard that the instruction releases when its
result is there (or when it has read its operands), and the scoreboards that must be released before it may issue. So
the encoding says exactly where a warp waits for a load; nothing has to be inferred from registers.
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
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w\s+)?([A-Z][\w.]*)", re.MULTILINE)
LABEL = re.compile(r"^([.$][\w.$]+):$")
FIRST_HALF = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x([0-9a-f]{16}) \*/$")
SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/$")
GUARD = re.compile(r"^@(!?)(U?P(?:\d|T))\s+")


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@!P0 LDG.E.128 R4, desc[UR4][R2.64]`` at its address."""

    address: int
    text: str
    control: int

    @cached_property
    def guard(self) -> tuple[str, bool] | None:
        """The predicate that decides whether it takes effect, and its negation; None where it always does."""
        found = GUARD.match(self.text)
        return (found[2], found[1] == "!") if found else None

    @cached_property
    def body(self) -> str:
        """The instruction without its guard."""
        return GUARD.sub("", self.text)

    @cached_property
    def opcode(self) -> str:
        """Such as ``LDG.E.128``."""
        return self.body.split(None, 1)[0]

    @cached_property
    def kind(self) -> str:
        """The opcode without its modifiers; ``F2F.F64`` widens, with the same ones as ``F2F``, which rounds."""
        return "F2F.F64" if self.opcode.startswith("F2F.F64.") else self.opcode.split(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """The opcode's modifiers."""
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def operands(self) -> list[str]:
        """The operands, without hints such as ``.reuse``."""
        rest = self.body.split(None, 1)[1] if " " in self.body else ""
        return [part.strip().replace(".reuse", "") for part in rest.split(",")] if rest else []

    @property
    def stall(self) -> int:
        """Cycles before the warp's next instruction may issue."""
        return self.control & 15

    @property
    def releases(self) -> int | None:
        """The scoreboard that is released when the result is there."""
        number = self.control >> 5 & 7
        return None if number == NO_SCOREBOARD else number

    @property
    def releases_after_reading(self) -> int | None:
        """The scoreboard that is released when the operands were read, so that their registers may be written."""
        number = self.control >> 8 & 7
        return None if number == NO_SCOREBOARD else number

    @property
    def waits(self) -> frozenset[int]:
        """The scoreboards that must be released before it issues."""
        return frozenset(n for n in range(SCOREBOARDS) if self.control >> 11 >> n & 1)

    @cached_property
    def bytes(self) -> int:
        """The width of a memory access, a lane."""
        for name, width in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
            if name in self.modifiers:
                return width
        return 4


@dataclass(frozen=True)
class Function:
    """A kernel: its mangled name, its instructions by address, and where its labels lead; read when asked for."""

    name: str
    listing: str

    @cached_property
    def instructions(self) -> dict[int, Instruction]:
        """Every instruction by its address."""
        return self._read[0]

    @cached_property
    def labels(self) -> dict[str, int]:
        """The addresses of the labels."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[dict[int, Instruction], dict[str, int]]:
        return read_function(self.listing)

    @cached_property
    def opcodes(self) -> list[str]:
        """The opcodes in order of address, without reading the rest."""
        return OPCODE.findall(self.listing)


def find_nvdisasm() -> str | None:
    """Find the disassembler: of the toolkit, or of the package nvidia-cuda-nvdisasm."""
    for place in ("nvidia.cu13", "nvidia.cuda_nvdisasm"):
        spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec(place)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / "bin" / "nvdisasm").exists():
                return str(Path(folder) / "bin" / "nvdisasm")
    return shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")


@cache
def disassemble(cubin: Path, encoding: bool = True) -> dict[str, Function]:
    """Return the functions of a file of machine code, by their mangled names.

    Without ``encoding`` it is quicker, and the functions have opcodes alone.
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
    """Split what ``nvdisasm -hex -c`` prints into functions."""
    begins = list(SECTION.finditer(listing))
    if not begins:
        raise ValueError("the listing holds no function")
    ends = [one.start() for one in begins[1:]] + [len(listing)]
    return {one[1]: Function(one[1], listing[one.end() : end]) for one, end in zip(begins, ends, strict=True)}


def read_function(listing: str) -> tuple[dict[int, Instruction], dict[str, int]]:
    """Read the instructions and the labels of one function. A line of code that is not understood is an error."""
    instructions: dict[int, Instruction] = {}
    addresses: dict[str, int] = {}
    half: tuple[int, str] | None = None
    labels: list[str] = []
    for line in listing.splitlines():
        if found := FIRST_HALF.match(line):
            half = int(found[1], 16), found[2]
        elif found := SECOND_HALF.match(line):
            if half is None:
                raise ValueError(f"the second half of an instruction without its first: {line!r}")
            address, text = half
            half = None
            instructions[address] = Instruction(address, text, int(found[1], 16) >> 41 & 0x1FFFFF)
            addresses.update(dict.fromkeys(labels, address))
            labels.clear()
        elif found := LABEL.match(line):
            labels.append(found[1])
        elif line.lstrip().startswith("/*"):
            raise ValueError(f"a line is not understood: {line!r}")
    if half is not None:
        raise ValueError("the listing ends within an instruction")
    return instructions, addresses
