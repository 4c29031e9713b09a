"""The launches that the kernels' host functions make, as ``record.cpp`` writes them down."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine_code import FOLDER, ROOT, Compiled

ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+(?:\.ptr\s+[.\w\s]*?)?[\w$]+(?:\[(\d+)\])?(?:,|\s|$)"
)


@dataclass(frozen=True)
class Recorded:
    """One launch: the kernel's mangled name, how it was started, and its arguments as the kernel finds them."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    cluster: int
    arguments: bytes


@dataclass
class Case:
    """One call of an operator: its buffers (name, address, bytes), its launches, and the bytes that it cleared."""

    name: str
    buffers: list[tuple[str, int, int]] = field(default_factory=list)
    launches: list[Recorded] = field(default_factory=list)
    memsets: list[int] = field(default_factory=list)


def parameters(ptx: str) -> dict[str, list[tuple[int, int]]]:
    """Return the sizes and alignments of the parameters of every kernel in a text of PTX."""
    found = {}
    for name, listed in ENTRY.findall(ptx):
        sizes = [
            (int(bits) // 8 * int(count or 1), int(align or 0) or int(bits) // 8)
            for align, bits, count in PARAMETER.findall(listed)
        ]
        if len(sizes) != listed.count(".param"):
            raise ValueError(f"the parameters of {name} are not understood: {listed}")
        found[name] = sizes
    return found


def lay_out(arguments: list[bytes], alignments: list[int]) -> bytes:
    """Lay arguments out as a kernel finds them: one after the other, each aligned."""
    packed = b""
    for one, alignment in zip(arguments, alignments, strict=True):
        packed += bytes(-len(packed) % alignment) + one
    return packed


def read(text: str, sizes: dict[str, list[tuple[int, int]]]) -> dict[str, Case]:
    """Read what ``record`` prints."""
    cases: dict[str, Case] = {}
    current = Case("")
    for line in text.splitlines():
        word, rest = line.split(" ", 1)
        parts = rest.split()
        if word == "case":
            current = cases[rest] = Case(rest)
        elif word == "buffer":
            current.buffers.append((parts[0], int(parts[1]), int(parts[2])))
        elif word == "memset":
            current.memsets.append(int(parts[0]))
        elif word == "launch":
            blocks, threads, shared, cluster = map(int, parts[1:5])
            arguments = lay_out([bytes.fromhex(one) for one in parts[5:]], [align for _, align in sizes[parts[0]]])
            current.launches.append(Recorded(parts[0], blocks, threads, shared, cluster, arguments))
        else:
            raise ValueError(f"not understood: {line!r}")
    return cases


def record(nvcc: str, compiled: list[Compiled], folder: Path = FOLDER) -> dict[str, Case]:
    """Build ``record`` with the objects that were compiled, run it, and return the calls by their names."""
    sizes = {name: of for one in compiled for name, of in parameters(one.ptx("sm_90").read_text()).items()}
    source = Path(__file__).with_name("record.cpp")
    parts = [source.read_text(), *(str(one.folder) for one in compiled)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    program, table = folder / f"record-{key}", folder / "parameters.txt"
    table.write_text("".join(f"{name} {' '.join(str(size) for size, _ in of)}\n" for name, of in sizes.items()))
    if not program.exists():
        for old in folder.glob("record-*"):
            old.unlink()
        command = [
            nvcc, "-std=c++20", "-cudart=none", f"-I{ROOT / 'csrc'}", str(source),
            str(ROOT / "csrc/kernels/refuse_launch.cpp"), *(str(one.object) for one in compiled), "-o", str(program),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"record.cpp does not build: {done.stderr[-3000:]}")
    return read(subprocess.run([program, table], capture_output=True, text=True, check=True).stdout, sizes)
