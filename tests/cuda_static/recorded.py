"""Builds and runs ``record.cpp``, and reads the launches of the kernels' host functions from its output."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine_code import FOLDER, ROOT, Compiled


@dataclass
class Case:
    """One call of an operator: the mangled names of the kernels that it launches, and the number of its memsets."""

    launches: list[str] = field(default_factory=list)
    memsets: int = 0


def read(text: str) -> dict[str, Case]:
    """Parse the output of ``record.cpp``."""
    cases: dict[str, Case] = {}
    current = Case()
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "case":
            current = cases[rest] = Case()
        elif word == "launch":
            current.launches.append(rest)
        elif word == "memset":
            current.memsets += 1
        else:
            raise ValueError(f"not understood: {line!r}")
    return cases


def record(nvcc: str, compiled: list[Compiled], folder: Path = FOLDER) -> dict[str, Case]:
    """Link ``record.cpp`` with the compiled objects, run it, and return the calls by name."""
    source = Path(__file__).with_name("record.cpp")
    parts = [source.read_text(), *(str(one.folder) for one in compiled)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    program = folder / f"record-{key}"
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
    return read(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
